"""Head and cross-entropy, a chunk of tokens at a time, without autograd's copies of the logits.

The gradient of cross-entropy with respect to the logits is softmax − one-hot, so it is written over
the logits in place; autograd only carries it through the head. Shapes: T tokens, D hidden size, V vocabulary.
"""

import torch
from torch import Tensor, nn

from fitune.spec.shape import IGNORED


def loss_and_gradient(
    hidden_TD: Tensor,
    labels_T: Tensor,
    head: nn.Module,
    *,
    scale: float,
    chunk_tokens: int | None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Summed negative log-likelihood (fp32 scalar, nats) and its gradient [T, D] for the hidden states.

    ``labels_T`` are already shifted: labels_T[i] is the token that follows position i, or IGNORED.
    ``scale`` multiplies the gradients alone (1 / supervised tokens, and the loss scale under fp16);
    gradients of the head's trained parameters are accumulated as by ``backward()``.
    Only supervised rows go through the head. ``chunk_tokens`` None: all of them at once.
    """
    chosen = torch.nonzero(labels_T != IGNORED).squeeze(1)
    everything = len(chosen) == len(labels_T)
    inputs_SD = hidden_TD if everything else hidden_TD[chosen]
    targets_S = labels_T if everything else labels_T[chosen]
    gradient_SD = torch.empty_like(inputs_SD)
    total = torch.zeros((), dtype=torch.float32, device=hidden_TD.device)
    size = max(1, chunk_tokens or len(chosen))
    for start in range(0, len(chosen), size):
        part = slice(start, start + size)
        total += _chunk(inputs_SD[part], targets_S[part], gradient_SD[part], head, scale, softcap)
    if everything:
        return total, gradient_SD
    return total, torch.zeros_like(hidden_TD).index_copy_(0, chosen, gradient_SD)


def loss_sum(
    hidden_TD: Tensor,
    labels_T: Tensor,
    head: nn.Module,
    *,
    chunk_tokens: int | None,
    softcap: float | None = None,
) -> Tensor:
    """Summed negative log-likelihood without gradients, for evaluation."""
    chosen = torch.nonzero(labels_T != IGNORED).squeeze(1)
    total = torch.zeros((), dtype=torch.float32, device=hidden_TD.device)
    with torch.no_grad():
        for part in chosen.split(max(1, chunk_tokens or len(chosen) or 1)):
            logits = _logits(hidden_TD[part], head, softcap).float()
            total += torch.nn.functional.cross_entropy(logits, labels_T[part], reduction="sum")
    return total


def _chunk(
    input_SD: Tensor,
    target_S: Tensor,
    gradient_SD: Tensor,
    head: nn.Module,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """One chunk: writes its input gradient into ``gradient_SD`` and returns its summed loss."""
    leaf_SD = input_SD.detach().requires_grad_()
    with torch.enable_grad():
        logits_SV = _logits(leaf_SD, head, softcap)
    loss, logit_gradient_SV = _softmax_loss(logits_SV.detach(), target_S, scale)
    logits_SV.backward(logit_gradient_SV)
    assert leaf_SD.grad is not None
    gradient_SD.copy_(leaf_SD.grad)
    return loss


def _logits(hidden_SD: Tensor, head: nn.Module, softcap: float | None) -> Tensor:
    logits_SV: Tensor = head(hidden_SD)
    return logits_SV if softcap is None else softcap * torch.tanh(logits_SV / softcap)


def _softmax_loss(logits_SV: Tensor, target_S: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Cross-entropy in fp32 and its gradient in the dtype of the logits; fp32 logits are overwritten."""
    work_SV = logits_SV.float()
    work_SV.sub_(work_SV.amax(dim=1, keepdim=True))
    rows = torch.arange(len(target_S), device=target_S.device)
    target_logit_S = work_SV[rows, target_S]
    total_S = work_SV.exp_().sum(dim=1)
    loss = (total_S.log() - target_logit_S).sum()
    work_SV.mul_((scale / total_S).unsqueeze(1))
    work_SV[rows, target_S] -= scale
    return loss, work_SV.to(logits_SV.dtype)
