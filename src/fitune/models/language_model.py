"""The parts of a causal language model that training touches: body, blocks, head, and the loss in chunks of tokens.

The gradient of cross-entropy with respect to the logits is softmax − one-hot, so it is written over the logits in
place and multiplied with the head's weight and input, without autograd and its copies.
Shapes: T tokens, D hidden size, V vocabulary.
"""

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
from fitune.models.liger import CrossEntropy, operations_on
from fitune.models.row_attention import Rows, sent
from fitune.spec.model.block_profile import IGNORED
from fitune.spec.plan import ChunkedLoss, Kernels, Loss, Recompute


class Stream(Protocol):
    """One micro-batch: a flat stream of T tokens made of rows that do not see one another. It is on the host, where
    what is counted makes no kernel wait."""

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
    logit_scale: float
    """Factor of the head's logits."""
    chunk_tokens: int | None
    by_rows: bool
    """True if attention keeps the rows apart by itself."""
    takes_mask: bool
    cross_entropy: CrossEntropy | None
    """The kernel that forms softmax and gradient; None: torch's own operations, one after another."""
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

    def loss_and_gradient(self, hidden_TD: Tensor, batch: Stream, *, scale: float) -> tuple[Tensor, Tensor]:
        """Summed loss and its scaled gradient for the hidden states (models/language_model.py)."""
        return loss_and_gradient(
            hidden_TD, batch.labels_T, self.head, scale=scale, chunk_tokens=self.chunk_tokens, softcap=self.softcap,
            logit_scale=self.logit_scale, cross_entropy=self.cross_entropy,
        )  # fmt: skip

    @torch.no_grad()
    def loss(self, batch: Stream) -> Tensor:
        """Summed loss of one stream, for evaluation."""
        hidden_TD = self.hidden_states(batch)
        return loss_sum(
            hidden_TD, batch.labels_T, self.head, chunk_tokens=self.chunk_tokens, softcap=self.softcap,
            logit_scale=self.logit_scale,
        )  # fmt: skip


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
    base = base_of(whole)
    body, head = body_of(base), base.get_output_embeddings()
    if head is None or body is base:
        raise ModelError(f"{type(base).__name__} has no language-modelling head")
    config = base.config.get_text_config()
    return LanguageModel(
        whole=whole,
        body=body,
        blocks=blocks_of(base),
        head=head,
        softcap=getattr(config, "final_logit_softcapping", None),
        # transformers' factor of the head's logits: Cohere's scale, one over Granite's scaling
        logit_scale=float(getattr(config, "logit_scale", None) or 1.0)
        / float(getattr(config, "logits_scaling", None) or 1.0),
        chunk_tokens=loss.chunk_tokens if isinstance(loss, ChunkedLoss) else None,
        by_rows=attends_by_rows(base),
        takes_mask=takes_mask(base),
        cross_entropy=operations_on(device or base.device).cross_entropy if kernels == "liger" else None,
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


@torch.no_grad()
def loss_and_gradient(
    hidden_TD: Tensor,
    labels_T: Tensor,
    head: nn.Module,
    *,
    scale: float,
    chunk_tokens: int | None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    cross_entropy: CrossEntropy | None = None,
) -> tuple[Tensor, Tensor]:
    """Summed negative log-likelihood (fp32 scalar, nats) and its gradient [T, D] for the hidden states.

    ``labels_T`` are already shifted: labels_T[i] is the token that follows position i, or IGNORED.
    ``scale`` multiplies the gradients alone (1 / supervised tokens, and the loss scale under fp16);
    gradients of the head's trained parameters are accumulated as by ``backward()``.
    Only supervised rows go through the head. ``chunk_tokens`` None: all of them at once. A stream without any still
    leaves gradients of zeros: ranks that sum their gradients must have the same ones.
    """
    chosen, targets_S = _supervised(labels_T, hidden_TD.device)
    everything = len(chosen) == len(labels_T)
    inputs_SD = hidden_TD if everything else hidden_TD[chosen]
    gradient_SD = torch.empty_like(inputs_SD)
    total = torch.zeros((), dtype=torch.float32, device=hidden_TD.device)
    size = max(1, chunk_tokens or len(chosen))
    for start in range(0, max(1, len(chosen)), size):
        part = slice(start, start + size)
        total += _chunk(
            inputs_SD[part],
            targets_S[part],
            gradient_SD[part],
            head,
            scale,
            softcap,
            logit_scale,
            cross_entropy,
        )
    if everything:
        return total, gradient_SD
    return total, torch.zeros_like(hidden_TD).index_copy_(0, chosen, gradient_SD)


@torch.no_grad()
def loss_sum(
    hidden_TD: Tensor,
    labels_T: Tensor,
    head: nn.Module,
    *,
    chunk_tokens: int | None,
    softcap: float | None,
    logit_scale: float,
) -> Tensor:
    """Summed negative log-likelihood without gradients, for evaluation."""
    chosen, targets_S = _supervised(labels_T, hidden_TD.device)
    total = torch.zeros((), dtype=torch.float32, device=hidden_TD.device)
    size = max(1, chunk_tokens or len(chosen))
    for part, targets in zip(chosen.split(size), targets_S.split(size), strict=True):
        input_SD = _as_head_takes(hidden_TD[part], head, logit_scale)
        total += _softmax_loss(_logits(input_SD, head, softcap)[0], targets)[0]
    return total


def _supervised(labels_T: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """The S positions that have a label, and their labels, on ``device``. They are counted where the labels are."""
    chosen = torch.nonzero(labels_T != IGNORED).squeeze(1)
    targets_S = labels_T if len(chosen) == len(labels_T) else labels_T[chosen]
    return sent(chosen, device), sent(targets_S, device)


def _chunk(
    hidden_SD: Tensor,
    target_S: Tensor,
    gradient_SD: Tensor,
    head: nn.Module,
    scale: float,
    softcap: float | None,
    logit_scale: float,
    cross_entropy: CrossEntropy | None,
) -> Tensor:
    """One chunk: writes its input gradient into ``gradient_SD``, adds to the head's, and returns its summed loss.

    Without autograd, which would keep the logits to the end and add a second gradient of the head to its first.
    """
    weight, bias = head.weight, head.bias
    input_SD = _as_head_takes(hidden_SD, head, logit_scale)
    if cross_entropy is not None:
        logit_gradient_SV: Tensor = head(input_SD)
        loss = cross_entropy(logit_gradient_SV, target_S, scale=scale, softcap=softcap).sum()
    else:
        loss, logit_gradient_SV = _loss_and_logit_gradient(input_SD, target_S, head, scale, softcap)
    if weight.requires_grad and weight.grad is None:
        weight.grad = logit_gradient_SV.t() @ input_SD
    elif weight.requires_grad:
        weight.grad.addmm_(logit_gradient_SV.t(), input_SD)
    if bias is not None and bias.requires_grad:
        gradient_V = logit_gradient_SV.sum(dim=0)
        bias.grad = gradient_V if bias.grad is None else bias.grad.add_(gradient_V)
    if gradient_SD.dtype == weight.dtype:
        torch.mm(logit_gradient_SV, weight, out=gradient_SD)
    else:
        gradient_SD.copy_(logit_gradient_SV @ weight)
    if logit_scale != 1:
        gradient_SD.mul_(logit_scale)
    return loss


def _loss_and_logit_gradient(
    input_SD: Tensor, target_S: Tensor, head: nn.Module, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Summed loss, and its scaled gradient for the logits in their type: torch's operations, one after another."""
    work_SV, tangent_SV = _logits(input_SD, head, softcap)
    loss, rows, total_S = _softmax_loss(work_SV, target_S)
    work_SV.mul_((scale / total_S).unsqueeze(1))
    work_SV[rows, target_S] -= scale
    logit_gradient_SV = work_SV.to(input_SD.dtype)
    del work_SV
    if tangent_SV is not None:
        tanh_backward = torch.ops.aten.tanh_backward.grad_input
        tanh_backward(logit_gradient_SV, tangent_SV, grad_input=logit_gradient_SV)
    return loss, logit_gradient_SV


def _as_head_takes(hidden_SD: Tensor, head: nn.Module, logit_scale: float) -> Tensor:
    """In the head's type, where an fp32 stream ends as in transformers, and scaled: the head is linear, and the logits
    are larger."""
    hidden_SD = hidden_SD.to(head.weight.dtype)
    return hidden_SD if logit_scale == 1 else hidden_SD * logit_scale


def _logits(input_SD: Tensor, head: nn.Module, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """Logits in fp32, to be overwritten, and the tangent of a soft cap in the head's type; None without one."""
    logits_SV: Tensor = head(input_SD)
    if softcap is None:
        return logits_SV.float(), None
    tangent_SV = logits_SV.div_(softcap).tanh_()
    return (tangent_SV * softcap).float(), tangent_SV


def _softmax_loss(work_SV: Tensor, target_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy in fp32 of the logits ``work_SV``, which become exponentials; rows' numbers and sums come along."""
    work_SV.sub_(work_SV.amax(dim=1, keepdim=True))
    rows = torch.arange(len(target_S), device=target_S.device)
    target_logit_S = work_SV[rows, target_S]
    total_S = work_SV.exp_().sum(dim=1)
    return (total_S.log() - target_logit_S).sum(), rows, total_S


def base_of(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """``model`` without the adapters that PEFT has put into it."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def body_of(model: PreTrainedModel) -> nn.Module:
    """The part that turns ids into hidden states; the model itself where it has no such part.

    transformers looks for it by a name that Llama 4's class has for its checkpoints alone.
    """
    parts = [part for part in model.children() if isinstance(part, PreTrainedModel)]
    return parts[0] if model.base_model is model and len(parts) == 1 else model.base_model


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
