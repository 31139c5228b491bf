"""What a finished run hands over: an adapter, a merged model or a full one, each verified by reloading."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fitune.checkpoint.export import Exported, export_adapter, export_full, export_merged
from fitune.data.preparing import PreparedData
from fitune.data.templates import load_template
from fitune.models.identity import base_reference
from fitune.models.language_model import LanguageModel
from fitune.models.weights import compute_dtype, stored_dtype
from fitune.spec.plan import Lora, Plan
from fitune.spec.reports import MergedLoss, RunReport
from fitune.train.card import model_card
from fitune.train.merged_loss import measured_merged, measured_trained, or_say_why_not

Kind = Literal["adapter", "merged", "full"]
FOLDERS: dict[Kind, str] = {"adapter": "adapter", "merged": "merged", "full": "model"}
"""Kind of export -> its folder in the run directory."""
TITLES: dict[Kind, str] = {"adapter": "adapter", "merged": "merged model", "full": "model"}
"""Names of the exports for people."""


def trained_kind(plan: Plan) -> Kind:
    """The kind that holds all that was trained and nothing else."""
    return "adapter" if isinstance(plan.tuning, Lora) else "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """A trained model and all that an export of it takes."""

    plan: Plan
    model: LanguageModel
    tokenizer: PreTrainedTokenizerBase
    report: RunReport
    say: Callable[[str], None]
    """A line for people."""

    def trained(self, target: Path | None = None, *, secure: bool) -> Path:
        """Write what was trained, an adapter or all weights, and return its folder.

        ``secure``: nothing else holds it, so what cannot be verified is kept.
        """
        kind = trained_kind(self.plan)
        words: dict[str, Any] = {**self._words(kind, target), "secure": secure}
        if kind == "adapter":
            done = export_adapter(
                self.model.whole, self.tokenizer, base=base_reference(self.plan.model_path), **words
            )
        else:
            done = export_full(self.model.whole, self.tokenizer, dtype=self._dtype(), **words)
        return self._said(done)

    def merged(
        self, data: Callable[[], PreparedData], target: Path | None = None
    ) -> tuple[Path, MergedLoss | None]:
        """Fold the adapter into its base; returns the folder and what that did to the loss on rows of ``data``."""
        loss = or_say_why_not(lambda: measured_trained(self.plan, self.model, data()), self.say)

        def measured(merged: PreTrainedModel) -> str:
            nonlocal loss
            if loss is not None:
                loss = or_say_why_not(lambda: self._with_merged(loss, merged, data()), self.say)
            return model_card(self.plan, replace(self.report, merged_loss=loss), kind="merged")

        done = export_merged(
            self.model.whole, self.tokenizer, base_path=self.plan.model_path, dtype=self._dtype(),
            card_of=measured, **self._words("merged", target),
        )  # fmt: skip
        return self._said(done), None if loss is None or loss.merged != loss.merged else loss

    def _with_merged(
        self, loss: MergedLoss | None, merged: PreTrainedModel, data: PreparedData
    ) -> MergedLoss:
        assert loss is not None
        return replace(loss, merged=measured_merged(self.plan, merged, data, rows=loss.rows))

    def _words(self, kind: Kind, target: Path | None) -> dict[str, Any]:
        return {
            "target": target or Path(self.plan.run.output_dir) / FOLDERS[kind],
            "chat_template": load_template(self.tokenizer, self.plan.data.chat_template).source,
            "card": model_card(self.plan, self.report, kind=kind),
            "replace": target is None,  # a folder of the run's own; any other may hold what somebody needs
        }

    def _dtype(self) -> torch.dtype:
        """The base's own, whatever type it was trained in."""
        trained = compute_dtype(self.plan.precision)
        dtype = stored_dtype(self.plan.model_path) or trained
        if dtype != trained:
            self.say(f"exported in {_name(dtype)}, as the base is (trained in {_name(trained)})")
        return dtype

    def _said(self, done: Exported) -> Path:
        for warning in done.warnings:
            self.say(f"warning: {warning}")
        return done.path


def _name(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
