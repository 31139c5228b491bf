"""The export of a finished run: an adapter, a merged or a full model, verified by reloading, with its model card.

Beside a whole model lies a Modelfile for Ollama, which reads no Jinja, and what it guesses from it is looked for in a
file that transformers 5 no longer fills. So the chat template is put into its language, where that is true: rendered
conversations are cut at their messages, and the pieces have to give every conversation again, character by character.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fitune.checkpoint.export import export_adapter, export_full, export_merged
from fitune.checkpoint.layout import ExportFolder, stored_tensors_of
from fitune.data.conversations.messages import Conversation, Message
from fitune.data.conversations.templates import ChatTemplate, load_template
from fitune.data.making import PreparedData
from fitune.data.reading.rows import BadRow
from fitune.files import read_text
from fitune.models.attention import use_attention
from fitune.models.language_model import LanguageModel, language_model, without_adapters
from fitune.models.readers import (
    empty_model,
    file_of_model,
    model_folder,
    read_config,
    read_generation_config,
)
from fitune.models.weight_files import base_reference, stored_dtype, stored_tensors
from fitune.models.weights import compute_dtype
from fitune.train.again import (
    EXPORT_FOLDERS,
    Kind,
    TrainedSource,
    trained_kind,
    trained_weights,
    with_weights,
)
from fitune.train.evaluate import measured_or_none, measured_trained, sample_loss
from fitune.train.prepare import tuned
from fitune.units import format_bytes, format_count, format_seconds
from fitune.values.counts import count_parameters
from fitune.values.plan import ChunkedLoss, Dense, Full, InBackward, Lora, Plan, Zero
from fitune.values.reports import MergedLoss, RunReport
from fitune.values.words import describe_base


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """A trained model and all that an export of it takes."""

    plan: Plan
    model: LanguageModel
    tokenizer: PreTrainedTokenizerBase
    report: RunReport
    on_note: Callable[[str], None]
    """A line for people."""
    weights: Mapping[str, Tensor] | None = None
    """Trained tensors, gathered one at a time while they are read; None where ``model`` holds them itself."""

    def trained(self, target: Path | None = None, *, secure: bool) -> Path:
        """Write what was trained, an adapter or all weights, and return its folder.

        ``secure``: nothing else holds it, so what cannot be verified is kept.
        """
        kind, path = trained_kind(self.plan), self.plan.model_path
        model: Any = self.model.whole
        into = self._folder(kind, target, secure=secure)
        if kind == "adapter":
            _, warnings = export_adapter(model, into, base=base_reference(path), weights=self.weights)
        else:
            _, warnings = export_full(model, into, dtype=self._dtype(), base_path=path, weights=self.weights)
        self._warn(warnings)
        return into.target

    def merged(
        self, data: Callable[[], PreparedData], target: Path | None = None
    ) -> tuple[Path, MergedLoss | None]:
        """Fold the adapter into its base; returns the folder and what that did to the loss on rows of ``data``: not
        measured where nobody holds the model."""
        loss, plan = None, self.plan
        if self.weights is None:
            loss = measured_or_none(lambda: measured_trained(plan, self.model, data()), self.on_note)

        def measured(merged: PreTrainedModel) -> str:
            """The model card of the merged model, whose loss is measured for it where that is possible."""
            nonlocal loss
            if (before := loss) is not None:
                use_attention(merged, plan.attention)
                model = language_model(merged, plan.loss)
                loss = measured_or_none(
                    lambda: replace(before, merged=sample_loss(plan, model, data(), before.rows)),
                    self.on_note,
                )
            return model_card(plan, replace(self.report, merged_loss=loss), kind="merged")

        whole: Any = self.model.whole
        into = self._folder("merged", target)
        _, warnings = export_merged(
            whole, into, base_path=plan.model_path, dtype=self._dtype(),
            weights=self.weights, card_of=measured,
        )  # fmt: skip
        self._warn(warnings)
        return into.target, None if loss is None or loss.merged != loss.merged else loss

    def _folder(self, kind: Kind, target: Path | None, *, secure: bool = False) -> ExportFolder:
        template = load_template(
            self.tokenizer, self.plan.data.chat_template, date=self.plan.data.chat_template_date
        )
        return ExportFolder(
            target=target or Path(self.plan.run.output_dir) / EXPORT_FOLDERS[kind],
            tokenizer=self.tokenizer,
            chat_template=template.source,
            card=model_card(self.plan, self.report, kind=kind),
            also={} if kind == "adapter" else self._for_converters(template),
            replace=target is None,  # a folder of the run's own; any other may hold what somebody needs
            secure=secure,
        )

    def _for_converters(self, template: ChatTemplate) -> dict[str, bytes]:
        """What makes other formats of a whole model: SentencePiece's vocabulary, which transformers does not write, and
        Ollama's Modelfile."""
        file = file_of_model(self.plan.model_path, "tokenizer.model")
        found = {} if file is None else {file.name: file.read_bytes()}
        architecture = type(without_adapters(self.model.whole)).__name__
        text = modelfile(architecture, self.tokenizer, template, has_vocabulary_file=bool(found))
        return {**found, **({"Modelfile": text.encode()} if text else {})}

    def _dtype(self) -> torch.dtype:
        """The base's own, whatever type it was trained in."""
        trained = compute_dtype(self.plan.precision)
        dtype = stored_dtype(model_folder(self.plan.model_path)) or trained
        if dtype != trained:
            self.on_note(f"exported in {_name(dtype)}, as the base is (trained in {_name(trained)})")
        return dtype

    def _warn(self, warnings: Sequence[str]) -> None:
        for warning in warnings:
            self.on_note(f"warning: {warning}")


def handover_of(
    model: LanguageModel | None, weights: Mapping[str, Tensor] | None, *, plan: Plan, **words: Any
) -> Handover:
    """The handover of ``model``, or of ``weights`` that no rank holds whole, which are asked for once each and in their
    order: the plan's model is then without content.

    In memory it has to be where its files lack what was not trained under the names that the model has (fused experts
    under an adapter, GPT-2's), or its tables grow.
    """
    if weights is None:
        assert model is not None, "one of both holds what was trained"
        return Handover(plan=plan, model=model, **words)
    if not plan.added_tokens:
        folder = model_folder(plan.model_path)
        with torch.device("meta"):
            empty = empty_model(read_config(str(folder)), compute_dtype(plan.precision))
            is_whole = stored_tensors_of(empty).keys() - weights.keys() <= stored_tensors(folder).keys()
            empty.generation_config = read_generation_config(folder) or empty.generation_config
            whole = tuned(empty, plan) if is_whole else empty
        names = {name for name, parameter in whole.named_parameters() if parameter.requires_grad}
        if is_whole and names == weights.keys():
            # adapters are small, and written twice
            kept = weights if trained_kind(plan) == "full" else dict(weights)
            return Handover(plan=plan, model=language_model(whole, plan.loss), weights=kept, **words)
    cpu, dtype = torch.device("cpu"), compute_dtype(plan.precision)
    return Handover(plan=plan, model=with_weights(plan, dict(weights), dtype=dtype, device=cpu), **words)


def stored_weights(plan: Plan, source: TrainedSource) -> Mapping[str, Tensor] | None:
    """The weights that a run trained, read from ``source`` tensor by tensor, where its devices could not hold the model
    and a second copy of it; None where they could: then the export is verified by its answers, too."""
    twice = 2 * count_parameters(plan.model).total * plan.precision.compute_bytes
    fits = twice <= plan.hardware.gpu.memory_bytes
    if not isinstance(plan.sharding, Zero) or source.kind == "full" or fits:
        return None
    return trained_weights(plan, source)


def _name(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]


def model_card(plan: Plan, report: RunReport, *, kind: str) -> str:
    """README.md of an export of this kind (train/again.py): figures, plan, and the recipe to do it again."""
    file, recipe = Path(plan.run.output_dir) / "recipe.yaml", ""
    if file.is_file():  # a run that was started from Python has none
        recipe = read_text(file, follow_links=False).rstrip()
    tuning, offload = plan.tuning, plan.offload
    places = {
        "weights": offload.parameters, "optimizer": offload.optimizer, "activations": offload.activations,
    }  # fmt: skip
    return _card().render(
        plan=plan, report=report, kind=kind, recipe=recipe, way=type(tuning).__name__,
        base="" if Path(plan.model_path).expanduser().is_dir() else plan.model_path,  # the Hub refuses a path
        sources=", ".join(Path(one.path).name for one in plan.data.sources),
        packed=describe_base(tuning.base) if isinstance(tuning, Lora) and tuning.base != Dense() else "",
        in_backward=isinstance(tuning, Full) and isinstance(tuning.update, InBackward),
        optimizer=type(plan.optimizer).__name__, chunked=isinstance(plan.loss, ChunkedLoss),
        on_host=[name for name, place in places.items() if place != "device"],
        count=format_count, seconds=format_seconds, bytes=format_bytes,
    )  # fmt: skip


@cache
def _card() -> Any:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    return environment.get_template("card.md")


IMPORTED = frozenset({
    "LlamaForCausalLM", "MixtralForCausalLM", "GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM",
    "Phi3ForCausalLM", "Qwen2ForCausalLM", "Olmo3ForCausalLM", "CohereForCausalLM", "Lfm2ForCausalLM",
})  # fmt: skip
"""Architectures whose safetensors `ollama create` takes and whose exports have the names that it looks for (its
convert/convert.go, August 2026). MistralForCausalLM and Qwen3ForCausalLM are not among them."""

_OPENING = Message("system", "be brief")
_TURNS = [Message("assistant" if number % 2 else "user", f"say {number}") for number in range(5)]


def modelfile(architecture: str, tokenizer: Any, template: ChatTemplate, *, has_vocabulary_file: bool) -> str:
    """The Modelfile; empty for what Ollama cannot import.

    ``has_vocabulary_file``: a tokenizer.model is there. Without one it takes every vocabulary for one of GPT-2's kind.
    """
    if architecture not in IMPORTED or not (has_vocabulary_file or "Ġ" in tokenizer.get_vocab()):
        return ""
    ends = [tokenizer.convert_ids_to_tokens(id) for id in sorted(template.stop_ids)]
    text = ollama_template(tokenizer, template)
    lines = ["FROM .", *(f'PARAMETER stop "{end}"' for end in ends if '"' not in end)]
    if text:
        lines.append(f'TEMPLATE """{text}"""')
    else:
        lines.append("# no TEMPLATE: Ollama's language does not say what chat_template.jinja does")
    return "\n".join(lines) + "\n"


def ollama_template(tokenizer: Any, template: ChatTemplate) -> str:
    """The chat template in Ollama's language, without tools and reasoning; empty where it cannot say the same.

    BOS is left out where the tokenizer puts it there by itself: Ollama does, too.
    """
    try:
        pieces = _pieces(template)
        bos = tokenizer.bos_token or ""
        if bos and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]:
            pieces = {
                name: text.removeprefix(bos) if name in _STARTS else text for name, text in pieces.items()
            }
    except (BadRow, ValueError):
        return ""
    if any(sign in text for text in pieces.values() for sign in ("{{", '"""')) or pieces["ask"].endswith('"'):
        return ""  # it stands between three quotes
    system, first = "", f"{{{{ if eq $i 0 }}}}{pieces['first']}"
    if "system" in pieces:
        system = f'{{{{ if eq .Role "system" }}}}{pieces["system"]}{{{{ .Content }}}}{{{{ end }}}}'
        first += f"{{{{ else if and $.System (eq $i 1) }}}}{pieces['after system']}"
    return (
        f'{{{{ range $i, $m := .Messages }}}}{system}{{{{ if eq .Role "user" }}}}{first}'
        f"{{{{ else }}}}{pieces['after answer']}{{{{ end }}}}{{{{ .Content }}}}{{{{ end }}}}"
        f'{{{{ if eq .Role "assistant" }}}}{pieces["answer"]}{{{{ .Content }}}}{{{{ end }}}}{{{{ end }}}}'
        f"{pieces['ask']}"
    )


_STARTS = ("system", "first")


def _pieces(template: ChatTemplate) -> dict[str, str]:
    """Returns the texts that the template puts around messages, by the place where each stands. Raises BadRow or
    ValueError where they depend on more than the role of a message and of the one before it."""
    cut = _between(template, _TURNS[:3])
    pieces = dict(zip(("first", "answer", "after answer", "ask"), cut, strict=True))
    starts: list[list[Message]] = [[]]
    with suppress(BadRow):  # some take no system message
        pieces["system"], pieces["after system"], _ = _between(template, [_OPENING, _TURNS[0]])
        starts.append([_OPENING])
    for messages in [[*start, *_TURNS[:count]] for start in starts for count in (1, 3, 5)]:
        if _said(pieces, messages) != template.prompt_text(Conversation(tuple(messages), "a try")):
            raise ValueError("the template looks at more than a message and the one before it")
    return pieces


def _between(template: ChatTemplate, messages: Sequence[Message]) -> list[str]:
    """The texts before, between and behind the contents of ``messages`` in their prompt."""
    text, found = template.prompt_text(Conversation(tuple(messages), "a try")), []
    for message in messages:
        before, is_there, text = text.partition(message.content)
        if not is_there:
            raise ValueError(f"{message.content} is not shown")
        found.append(before)
    return [*found, text]


def _said(pieces: dict[str, str], messages: Sequence[Message]) -> str:
    """The prompt that Ollama makes of ``pieces``."""
    text, before = "", ""
    for message in messages:
        first = {"": "first", "system": "after system"}.get(before, "after answer")
        name = {"system": "system", "assistant": "answer"}.get(message.role, first)
        text, before = f"{text}{pieces[name]}{message.content}", message.role
    return text + pieces["ask"]
