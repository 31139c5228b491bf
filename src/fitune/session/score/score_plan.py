"""Plans a scoring: the engine that answers, and its predicted bytes, rows at once, seconds and cost.

The model is not loaded, nor is torch, but to measure a processor once."""

import os
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from fitune.data.sampling import TOKENS_PER_MESSAGE, bytes_per_token
from fitune.errors import DataError, ModelError, RecipeError
from fitune.measure.hardware import calibrated, detect_hardware, resolve_hardware
from fitune.models.headers import adapter_size
from fitune.planner.answering import AnsweringReport, name_of, plan_answering
from fitune.planner.clusters.score_fleet import ScoreRanking, rank_scoring
from fitune.planner.defaults import price_of
from fitune.recipe.score_recipe import ScoreRecipe
from fitune.score.plan import ScorePlan, names_of, plan_from
from fitune.score.questions import Input, first_row_has_choices
from fitune.session.clusters.fleet import FleetRequest, fleet_of, wanted_of
from fitune.session.doctor import measure_on_first_use
from fitune.session.events import Emit, Note
from fitune.units import format_seconds
from fitune.values.answering import EngineName, PlannedEngine, Questions
from fitune.values.machines.hardware import Hardware
from fitune.values.model.model_config import load_model_spec

_READ_AT_ONCE = 2**22
"""Bytes of text of which the tokenizer is shown a part."""


def plan_of(recipe: ScoreRecipe) -> ScorePlan:
    """The plan of a scoring, whose model and adapter are folders or Hub ids. Raises RecipeError for two adapters, and a
    run that trained none."""
    model, adapter = weights_and_adapter(recipe.model, recipe.adapter)
    return plan_from(recipe, model=model, adapter=adapter)


def weights_and_adapter(model: str, adapter: str) -> tuple[str, str]:
    """Weights and the adapter on them, where ``model`` names a run or an adapter, or ``adapter`` names a run; else both
    as they are. Raises RecipeError for two adapters, and for a run that trained none."""
    folder = Path(model)
    is_run, adapter_is_run = (
        (bool(word) and (Path(word) / "plan.json").is_file()) for word in (model, adapter)
    )
    is_base = not is_run and (
        (folder / "config.json").is_file() or not (folder / "adapter_config.json").is_file()
    )
    if is_base and not adapter_is_run:
        return model, adapter
    from fitune.session.named_models import find_model  # imports torch

    if adapter_is_run:
        found = find_model(adapter)
        if not found.adapter:
            raise RecipeError(f"--adapter {adapter}: the run has no adapter", hint=f"--model {found.model}")
        adapter = found.adapter
    if is_base:
        return model, adapter
    found = find_model(model)
    if adapter and found.adapter not in ("", adapter):
        raise RecipeError(
            f"--model {model} has the adapter {found.adapter}, and --adapter names {adapter}",
            hint=f"keep one of them; its base is {found.model}",
        )
    return found.model, found.adapter or adapter


def predict_scoring(
    recipe: ScoreRecipe, request: FleetRequest | None, *, gpu: str, gpus: int, emit: Emit
) -> AnsweringReport | ScoreRanking:
    """The plan for a machine, or with a ``request`` the ranking of a fleet's clusters in the order of what is wanted.

    Raises what ``plan_scoring`` raises.
    """
    plan = plan_of(recipe)
    if why := _why_loglikelihoods(plan):
        raise RecipeError(
            f"--plan and --fleet predict written answers, and {why}", hint="leave --plan and --fleet out"
        )
    if request is None:
        return plan_scoring(plan, engine=recipe.engine, gpu=gpu, gpus=gpus, emit=emit)
    engines = engines_for(recipe.engine, elsewhere=True)
    return rank_scoring(
        fleet_of(request), wanted_of(request), read_lengths(plan),
        lambda node, questions: _plan_on(plan, calibrated(node), engines, questions),
    )  # fmt: skip


def plan_scoring(
    plan: ScorePlan, *, engine: EngineName | None = None, gpu: str = "", gpus: int = 0, emit: Emit
) -> AnsweringReport:
    """The fastest way to answer on ``gpus`` of the GPU that is named, else on this machine, whose processor is measured
    first if it never was. Without an ``engine``: the fastest of all.

    Raises NothingFits with the arithmetic, RecipeError for what no plan knows, DataError for data without a row.
    """

    def hardware() -> Hardware:
        """``gpus`` GPUs of the named kind or of this machine; without a number one of a kind, all of the machine."""
        return resolve_hardware(gpu=gpu or None, gpus=gpus or (1 if gpu else detect_hardware().gpus_per_node))

    engines, found, questions = engines_for(engine, elsewhere=bool(gpu)), hardware(), read_lengths(plan)
    if not gpu and measure_on_first_use(found, emit=emit):  # assumed rates are off by two times and more
        found = hardware()
    return _plan_on(plan, found, engines, questions)


def _plan_on(
    plan: ScorePlan, hardware: Hardware, engines: Sequence[PlannedEngine], questions: Questions
) -> AnsweringReport:
    return plan_answering(
        load_model_spec(plan.model), questions, hardware, engines=engines, batch_size=plan.batch_size,
        adapter=adapter_size(plan.adapter), price=price_of(hardware.gpu),
    )  # fmt: skip


def with_fastest_engine(plan: ScorePlan, engine: EngineName | None, *, emit: Emit) -> ScorePlan:
    """The plan with its engine and devices on this machine's GPUs, chosen as --plan does without an ``engine``.

    As it is where nothing is to choose: without GPUs, for transformers alone, for a model that no plan knows, and where
    log-likelihoods of texts are asked unless ``engine`` is vllm, which is given as many devices as hold the model.
    """
    if engine == "transformers" or (not engine and not has_vllm()):
        return plan
    hardware = resolve_hardware(gpus=detect_hardware().gpus_per_node)  # 1 for a processor
    by_loglikelihood = bool(_why_loglikelihoods(plan))
    if (
        hardware.gpu.is_cpu
        or (engine == "vllm" and hardware.gpus_per_node == 1)
        or (by_loglikelihood and not engine)
    ):
        return plan
    engines = engines_for(engine, elsewhere=False)
    try:
        report = _plan_on(plan, hardware, engines, read_lengths(plan, by_loglikelihood=by_loglikelihood))
    except ModelError:
        return plan
    chosen, seconds = report.chosen.answering, format_seconds(report.chosen.time.seconds)
    emit(Note(f"engine: {name_of(chosen)}, predicted {seconds} (fitune score --plan says more)"))
    return replace(plan, engine=chosen.engine, devices=chosen.devices)


def _why_loglikelihoods(plan: ScorePlan) -> str:
    """Why log-likelihoods of given texts are computed and nothing is written; empty where answers are written."""
    if not plan.graders:
        is_choice = first_row_has_choices(plan.sources)
        return (
            f"rows with choices ({names_of(plan.sources)}) are graded by log-likelihoods" if is_choice else ""
        )
    from fitune.score.grades.graders import open_graders  # its libraries are not for every plan

    computing = (grader.name for grader in open_graders(plan.graders) if grader.row.grade_likelihoods)
    return next((f"--grader {name} weighs references" for name in computing), "")


def engines_for(name: EngineName | None, *, elsewhere: bool) -> tuple[PlannedEngine, ...]:
    """The engine of that name, else those that are here; on hardware ``elsewhere`` all. Raises RecipeError."""
    match name:
        case None:
            return ("transformers", "vllm") if elsewhere or has_vllm() else ("transformers",)
        case "transformers" | "vllm":
            return (name,)
    raise RecipeError(f"--engine {name}: its memory and speed cannot be predicted", hint="leave --plan out")


def has_vllm() -> bool:
    """True where FITUNE_VLLM_PYTHON names an environment with vLLM, or this one has it."""
    return bool(os.environ.get("FITUNE_VLLM_PYTHON")) or find_spec("vllm") is not None


def read_lengths(plan: ScorePlan, *, by_loglikelihood: bool = False) -> Questions:
    """Rows and tokens of the prompts: bytes of text by the bytes of a token, and the marks of a chat template.

    Rows that cannot be asked, or have no room for an answer, are left out. ``by_loglikelihood``: prompts with the texts
    behind them, and no new tokens.
    """
    room, named = load_model_spec(plan.model).max_seq_len, names_of(plan.sources)
    sizes: list[tuple[int, int]] = []
    texts: list[str] = []
    shown, new = 0, 1 if by_loglikelihood else plan.sampling.max_new_tokens
    data = Input(sources=plan.sources, id_column=plan.id_column, by_loglikelihood=by_loglikelihood)
    for question in data.questions():
        if question.problem:
            continue
        given = (question.choices or (question.expected or "",)) if by_loglikelihood else ()
        text = "\n".join([question.text, question.tools, *given])
        sizes.append((len(text.encode("utf-8", "replace")), len(question.messages)))
        new = max(new, int(dict(question.own).get("max_new_tokens", 0)))
        if shown < _READ_AT_ONCE:
            texts.append(text)
            shown += sizes[-1][0]
    per_token, counted = bytes_per_token(texts, Path(plan.model).expanduser())
    prompts = [max(1, round(size / per_token) + TOKENS_PER_MESSAGE * (turns + 1)) for size, turns in sizes]
    fitting = [tokens for tokens in prompts if not room or tokens + new <= room]
    if not prompts:
        raise DataError(f"{named}: no row can be answered")
    if not fitting:
        longest = max(prompts)
        raise DataError(
            f"{named}: no row can be answered: prompt {longest:,} + max_new_tokens {new:,} = {longest + new:,} tokens, "
            f"the model has room for {room:,}",
            hint="a smaller --max-new-tokens",
        )
    left = len(prompts) - len(fitting)
    without = f"; without {left:,} rows that have no room for an answer" if left else ""
    return Questions(
        rows=len(fitting), prompt_tokens=sum(fitting), longest_prompt=max(fitting), new_tokens=new,
        guess=f"at {counted}{without}",
    )  # fmt: skip
