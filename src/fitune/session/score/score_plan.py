"""Predictions for a scoring: bytes, rows at once, seconds and cost.

The model is not loaded, nor is torch, but to measure a processor once."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from fitune.data.sampling import TOKENS_PER_MESSAGE, bytes_per_token
from fitune.errors import DataError, ModelError, RecipeError
from fitune.measure.hardware import detect_hardware, resolve_hardware
from fitune.models.adapter_size import adapter_size
from fitune.planner.answering import AnsweringReport, name_of, plan_answering
from fitune.planner.clusters.score_fleet import ScoreRanking, rank_scoring
from fitune.planner.defaults import price_of
from fitune.score.choices import first_row_has_choices
from fitune.score.engines.engine import engine_named
from fitune.score.plan import ScorePlan, names_of
from fitune.score.tasks import Question, read_questions
from fitune.session.clusters.fleet import FleetRequest, fleet_of, wanted_of
from fitune.session.events import Tell
from fitune.session.score.score_words import ScoreWords
from fitune.session.train.first_use import measure_on_first_use
from fitune.spec.answering import PlannedEngine, Questions
from fitune.spec.machines.hardware import Hardware
from fitune.spec.model.model_config import load_model_spec
from fitune.units import format_seconds

_READ_AT_ONCE = 2**22
"""Bytes of text of which the tokenizer is shown a part."""


def predict_scoring(
    words: ScoreWords, request: FleetRequest | None, *, gpu: str, gpus: int, tell: Tell
) -> AnsweringReport | ScoreRanking:
    """The plan for a machine, or with a ``request`` the ranking of a fleet's clusters. Raises what those do."""
    if request is not None:
        return score_on_fleet(words, request, gpu=gpu)
    return plan_scoring(words, gpu=gpu, gpus=gpus, tell=tell)


def plan_scoring(words: ScoreWords, *, gpu: str, gpus: int, tell: Tell) -> AnsweringReport:
    """The fastest way to answer on ``gpus`` of the GPU that is named, else on this machine, whose processor is measured
    first if it never was.

    Raises NothingFits with the arithmetic, RecipeError for what no plan knows, DataError for data without a row.
    """
    engines = engines_for(words.engine, elsewhere=bool(gpu))
    hardware, questions = _hardware(gpu, gpus), read_lengths(words)
    if not gpu and measure_on_first_use(hardware, tell=tell):  # assumed rates are off by two times and more
        hardware = _hardware(gpu, gpus)
    return plan_on(words, hardware, engines=engines, questions=questions)


def _hardware(gpu: str, gpus: int) -> Hardware:
    return resolve_hardware(gpu=gpu or None, gpus=gpus or (1 if gpu else _devices_here()))


def score_on_fleet(words: ScoreWords, request: FleetRequest, *, gpu: str) -> ScoreRanking:
    """The clusters of a fleet in the order of what is wanted. Raises RecipeError, NothingFits or DataError."""
    if gpu:
        raise RecipeError(
            f"--gpu {gpu} plans for one machine, and {request.file} lists clusters", hint="leave --gpu out"
        )
    engines = engines_for(words.engine, elsewhere=True)
    return rank_scoring(
        fleet_of(request), wanted_of(request), read_lengths(words),
        lambda node, questions: plan_on(words, node, engines=engines, questions=questions),
    )  # fmt: skip


def plan_on(
    words: ScoreWords, hardware: Hardware, *, engines: Sequence[PlannedEngine], questions: Questions
) -> AnsweringReport:
    return plan_answering(
        load_model_spec(words.model), questions, hardware, engines=engines, batch_size=words.batch_size,
        adapter=adapter_size(words.adapter), price=price_of(hardware.gpu),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Decided:
    """An engine, its devices, and both in words."""

    engine: PlannedEngine
    devices: int
    why: str


def engine_and_devices(plan: ScorePlan, engine: str) -> Decided | None:
    """The plan's engine on this machine's GPUs, chosen as --plan does where ``engine`` is empty.

    None where nothing is to choose: without GPUs, for transformers alone, for a model that no plan knows, and where
    texts are weighed unless ``engine`` is vllm, which is given as many devices as hold the model.
    """
    if engine == "transformers" or (not engine and not has_vllm()):
        return None
    hardware = resolve_hardware(gpus=_devices_here())
    weighed = _weighs(plan)
    if hardware.gpu.is_cpu or (engine == "vllm" and hardware.gpus_per_node == 1) or (weighed and not engine):
        return None
    words = ScoreWords(
        plan.model, plan.sources, plan.adapter, plan.sampling.max_new_tokens, plan.batch_size, engine, plan.id_column,
    )  # fmt: skip
    engines = engines_for(engine, elsewhere=False)
    try:
        report = plan_on(words, hardware, engines=engines, questions=_lengths(words, weighed=weighed))
    except ModelError:
        return None
    answering = report.chosen.answering
    seconds = format_seconds(report.chosen.time.seconds)
    why = f"{name_of(answering)}, predicted {seconds} (fitune score --plan says more)"
    return Decided(answering.engine, answering.devices, why)


def _devices_here() -> int:
    """GPUs of this machine; 1 for its processor."""
    return detect_hardware().gpus_per_node


def _weighs(plan: ScorePlan) -> bool:
    """True where given texts are weighed and nothing is written."""
    if not plan.graders:
        return first_row_has_choices(plan.sources)
    from fitune.score.grades.graders import open_graders  # its libraries are not for every plan

    return any(grader.row.weigh for grader in open_graders(plan.graders))


def engines_for(name: str, *, elsewhere: bool) -> tuple[PlannedEngine, ...]:
    """The engine of that name, else those that are here; on hardware ``elsewhere`` all. Raises RecipeError."""
    match name:
        case "":
            return ("transformers", "vllm") if elsewhere or has_vllm() else ("transformers",)
        case "transformers" | "vllm":
            return (name,)
    raise RecipeError(
        f"--engine {engine_named(name)}: its memory and speed cannot be predicted", hint="leave --plan out"
    )


def has_vllm() -> bool:
    """True where FITUNE_VLLM_PYTHON names an environment with vLLM, or this one has it."""
    return bool(os.environ.get("FITUNE_VLLM_PYTHON")) or find_spec("vllm") is not None


def read_lengths(words: ScoreWords) -> Questions:
    """Rows and tokens of the prompts: bytes of text by the bytes of a token, and the marks of a chat template.

    Rows that cannot be asked, or have no room for an answer, are left out. Raises RecipeError for rows with choices.
    """
    if first_row_has_choices(words.sources):
        raise RecipeError(
            f"{names_of(words.sources)}: --plan predicts written answers, and rows with choices are graded by "
            "log-likelihoods",
            hint="leave --plan out",
        )
    return _lengths(words, weighed=False)


def _lengths(words: ScoreWords, *, weighed: bool) -> Questions:
    """``weighed``: prompts with the texts behind them, and no new tokens."""
    model, data = load_model_spec(words.model), names_of(words.sources)
    sizes: list[tuple[int, int]] = []
    texts: list[str] = []
    shown, new = 0, 1 if weighed else words.max_new_tokens
    for question in read_questions(words.sources, id_column=words.id_column, weighed=weighed):
        if question.problem:
            continue
        text = _text(question, weighed=weighed)
        sizes.append((len(text.encode("utf-8", "replace")), len(question.messages)))
        new = max(new, int(dict(question.own).get("max_new_tokens", 0)))
        if shown < _READ_AT_ONCE:
            texts.append(text)
            shown += sizes[-1][0]
    per_token, counted = bytes_per_token(texts, Path(words.model).expanduser())
    prompts = [max(1, round(size / per_token) + TOKENS_PER_MESSAGE * (turns + 1)) for size, turns in sizes]
    fitting = [tokens for tokens in prompts if not model.max_seq_len or tokens + new <= model.max_seq_len]
    if not fitting:
        raise _no_room(data, max(prompts, default=0), new, model.max_seq_len)
    left = len(prompts) - len(fitting)
    without = f"; without {left:,} rows that have no room for an answer" if left else ""
    return Questions(
        rows=len(fitting), prompt_tokens=sum(fitting), longest_prompt=max(fitting), new_tokens=new,
        guess=f"at {counted}{without}",
    )  # fmt: skip


def _no_room(data: str, longest: int, new: int, room: int) -> DataError:
    if not longest:
        return DataError(f"{data}: no row can be answered")
    return DataError(
        f"{data}: no row can be answered: prompt {longest:,} + max_new_tokens {new:,} = {longest + new:,} tokens, "
        f"the model has room for {room:,}",
        hint="a smaller --max-new-tokens",
    )


def _text(question: Question, *, weighed: bool) -> str:
    given = (question.choices or (question.expected or "",)) if weighed else ()
    return "\n".join([*(message.text for message in question.messages), question.tools, *given])
