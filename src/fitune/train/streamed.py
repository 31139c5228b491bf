"""The export of weights that no rank holds whole: streamed where the names allow it, else whole on the first rank."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from fitune.checkpoint.export import Exported
from fitune.checkpoint.resume import load_checkpoint
from fitune.checkpoint.streamed import stored_names
from fitune.checkpoint.streamed_export import Texts, stream_adapter, stream_full, stream_merged
from fitune.models.adapter_config import WEIGHTS
from fitune.models.door import empty_model, model_folder, read_config, read_generation_config
from fitune.models.headers import own_name
from fitune.models.language_model import LanguageModel, language_model
from fitune.models.weight_files import base_reference, stored_tensors
from fitune.models.weights import compute_dtype
from fitune.spec.counts import count_parameters
from fitune.spec.plan import Plan, Zero
from fitune.spec.reports import MergedLoss
from fitune.train.again import Source, with_weights
from fitune.train.export import Handover, Kind, trained_kind
from fitune.train.prepare import tuned


def streamed_handover(weights: Mapping[str, Tensor], *, plan: Plan, **words: Any) -> Handover:
    """The handover of ``weights``, which are asked for once each and in their order."""
    model = model_on_meta(plan, weights)
    if model is not None:
        kept = (
            weights if trained_kind(plan) == "full" else dict(weights)
        )  # adapters are small, and written twice
        return StreamedHandover(plan=plan, model=model, weights=kept, **words)
    whole = with_weights(plan, dict(weights), dtype=compute_dtype(plan.precision), device=torch.device("cpu"))
    return Handover(plan=plan, model=whole, **words)


def model_on_meta(plan: Plan, trained: Mapping[str, Tensor]) -> LanguageModel | None:
    """The plan's model without content; None where its files name tensors otherwise than the model does (fused
    experts, GPT-2's), or its tables grow: then it has to be in memory to be written."""
    if plan.added_tokens:
        return None
    folder = model_folder(plan.model_path)
    with torch.device("meta"):
        model = empty_model(read_config(str(folder)))
        if not stored_names(model) <= stored_tensors(folder).keys() <= model.state_dict().keys():
            return None
        model.generation_config = read_generation_config(folder) or model.generation_config
        whole = tuned(model, plan)
    names = {name for name, parameter in whole.named_parameters() if parameter.requires_grad}
    return language_model(whole, plan.loss) if names == trained.keys() else None


def stored_weights(plan: Plan, source: Source) -> Mapping[str, Tensor] | None:
    """The weights that a run trained, read from ``source`` tensor by tensor, where its devices could not hold the model
    and a second copy of it; None where they could: then the export is verified by its answers, too."""
    if not isinstance(plan.sharding, Zero) or source.kind == "full" or _fits_twice(plan):
        return None
    if source.kind == "checkpoint":
        return load_checkpoint(source.path, verified=True).tensors["model"]
    return {
        _with_adapter_name(own_name(name)): tensor
        for name, tensor in load_file(source.path / WEIGHTS).items()
    }


def _fits_twice(plan: Plan) -> bool:
    weights = count_parameters(plan.model).total * plan.precision.compute_bytes
    return 2 * weights <= plan.hardware.gpu.memory_bytes


def _with_adapter_name(name: str) -> str:
    """PEFT's files leave out the name of the adapter: ``lora_A.weight`` is ``lora_A.default.weight`` in the model, and
    DoRA's ``lora_magnitude_vector`` is ``lora_magnitude_vector.default.weight``."""
    return re.sub(r"\.(lora_[AB])\.weight$|\.(lora_magnitude_vector)$", r".\1\2.default.weight", name)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedHandover(Handover):
    """Weights that come one by one; ``model`` is on "meta"."""

    weights: Mapping[str, Tensor]

    def trained(self, target: Path | None = None, *, secure: bool) -> Path:
        kind = trained_kind(self.plan)
        words: dict[str, Any] = {**self._places(kind, target), "secure": secure}
        if kind == "adapter":
            base = base_reference(self.plan.model_path)
            done = stream_adapter(self.model.whole, self.weights, base=base, **words)
        else:
            done = stream_full(self.model.whole, self.weights, **self._base(), **words)
        return self._said(done)

    def merged(self, data: Any, target: Path | None = None) -> tuple[Path, MergedLoss | None]:
        """Fold the adapter into its base; what that does to the loss is not measured, for nobody holds the model."""
        done: Exported = stream_merged(
            self.model.whole, self.weights, computed=compute_dtype(self.plan.precision),
            **self._base(), **self._places("merged", target),
        )  # fmt: skip
        return self._said(done), None

    def _base(self) -> dict[str, Any]:
        return {"base": model_folder(self.plan.model_path), "dtype": self._dtype()}

    def _places(self, kind: Kind, target: Path | None) -> dict[str, Any]:
        words = self._words(kind, target)
        texts: Texts = (self.tokenizer, words["chat_template"], words["card"])
        return {"target": words["target"], "replace": words["replace"], "texts": texts}
