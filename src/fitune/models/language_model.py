"""The parts of a causal language model that training touches: body, blocks and head.

Shapes: T tokens, D hidden size.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from fitune.errors import ModelError
from fitune.models.attention import attends_by_rows, row_mask, rows_of_lengths, takes_mask
from fitune.models.liger import operations_on
from fitune.models.loss_head import LossHead
from fitune.models.row_attention import Rows, sent
from fitune.values.plan import ChunkedLoss, Kernels, Loss, Recompute


class Stream(Protocol):
    """One micro-batch: a flat stream of T tokens made of rows that do not see one another. It is on the host, where
    what is counted makes no kernel wait."""

    input_ids_T: Tensor
    labels_T: Tensor
    position_ids_T: Tensor
    sequence_lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModel:
    """``whole`` is what is saved; ``body`` turns ids into hidden states; ``head`` turns those into losses."""

    whole: PreTrainedModel | PeftModel
    body: nn.Module
    blocks: nn.ModuleList
    head: LossHead
    by_rows: bool
    """True if attention keeps the rows apart by itself."""
    takes_mask: bool
    device: torch.device
    dtype: torch.dtype

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that get gradients, by their names in ``whole``."""
        return {name: p for name, p in self.whole.named_parameters() if p.requires_grad}

    def hidden_states(self, batch: Stream) -> Tensor:
        """Last hidden states [T, D] of one stream."""
        lengths = batch.sequence_lengths
        separation: dict[str, Any] = {}
        if self.by_rows:
            separation["rows"] = Rows(lengths)
        elif self.takes_mask:
            separation["attention_mask"] = row_mask(lengths, dtype=self.dtype, device=self.device)
        with rows_of_lengths(lengths):
            output = self.body(
                input_ids=sent(batch.input_ids_T, self.device)[None],
                position_ids=sent(batch.position_ids_T, self.device)[None],
                use_cache=False,
                return_dict=True,  # whatever config.json says
                **separation,
            )
        return output.last_hidden_state.squeeze(0)  # backward of [0] fills zeros and copies

    def divisor(self, *, rows: int, supervised_tokens: int) -> int:
        """Number that the summed loss of these rows is divided by: a mean over tokens."""
        return supervised_tokens

    def loss_and_gradient(self, hidden_TD: Tensor, batch: Stream, *, scale: float) -> tuple[Tensor, Tensor]:
        """Summed loss (fp32 scalar), and ``scale`` times its gradient for the hidden states [T, D]."""
        losses_S, gradient_TD = self.head.losses_and_gradient(hidden_TD, batch.labels_T, scale=scale)
        return losses_S.sum(), gradient_TD

    @torch.no_grad()
    def loss(self, batch: Stream) -> Tensor:
        """Summed loss of one stream, for evaluation."""
        return self.head.losses(self.hidden_states(batch), batch.labels_T).sum()


def language_model(
    whole: PreTrainedModel | PeftModel,
    loss: Loss,
    *,
    kernels: Kernels = "torch",
    device: torch.device | None = None,
) -> LanguageModel:
    """Find body, blocks and head. Raises ModelError when the model is not built of decoder blocks.

    ``device``: where it is trained, when that is not where it is.
    """
    base = without_adapters(whole)
    body, head = body_of(base), base.get_output_embeddings()
    if head is None or body is base:
        raise ModelError(f"{type(base).__name__} has no language-modelling head")
    config = base.config.get_text_config()
    return LanguageModel(
        whole=whole,
        body=body,
        blocks=blocks_of(base),
        head=LossHead(
            module=head,
            softcap=getattr(config, "final_logit_softcapping", None),
            # transformers' factor of the head's logits: Cohere's scale, one over Granite's scaling
            logit_scale=float(getattr(config, "logit_scale", None) or 1.0)
            / float(getattr(config, "logits_scaling", None) or 1.0),
            chunk_tokens=loss.chunk_tokens if isinstance(loss, ChunkedLoss) else None,
            cross_entropy=operations_on(device or base.device).cross_entropy if kernels == "liger" else None,
        ),
        by_rows=attends_by_rows(base),
        takes_mask=takes_mask(base),
        device=device or base.device,
        dtype=base.dtype,
    )


_RECURRENT = (
    "mamba",
    "delta",
    "rwkv",
    "lstm",
    "recurrent",
    "shortconv",
    "linearattention",
    "lightning",
)
"""Parts of names of modules that carry a state, or a convolution, along the whole stream."""


def carries_along(blocks: nn.ModuleList) -> bool:
    """True if a token of a stream sees those of the rows before it, whatever attention does."""
    names = {type(module).__name__ for module in blocks.modules()}
    return any("SSM" in name or part in name.lower() for name in names for part in _RECURRENT) or any(
        isinstance(module, nn.Conv1d) for module in blocks.modules()
    )


def without_adapters(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """``model`` without the adapters that PEFT has put into it."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def body_of(model: PreTrainedModel) -> nn.Module:
    """The part that turns ids into hidden states; the model itself where it has no such part.

    transformers looks for it by a name that Llama 4's class has for its checkpoints alone.
    """
    parts = [part for part in model.children() if isinstance(part, PreTrainedModel)]
    return parts[0] if model.base_model is model and len(parts) == 1 else model.base_model


def cache_argument(model: nn.Module) -> str | None:
    """Keyword by which ``model`` is given keys and values; None where it takes none. transformers 5.24 renamed it."""
    taken = inspect.signature(model.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in taken), None)


def blocks_of(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder blocks of a model without adapters: the one list of so many in its body, whatever that calls it."""
    body, count = body_of(model), model.config.get_text_config().num_hidden_layers
    level = list(body.children())
    while level:
        lists = [m for m in level if isinstance(m, nn.ModuleList) and len(m) == count]
        if len(lists) == 1:
            return lists[0]
        inner = [] if lists else [m for m in level if not isinstance(m, nn.ModuleList)]
        level = [child for m in inner for child in m.children()]
    raise ModelError(f"{type(body).__name__}: its blocks are not one list of {count}")


def embeds_for_blocks(body: nn.Module) -> bool:
    """True if the body hands each block embeddings of its own beside the residual stream (Gemma 3n, small Gemma 4)."""
    return hasattr(body, "embed_tokens_per_layer")


def recompute_blocks(blocks: Sequence[nn.Module], recompute: Recompute, *, has_dropout: bool) -> None:
    """Make the first ``recompute.blocks`` blocks recompute (Chen et al. 2016, arXiv 1604.06174).

    Random numbers are replayed only when there is dropout to replay.
    """
    for block in blocks[: recompute.blocks]:
        block.forward = _recomputed(block.forward, replay_random=has_dropout)


def _recomputed(forward: Callable[..., Any], *, replay_random: bool) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        """The block's forward, run again in backward."""
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=replay_random, **kwargs)

    return run


def compile_blocks(blocks: Sequence[nn.Module], *, backend: str = "inductor") -> None:
    """Let torch compile each block for any number of tokens.

    Before recompute, which then runs the compiled block twice. Without gradients (evaluation, generation with its
    cache) the block runs as it was: other shapes and arguments would be compiled again and again.
    """
    for block in blocks:
        block.forward = _compiled(block.forward, backend=backend)


def _compiled(forward: Callable[..., Any], *, backend: str) -> Callable[..., Any]:
    faster = torch.compile(forward, dynamic=True, backend=backend)

    def run(*args: Any, **kwargs: Any) -> Any:
        """The block's forward, compiled where it is trained."""
        return faster(*args, **kwargs) if torch.is_grad_enabled() else forward(*args, **kwargs)

    return run
