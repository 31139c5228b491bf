"""The parts of a causal language model that training touches, found once and named."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from fitune.errors import ModelError
from fitune.models.attention import Rows, attends_by_rows, row_mask
from fitune.models.blocks import blocks_of
from fitune.models.loss import loss_and_gradient, loss_sum
from fitune.models.rotary import rows_of_lengths
from fitune.spec.plan import ChunkedLoss, Loss


class Stream(Protocol):
    """One micro-batch: a flat stream of T tokens made of rows that do not see one another."""

    input_ids_T: Tensor
    labels_T: Tensor
    position_ids_T: Tensor
    sequence_lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModel:
    """``whole`` is what is saved; ``body`` turns ids into hidden states; ``head`` turns those into logits."""

    whole: PreTrainedModel | PeftModel
    body: nn.Module
    blocks: nn.ModuleList
    head: nn.Module
    softcap: float | None
    chunk_tokens: int | None
    by_rows: bool
    """True if attention keeps the rows apart by itself; otherwise it needs a mask."""
    device: torch.device
    dtype: torch.dtype

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.whole.named_parameters() if p.requires_grad}

    def hidden_states(self, batch: Stream) -> Tensor:
        """Last hidden states [T, D] of one stream."""
        lengths = batch.sequence_lengths
        separation: dict[str, Any] = (
            {"rows": Rows(lengths)}
            if self.by_rows
            else {"attention_mask": row_mask(lengths, dtype=self.dtype, device=self.device)}
        )
        with rows_of_lengths(lengths):
            output = self.body(
                input_ids=batch.input_ids_T.to(self.device)[None],
                position_ids=batch.position_ids_T.to(self.device)[None],
                use_cache=False,
                return_dict=True,  # whatever config.json says
                **separation,
            )
        hidden_TD: Tensor = output.last_hidden_state[0]
        return hidden_TD

    def loss_and_gradient(self, hidden_TD: Tensor, batch: Stream, *, scale: float) -> tuple[Tensor, Tensor]:
        """Summed loss and its scaled gradient for the hidden states (models/loss.py)."""
        labels_T = batch.labels_T.to(self.device)
        return loss_and_gradient(
            hidden_TD, labels_T, self.head, scale=scale, chunk_tokens=self.chunk_tokens, softcap=self.softcap
        )

    @torch.no_grad()
    def loss(self, batch: Stream) -> Tensor:
        """Summed loss of one stream, for evaluation."""
        hidden_TD = self.hidden_states(batch)
        labels_T = batch.labels_T.to(self.device)
        return loss_sum(hidden_TD, labels_T, self.head, chunk_tokens=self.chunk_tokens, softcap=self.softcap)


def language_model(whole: PreTrainedModel | PeftModel, loss: Loss) -> LanguageModel:
    """Find body, blocks and head. Raises ModelError when the model is not built of decoder blocks."""
    base = whole.get_base_model() if isinstance(whole, PeftModel) else whole
    body, head = base.base_model, base.get_output_embeddings()
    if head is None or body is base:
        raise ModelError(f"{type(base).__name__} has no language-modelling head")
    return LanguageModel(
        whole=whole,
        body=body,
        blocks=blocks_of(base),
        head=head,
        softcap=getattr(base.config.get_text_config(), "final_logit_softcapping", None),
        chunk_tokens=loss.chunk_tokens if isinstance(loss, ChunkedLoss) else None,
        by_rows=attends_by_rows(base),
        device=base.device,
        dtype=base.dtype,
    )
