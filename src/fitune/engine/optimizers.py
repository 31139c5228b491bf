"""torch's fused optimizers, or 8-bit AdamW, over the trained weights or over their fp32 masters.

Fused on purpose: the foreach variants allocate about as much again as all trained parameters. Where the fused kernel is
wrong, one weight after the other.

8-bit AdamW (Dettmers et al. 2022, arXiv 2110.02861) is ours over bitsandbytes' functional ops: its own class keeps step
counts and tables where a checkpoint does not find them and makes its tables from fake numbers under a fake mode.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn import Parameter

from fitune.errors import require_library
from fitune.values.choices import EIGHT_BIT_BLOCK, EIGHT_BIT_LEAST, MASTER_BUCKET_BYTES
from fitune.values.plan import AdamW, AdamW8bit, Optimizer, Sgd


class WeightOptimizer(ABC):
    """Turns the gradients on the parameters, where they rest unless a class takes them away, into new weights."""

    skips_on_device = False
    """True if ``step`` takes a factor that the host has not read, and does nothing where that is not finite."""

    def __init__(
        self, parameters: Mapping[str, Parameter], masters: Mapping[str, Parameter], optimizer: Optimizer
    ) -> None:
        """``masters``: fp32 copies that are stepped in the place of ``parameters``; empty where there are none."""
        self.parameters = dict(parameters)
        self.masters = dict(masters)
        self.torch_optimizer = build_torch_optimizer(self.masters or self.parameters, optimizer)

    def take_gradients(self, *, wait: bool) -> None:  # noqa: B027  (one class takes them)
        """Told when the loss is through, and when backward is: what is on the parameters may be taken from there.

        After backward (``wait``) nothing of them is left on the way.
        """

    def gradients(self) -> list[Tensor]:
        """Gradients of all micro-batches so far, wherever they are."""
        return [p.grad for p in self.parameters.values() if p.grad is not None]

    def drop_gradients(self) -> None:
        """Forget them all."""
        for parameter in self.parameters.values():
            parameter.grad = None

    @abstractmethod
    def step(self, *, learning_rate: float, gradient_factor: Any) -> None:
        """Use gradients × ``gradient_factor`` (clipping and loss scale in one), then drop them."""

    def tensors(self) -> dict[str, Tensor]:
        """``master/<parameter>`` and ``exp_avg/<parameter>`` -> tensor: all that a checkpoint keeps."""
        return {f"master/{name}": master.data for name, master in self.masters.items()} | {
            f"{kind}/{name}": value
            for name, parameter in (self.masters or self.parameters).items()
            for kind, value in self.torch_optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from ``tensors``."""
        for name, master in self.masters.items():
            master.copy_(self._saved_master(name, tensors))
        for key in tensors:
            kind, _, name = key.partition("/")
            if kind != "master":
                parameter = (self.masters or self.parameters)[name]
                self.torch_optimizer.state[parameter][kind] = tensors[key].to(parameter.device).clone()

    def _saved_master(self, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        return tensors[f"master/{name}"]


class DirectOptimizer(WeightOptimizer):
    """Steps the parameters themselves; states have their dtype."""

    def __init__(self, parameters: Mapping[str, Parameter], optimizer: Optimizer) -> None:
        super().__init__(parameters, {}, optimizer)

    def step(self, *, learning_rate: float, gradient_factor: float) -> None:
        """Use gradients × ``gradient_factor``, then drop them."""
        if gradient_factor != 1.0:
            torch._foreach_mul_(self.gradients(), gradient_factor)
        set_learning_rate(self.torch_optimizer, learning_rate)
        self.torch_optimizer.step()
        self.torch_optimizer.zero_grad(set_to_none=True)


class MasterOptimizer(WeightOptimizer):
    """Steps fp32 copies of 16-bit parameters, bucket by bucket, and copies the result back.

    Copies are made of many tensors in one launch: one by one, the update of LoRA on 8 B would be 1,800 launches.
    """

    def __init__(self, parameters: Mapping[str, Parameter], optimizer: Optimizer) -> None:
        masters = {name: Parameter(p.detach().float()) for name, p in parameters.items()}
        super().__init__(parameters, masters, optimizer)
        # 8-bit AdamW has no such flag, and fused SGD would begin with a momentum that was never written
        self.skips_on_device = isinstance(self.torch_optimizer, torch.optim.AdamW)

    @torch.no_grad()
    def step(self, *, learning_rate: float, gradient_factor: float | Tensor) -> None:
        """A factor that the host has not read, a scalar tensor, needs ``skips_on_device``: nothing is changed where it
        is not finite."""
        set_learning_rate(self.torch_optimizer, learning_rate)
        if isinstance(gradient_factor, Tensor):  # as torch.amp.GradScaler tells fused optimizers
            self.torch_optimizer.found_inf = (~gradient_factor.isfinite()).float()
        for bucket in self._buckets():
            self._step_bucket(bucket, gradient_factor)
        self.torch_optimizer.found_inf = None

    def _step_bucket(self, names: list[str], gradient_factor: float | Tensor) -> None:
        """torch's optimizers pass over parameters without a gradient, so one bucket can step alone."""
        left = [name for name in names if self.parameters[name].grad is not None]
        converted = []
        while left:
            half, left = self._first_half(left)
            converted.append(self._convert(half))
        if converted:
            torch._foreach_mul_(converted, gradient_factor)
        self.torch_optimizer.step()
        for name in names:
            self.masters[name].grad = None
        torch._foreach_copy_(
            [self.parameters[name].data for name in names], [self.masters[name].data for name in names]
        )

    def _first_half(self, names: list[str]) -> tuple[list[str], list[str]]:
        """So many of ``names`` that their fp32 gradients take no more than those 16-bit ones give back which follow.

        At least one. So the bucket takes no more than if each tensor were converted alone, in as many launches as it
        can be halved.
        """
        sizes = [self.masters[name].numel() for name in names]
        count = sum(end <= sum(sizes) / 2 for end in itertools.accumulate(sizes))
        return names[: max(1, count)], names[max(1, count) :]

    def _convert(self, names: list[str]) -> Tensor:
        """One fp32 tensor with the gradients, each aligned for vectorised loads: parts of it go to the masters."""
        gradients = [self.parameters[name].grad for name in names]
        starts = list(itertools.accumulate((-(-g.numel() // 4) * 4 for g in gradients), initial=0))
        flat = gradients[0].new_empty(starts[-1], dtype=torch.float32)
        parts = [
            flat[start : start + g.numel()].view(g.shape)
            for start, g in zip(starts[:-1], gradients, strict=True)
        ]
        torch._foreach_copy_(parts, gradients)
        for name, part in zip(names, parts, strict=True):
            self.masters[name].grad, self.parameters[name].grad = part, None
        return flat

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


def takes_decay(name: str, weight: Tensor) -> bool:
    """True for tensors of two or more axes that are no biases. For these transformers' Trainer, which goes by names,
    decides the same.

    The biases of gpt-oss's experts have two axes (``gate_up_proj_bias``). Trainer decays some vectors, too: attention
    sinks, Mamba's A_log and D, and norms that its patterns miss (``norm_f``).
    """
    return weight.ndim >= 2 and "bias" not in name.rpartition(".")[2]


def build_torch_optimizer(parameters: Mapping[str, Parameter], optimizer: Optimizer) -> torch.optim.Optimizer:
    """Two groups: what takes weight decay, and the rest."""
    matrices = [p for name, p in parameters.items() if takes_decay(name, p)]
    others = [p for name, p in parameters.items() if not takes_decay(name, p)]
    groups = [
        {"params": matrices, "weight_decay": optimizer.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    match optimizer:
        case AdamW(beta1=beta1, beta2=beta2, eps=eps):
            return torch.optim.AdamW(groups, lr=0.0, betas=(beta1, beta2), eps=eps, fused=True)
        case Sgd(momentum=momentum):
            # torch's fused SGD leaves 16-bit weights on a CPU as they are (pytorch/pytorch#191763, seen in 2.13)
            fused = not any(
                p.device.type == "cpu" and p.dtype in (torch.bfloat16, torch.float16)
                for p in parameters.values()
            )
            return torch.optim.SGD(groups, lr=0.0, momentum=momentum, fused=fused, foreach=False)
        case AdamW8bit(beta1=beta1, beta2=beta2, eps=eps):
            return EightBitAdamW(groups, betas=(beta1, beta2), eps=eps)


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """All parameter groups get the same rate."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


_MOST_COUNTED = 2**30
"""Elements, in whole blocks, that one call of the library's GPU kernel is given: it counts in 32 bits, and more wrap
around without a word. The stacked experts of the largest mixtures have more."""


class EightBitAdamW(torch.optim.Optimizer):
    """8-bit AdamW as torch's optimizers are used here: groups with weight decay and rate, states that are tensors."""

    def __init__(
        self, groups: Iterable[Mapping[str, Any]], *, betas: tuple[float, float], eps: float
    ) -> None:
        require_library("bitsandbytes", needed_by="8-bit AdamW", extra="quant")
        super().__init__([dict(group) for group in groups], {"lr": 0.0, "weight_decay": 0.0})
        self.betas = betas
        self.eps = eps
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Steps the parameters that have a gradient; ``closure`` is not called."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group["lr"], group["weight_decay"])

    def _step(self, parameter: Parameter, rate: float, weight_decay: float) -> None:
        state = self.state[parameter] or self._first_state(parameter)
        # from a checkpoint it comes on the parameter's device, where each look at it would wait for all kernels
        count = state["step"] = state["step"].cpu().add_(1)
        settings = {
            "beta1": self.betas[0], "beta2": self.betas[1], "beta3": 0.0, "alpha": 0.0, "eps": self.eps,
            "weight_decay": weight_decay, "step": int(count), "lr": rate, "gnorm_scale": 1.0,
        }  # fmt: skip
        tensors = (parameter.grad, parameter, state["exp_avg"], state["exp_avg_sq"])
        if "scale" not in state:
            torch.ops.bitsandbytes.optimizer_update_32bit.default(
                "adam", *tensors, unorm_vec=None, max_unorm=0.0, param_norm=0.0, **settings
            )
            return
        signed, unsigned = self._tables_on(parameter.device)
        for start in range(0, parameter.numel(), _MOST_COUNTED):
            end = start + _MOST_COUNTED
            blocks = slice(start // EIGHT_BIT_BLOCK, end // EIGHT_BIT_BLOCK)
            torch.ops.bitsandbytes.optimizer_update_8bit_blockwise.default(
                "adam", *(tensor.view(-1)[start:end] for tensor in tensors), **settings,
                qmap1=signed, qmap2=unsigned, absmax1=state["scale"][blocks], absmax2=state["scale_sq"][blocks],
            )  # fmt: skip

    def _first_state(self, parameter: Parameter) -> dict[str, Tensor]:
        state = self.state[parameter]
        eight_bit = parameter.numel() >= EIGHT_BIT_LEAST
        state["step"] = torch.zeros((), dtype=torch.int64)
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(parameter, dtype=torch.uint8 if eight_bit else torch.float32)
        if eight_bit:
            blocks = -(-parameter.numel() // EIGHT_BIT_BLOCK)
            for name in ("scale", "scale_sq"):
                state[name] = torch.zeros(blocks, dtype=torch.float32, device=parameter.device)
        return state

    def _tables_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The values of 8-bit states on ``device``: first moments have a sign, second ones have none."""
        if device not in self._tables:
            signed, unsigned = (
                torch.tensor(_values(s), dtype=torch.float32, device=device) for s in (True, False)
            )
            self._tables[device] = (signed, unsigned)
        return self._tables[device]


@cache
def _values(signed: bool) -> tuple[float, ...]:
    """The 256 values that an 8-bit state stands for; made from real numbers even while all else is fake."""
    from bitsandbytes.functional import create_dynamic_map

    with unset_fake_temporarily():
        return tuple(create_dynamic_map(signed=signed).tolist())
