"""The head and the loss of its tokens, in chunks of them.

The gradient of cross-entropy with respect to the logits is softmax − one-hot, so it is written over the logits in
place and multiplied with the head's weight and input, without autograd and its copies.
Shapes: T tokens, S those of them that have a label, D hidden size, V vocabulary.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fitune.models.liger import CrossEntropy
from fitune.models.row_attention import sent
from fitune.values.model.block_profile import IGNORED


@dataclass(frozen=True, slots=True, kw_only=True)
class LossHead:
    """The head of a language model: hidden states become logits, and those the losses of the tokens that follow.

    Labels [T] are already shifted: the token that follows each position, or IGNORED. Only positions with a label go
    through the head. A loss is a negative log-likelihood in nats, in fp32.
    """

    module: nn.Module
    softcap: float | None = None
    logit_scale: float = 1.0
    """Factor of the logits."""
    chunk_tokens: int | None = None
    """Tokens that go through the head together; None: all of them."""
    cross_entropy: CrossEntropy | None = None
    """The kernel that forms softmax and gradient; None: torch's own operations, one after another."""
    gathered: Callable[[], AbstractContextManager[object]] = nullcontext
    """Inside, the weights stay whole where ranks gather them: each has as many chunks as its own labels make."""

    @torch.no_grad()
    def losses_and_gradient(
        self, hidden_TD: Tensor, labels_T: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        """The losses [S], and the gradient of their sum for the hidden states [T, D].

        ``scale`` multiplies the gradients alone (1 / supervised tokens, and the loss scale under fp16);
        gradients of the head's trained parameters are accumulated as by ``backward()``. Without any label they are
        zeros: ranks that sum their gradients must have the same ones.
        """
        chosen, targets_S = _supervised(labels_T, hidden_TD.device)
        everything = len(chosen) == len(labels_T)
        inputs_SD = hidden_TD if everything else hidden_TD[chosen]
        gradient_SD = torch.empty_like(inputs_SD)
        losses_S = torch.empty(len(chosen), dtype=torch.float32, device=hidden_TD.device)
        size = max(1, self.chunk_tokens or len(chosen))
        for start in range(0, max(1, len(chosen)), size):
            part = slice(start, start + size)
            losses_S[part] = self._chunk(inputs_SD[part], targets_S[part], gradient_SD[part], scale)
        if everything:
            return losses_S, gradient_SD
        return losses_S, torch.zeros_like(hidden_TD).index_copy_(0, chosen, gradient_SD)

    @torch.no_grad()
    def losses(self, hidden_TD: Tensor, labels_T: Tensor) -> Tensor:
        """The losses [S] without gradients."""
        chosen, targets_S = _supervised(labels_T, hidden_TD.device)
        losses_S = torch.empty(len(chosen), dtype=torch.float32, device=hidden_TD.device)
        size = max(1, self.chunk_tokens or len(chosen))
        with self.gathered():
            # also without a label, as above: ranks gather the head together
            for start in range(0, max(1, len(chosen)), size):
                part = slice(start, start + size)
                inputs_SD = self._as_input(hidden_TD[chosen[part]])
                # no name for the logits: those of a chunk would be there still while the next are made
                losses_S[part], _ = _softmax_loss(self._logits(inputs_SD)[0], targets_S[part])
        return losses_S

    def _chunk(self, hidden_SD: Tensor, target_S: Tensor, gradient_SD: Tensor, scale: float) -> Tensor:
        """One chunk: writes its input gradient into ``gradient_SD``, adds to the head's, and returns its losses.

        Without autograd, which would keep the logits to the end and add a second gradient of the head to its first.
        """
        weight, bias = self.module.weight, self.module.bias
        input_SD = self._as_input(hidden_SD)
        if self.cross_entropy is not None:
            logit_gradient_SV: Tensor = self.module(input_SD)
            losses_S = self.cross_entropy(logit_gradient_SV, target_S, scale=scale, softcap=self.softcap)
        else:
            losses_S, logit_gradient_SV = self._losses_and_logit_gradient(input_SD, target_S, scale)
        if weight.requires_grad and weight.grad is None:
            _leave_gradient(weight, logit_gradient_SV.t() @ input_SD)
        elif weight.requires_grad:
            weight.grad.addmm_(logit_gradient_SV.t(), input_SD)
        if bias is not None and bias.requires_grad:
            gradient_V = logit_gradient_SV.sum(dim=0)
            _leave_gradient(bias, gradient_V if bias.grad is None else bias.grad.add_(gradient_V))
        if gradient_SD.dtype == weight.dtype:
            torch.mm(logit_gradient_SV, weight, out=gradient_SD)
        else:
            gradient_SD.copy_(logit_gradient_SV @ weight)
        if self.logit_scale != 1:
            gradient_SD.mul_(self.logit_scale)
        return losses_S

    def _losses_and_logit_gradient(
        self, input_SD: Tensor, target_S: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """The losses, and their scaled gradient for the logits in their type: torch's operations, one after another."""
        work_SV, tangent_SV = self._logits(input_SD)
        losses_S, total_S = _softmax_loss(work_SV, target_S)
        work_SV.mul_((scale / total_S).unsqueeze(1))
        work_SV[torch.arange(len(target_S), device=target_S.device), target_S] -= scale
        logit_gradient_SV = work_SV.to(input_SD.dtype)
        del work_SV
        if tangent_SV is not None:
            tanh_backward = torch.ops.aten.tanh_backward.grad_input
            tanh_backward(logit_gradient_SV, tangent_SV, grad_input=logit_gradient_SV)
        return losses_S, logit_gradient_SV

    def _as_input(self, hidden_SD: Tensor) -> Tensor:
        """In the head's type, where an fp32 stream ends as in transformers, and scaled: the head is linear, and the
        logits are larger."""
        hidden_SD = hidden_SD.to(self.module.weight.dtype)
        return hidden_SD if self.logit_scale == 1 else hidden_SD * self.logit_scale

    def _logits(self, input_SD: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits in fp32, to be overwritten, and the tangent of a soft cap in the head's type; None without one."""
        logits_SV: Tensor = self.module(input_SD)
        if self.softcap is None:
            return logits_SV.float(), None
        tangent_SV = logits_SV.div_(self.softcap).tanh_()
        return (tangent_SV * self.softcap).float(), tangent_SV


def _supervised(labels_T: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """The S positions that have a label, and their labels, on ``device``. They are counted where the labels are."""
    chosen = torch.nonzero(labels_T != IGNORED).squeeze(1)
    targets_S = labels_T if len(chosen) == len(labels_T) else labels_T[chosen]
    return sent(chosen, device), sent(targets_S, device)


def _leave_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Make ``gradient`` that of ``parameter`` in its own type, for FSDP2 to convert when it sums: before backward,
    torch 2.15's refuses what is not in the type of the sums yet."""
    if gradient.dtype != getattr(parameter, "grad_dtype", gradient.dtype):
        parameter.grad_dtype = None
    parameter.grad = gradient


def _softmax_loss(work_SV: Tensor, target_S: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's cross-entropy in fp32 of the logits ``work_SV``, which become exponentials; their sums come along."""
    work_SV.sub_(work_SV.amax(dim=1, keepdim=True))
    target_logit_S = work_SV.gather(1, target_S[:, None])[:, 0]
    total_S = work_SV.exp_().sum(dim=1)
    return total_S.log() - target_logit_S, total_S
