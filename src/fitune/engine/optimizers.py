"""torch's fused optimizers, or 8-bit AdamW, over the trained weights or over their fp32 masters.

Fused on purpose: the foreach variants allocate about as much again as all trained parameters. Where the fused kernel is
wrong, one weight after the other.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from fitune.engine.eight_bit import EightBitAdamW
from fitune.spec.choices import MASTER_BUCKET_BYTES
from fitune.spec.plan import AdamW, AdamW8bit, Optimizer, Sgd


class WeightOptimizer(Protocol):
    """Turns the gradients on the parameters into new weights."""

    def take_gradients(self, *, wait: bool) -> None:
        """Told when the loss is through, and when backward is: what is on the parameters may be taken from there.

        After backward (``wait``) nothing of them is left on the way.
        """
        ...

    def gradients(self) -> list[Tensor]:
        """Those of all micro-batches so far, wherever they are."""
        ...

    def drop_gradients(self) -> None: ...

    def step(self, *, learning_rate: float, gradient_factor: float) -> None:
        """Use gradients × ``gradient_factor`` (clipping and loss scale in one), then drop them."""
        ...

    def tensors(self) -> dict[str, Tensor]: ...

    def restore(self, tensors: Mapping[str, Tensor]) -> None: ...


class _OnParameters:
    """Gradients rest where autograd leaves them."""

    def __init__(self, parameters: Mapping[str, Parameter]) -> None:
        self.parameters = dict(parameters)

    def take_gradients(self, *, wait: bool) -> None:
        """They stay."""

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters.values() if p.grad is not None]

    def drop_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None


class DirectOptimizer(_OnParameters):
    """Steps the parameters themselves; states have their dtype."""

    def __init__(self, parameters: Mapping[str, Parameter], optimizer: Optimizer) -> None:
        super().__init__(parameters)
        self.torch_optimizer = build_torch_optimizer(self.parameters, optimizer)

    def step(self, *, learning_rate: float, gradient_factor: float) -> None:
        if gradient_factor != 1.0:
            torch._foreach_mul_(self.gradients(), gradient_factor)
        set_learning_rate(self.torch_optimizer, learning_rate)
        self.torch_optimizer.step()
        self.torch_optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        return state_tensors(self.torch_optimizer, self.parameters)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        restore_state(self.torch_optimizer, self.parameters, tensors)


class MasterOptimizer(_OnParameters):
    """Steps fp32 copies of 16-bit parameters, bucket by bucket, and copies the result back."""

    def __init__(self, parameters: Mapping[str, Parameter], optimizer: Optimizer) -> None:
        super().__init__(parameters)
        self.masters = {name: Parameter(p.detach().float()) for name, p in self.parameters.items()}
        self.torch_optimizer = build_torch_optimizer(self.masters, optimizer)

    def step(self, *, learning_rate: float, gradient_factor: float) -> None:
        set_learning_rate(self.torch_optimizer, learning_rate)
        for bucket in self._buckets():
            self._step_bucket(bucket, gradient_factor)

    def _step_bucket(self, names: list[str], gradient_factor: float) -> None:
        """torch's optimizers pass over parameters without a gradient, so one bucket can step alone."""
        for name in names:
            parameter, master = self.parameters[name], self.masters[name]
            if parameter.grad is not None:
                master.grad = parameter.grad.float().mul_(gradient_factor)
                parameter.grad = None
        self.torch_optimizer.step()
        for name in names:
            self.masters[name].grad = None
            self.parameters[name].data.copy_(self.masters[name].data)

    def _buckets(self) -> Iterator[list[str]]:
        bucket: list[str] = []
        size = 0
        for name, master in self.masters.items():
            if bucket and size + master.nbytes > MASTER_BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(name)
            size += master.nbytes
        yield bucket

    def tensors(self) -> dict[str, Tensor]:
        masters = {f"master/{name}": master.data for name, master in self.masters.items()}
        return {**masters, **state_tensors(self.torch_optimizer, self.masters)}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        for name, master in self.masters.items():
            master.data.copy_(tensors[f"master/{name}"])
        restore_state(self.torch_optimizer, self.masters, tensors)


def build_torch_optimizer(parameters: Mapping[str, Parameter], optimizer: Optimizer) -> torch.optim.Optimizer:
    """Weight decay is for matrices: norms and biases are left alone, as transformers' Trainer does."""
    matrices = [p for p in parameters.values() if p.ndim >= 2]
    others = [p for p in parameters.values() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": optimizer.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    match optimizer:
        case AdamW(beta1=beta1, beta2=beta2, eps=eps):
            return torch.optim.AdamW(groups, lr=0.0, betas=(beta1, beta2), eps=eps, fused=True)
        case Sgd(momentum=momentum):
            fused = not _skipped_by_fused_sgd(parameters.values())
            return torch.optim.SGD(groups, lr=0.0, momentum=momentum, fused=fused, foreach=False)
        case AdamW8bit(beta1=beta1, beta2=beta2, eps=eps):
            return EightBitAdamW(groups, betas=(beta1, beta2), eps=eps)


def _skipped_by_fused_sgd(parameters: Iterable[Parameter]) -> bool:
    """torch's fused SGD leaves 16-bit weights on a CPU as they are (pytorch/pytorch#191763, seen in 2.13)."""
    return any(p.device.type == "cpu" and p.dtype in (torch.bfloat16, torch.float16) for p in parameters)


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def state_tensors(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Parameter]) -> dict[str, Tensor]:
    """``exp_avg/<parameter>`` -> tensor, for every state of every parameter."""
    return {
        f"{key}/{name}": value
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def restore_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Parameter], tensors: Mapping[str, Tensor]
) -> None:
    for key, value in tensors.items():
        kind, _, name = key.partition("/")
        if kind == "master":
            continue
        parameter = parameters[name]
        optimizer.state[parameter][kind] = value.to(parameter.device).clone()
