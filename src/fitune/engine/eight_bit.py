"""AdamW whose two states are 8-bit numbers with a scale per block of 256, over bitsandbytes' functional ops.

Dettmers et al. 2022, arXiv 2110.02861. bitsandbytes' own class keeps step counts and tables where a checkpoint does
not find them and makes its tables from fake numbers under a fake mode; its operations do neither.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn import Parameter

from fitune.errors import require_library
from fitune.spec.choices import EIGHT_BIT_BLOCK, EIGHT_BIT_LEAST


class EightBitAdamW(torch.optim.Optimizer):
    """As torch's optimizers are used here: groups with weight decay and rate, states that are all tensors."""

    def __init__(
        self, groups: Iterable[Mapping[str, Any]], *, betas: tuple[float, float], eps: float
    ) -> None:
        require_library("bitsandbytes", needed_by="8-bit AdamW", extra="quant")
        super().__init__([dict(group) for group in groups], {"lr": 0.0, "weight_decay": 0.0})
        self.betas = betas
        self.eps = eps
        self._steps: dict[Parameter, int] = {}
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group["lr"], group["weight_decay"])

    def _step(self, parameter: Parameter, rate: float, weight_decay: float) -> None:
        state = self.state[parameter] or self._first_state(parameter)
        step = self._count(parameter, state["step"])
        settings = {
            "beta1": self.betas[0], "beta2": self.betas[1], "beta3": 0.0, "alpha": 0.0, "eps": self.eps,
            "weight_decay": weight_decay, "step": step, "lr": rate, "gnorm_scale": 1.0,
        }  # fmt: skip
        tensors = (parameter.grad, parameter, state["exp_avg"], state["exp_avg_sq"])
        if "scale" not in state:
            torch.ops.bitsandbytes.optimizer_update_32bit.default(
                "adam", *tensors, unorm_vec=None, max_unorm=0.0, param_norm=0.0, **settings
            )
            return
        signed, unsigned = self._tables_on(parameter.device)
        torch.ops.bitsandbytes.optimizer_update_8bit_blockwise.default(
            "adam", *tensors, **settings,
            qmap1=signed, qmap2=unsigned, absmax1=state["scale"], absmax2=state["scale_sq"],
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
        """What an 8-bit state can be: first moments have a sign, second ones have none."""
        if device not in self._tables:
            signed, unsigned = (
                torch.tensor(_values(s), dtype=torch.float32, device=device) for s in (True, False)
            )
            self._tables[device] = (signed, unsigned)
        return self._tables[device]

    def _count(self, parameter: Parameter, saved: Tensor) -> int:
        """The number of this step; the tensor is read once, when a run begins or goes on, and written every time."""
        before = self._steps[parameter] if parameter in self._steps else int(saved.item())
        self._steps[parameter] = before + 1
        saved.fill_(before + 1)
        return before + 1


@cache
def _values(signed: bool) -> tuple[float, ...]:
    """The 256 values that an 8-bit state stands for; made from real numbers even while all else is fake."""
    from bitsandbytes.functional import create_dynamic_map

    with unset_fake_temporarily():
        return tuple(create_dynamic_map(signed=signed).tolist())
