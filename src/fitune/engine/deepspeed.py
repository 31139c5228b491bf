"""DeepSpeed: ZeRO-1, -2 and -3 by its own runtime, inside the process group that is there already.

Rajbhandari et al. 2020 (arXiv 1910.02054). Learning rate, loss and accumulation are fitune's: DeepSpeed is given whole
losses whose gradients are those of the global batch, once for every micro-batch, and told which of them is the last.
"""

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from fitune.engine.deepspeed_shares import FlatShares, TensorShares
from fitune.engine.gradient_scale import LossScale
from fitune.engine.optimizers import build_torch_optimizer, set_learning_rate
from fitune.engine.plain import NOT_FINITE_HINT, Seed
from fitune.engine.protocol import EngineState, EnterPhase, LossModel, Update
from fitune.errors import HardwareError, TrainingFailed, require_library
from fitune.spec.deepspeed import tell_deepspeed_where
from fitune.spec.plan import Optimizer, Precision
from fitune.spec.predictions import Phase


@cache
def import_deepspeed() -> Any:
    """The library, which says errors only, and on the processor where torch sees no GPU."""
    tell_deepspeed_where(has_gpu=torch.cuda.is_available())
    logging.disable(logging.WARNING)  # it talks while it is imported, on standard output
    try:
        require_library("deepspeed", needed_by="backend: deepspeed", extra="deepspeed")
        import deepspeed
    finally:
        logging.disable(logging.NOTSET)
    if os.environ.get("DS_ACCELERATOR") == "cpu":  # an all-reduce that a compiler would have to make first
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
    talk = logging.getLogger("DeepSpeed")
    talk.setLevel(logging.ERROR)
    for handler in talk.handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)
    return deepspeed


def require_nvme(folder: str) -> None:
    """Raises HardwareError where DeepSpeed cannot write to ``folder``, or has no asynchronous reads and writes."""
    import_deepspeed()
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not os.access(folder, os.W_OK):
        raise HardwareError(
            f"nvme_path {folder} is no folder that can be written", hint="make it, or name another"
        )
    try:
        if AsyncIOBuilder().is_compatible(verbose=False):
            AsyncIOBuilder().load(verbose=False)
            return
        reason = "libaio is not installed"
    except (RuntimeError, OSError) as error:  # of the compiler and of the loader
        reason = str(error).splitlines()[0]
    raise HardwareError(
        f"DeepSpeed cannot use NVMe here: {reason}",
        hint="apt install libaio-dev g++ and pip install ninja on every node; or offload_optimizer: cpu",
    )


class Trunk(nn.Module):
    """Runs any work inside the forward of the module that DeepSpeed wraps: ``whole`` is what its hooks are on."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.whole = whole

    def forward(self, work: Callable[[], Any]) -> Any:
        return work()


class Head(nn.Module):
    """The head outside of DeepSpeed's hooks: it runs in chunks, and its gradient is handed over once.

    DeepSpeed takes a gradient as soon as a parameter has one and expects no other. So while the head is ``held``,
    stand-ins on the storages of its weights collect theirs.
    """

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self._head = (head,)  # a part of the whole, not to be registered twice
        self._held = False

    def forward(self, hidden: Tensor) -> Tensor:
        [head] = self._head
        with nullcontext() if self._held else _gathered(head):
            return head.forward(hidden.to(next(head.parameters()).dtype))

    @contextmanager
    def held(self) -> Iterator[dict[Parameter, Parameter]]:
        """Inside, the weights are whole; yields the stand-in of every trained one."""
        [head] = self._head
        own = {name: p for name, p in head.named_parameters(recurse=False) if p.requires_grad}
        with _gathered(head):
            standing_in = {name: Parameter(p.detach()) for name, p in own.items()}
            head._parameters.update(standing_in)
            self._held = True
            try:
                yield {own[name]: stand_in for name, stand_in in standing_in.items()}
            finally:
                self._held = False
                head._parameters.update(own)


def _taken(stand_in: Parameter) -> Tensor:
    """The parameter's gradient, which the parameter then forgets."""
    gradient, stand_in.grad = stand_in.grad, None
    assert gradient is not None
    return gradient


def _gathered(module: nn.Module) -> AbstractContextManager[None]:
    """Inside, the weights of ``module`` are whole on every rank."""
    gathered: AbstractContextManager[None] = import_deepspeed().zero.GatheredParameters(
        list(module.parameters(recurse=False))
    )
    return gathered


def _keep_no_weights(whole: nn.Module) -> None:
    """Let linears keep their weight for backward as a parameter, which DeepSpeed empties, and not as a view of it.

    torch's own linear keeps ``weight.t()``, and with it the storage: gathered weights would stay until backward.
    """
    import_deepspeed()
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    for module in whole.modules():
        if type(module) is nn.Linear:
            module.forward = partial(_linear, zero3_linear_wrap, module)


def _linear(function: Callable[..., Tensor], module: nn.Linear, hidden: Tensor) -> Tensor:
    return function(hidden, module.weight, module.bias)


class DeepSpeedEngine:
    """The engine protocol around DeepSpeed's runtime."""

    def __init__(
        self,
        model: LossModel,
        trained: Mapping[str, Parameter],
        *,
        whole: nn.Module,
        head: Head,
        optimizer: Optimizer,
        precision: Precision,
        config: Mapping[str, Any],
        device: torch.device,
    ) -> None:
        """``model`` is made of ``whole``, with ``head`` in the place of its head."""
        self.model = model
        self.head = head
        self.world = dist.get_world_size()
        self.loss_scale = LossScale() if precision is Precision.FP16 else None
        if config["zero_optimization"]["stage"] == 3:
            _keep_no_weights(whole)
        os.environ.setdefault("LOCAL_RANK", str(device.index or 0))  # srun and mpirun have other words for it
        self.runtime, *_ = import_deepspeed().initialize(
            model=Trunk(whole),
            optimizer=build_torch_optimizer(trained, optimizer),
            config=dict(config),
            dist_init_required=False,
        )
        stage = config["zero_optimization"]["stage"]
        self.shares = (TensorShares if stage == 3 else FlatShares)(trained, self.runtime.optimizer)

    def forward_backward(
        self, batch: Any, *, supervised_tokens: int, enter_phase: EnterPhase, last: bool = True
    ) -> Tensor:
        """DeepSpeed averages gradients over ranks, and they are to be summed: the loss is times their number."""
        self.runtime.set_gradient_accumulation_boundary(last)
        scale = self.world * self._scale() / supervised_tokens
        losses: list[Tensor] = []
        with ExitStack() as until_backward_ends:

            def work() -> Tensor:
                hidden_TD = self.model.hidden_states(batch)
                enter_phase(Phase.LOSS)
                standing_in = until_backward_ends.enter_context(self.head.held())
                loss, gradient_TD = self.model.loss_and_gradient(hidden_TD.detach(), batch, scale=scale)
                losses.append(loss)
                gradients = [gradient_TD, *map(_taken, standing_in.values())]
                if not standing_in:
                    until_backward_ends.close()
                return cast(Tensor, Seed.apply(gradients, hidden_TD, *standing_in).sum())

            enter_phase(Phase.FORWARD)
            seed = self.runtime(work)
            enter_phase(Phase.BACKWARD)
            self.runtime.backward(seed, scale_wrt_gas=False)
        return losses[0]

    def update(self, *, learning_rate: float, enter_phase: EnterPhase) -> Update:
        """Norm, clipping and step are DeepSpeed's; it steps nothing where a gradient is not finite."""
        enter_phase(Phase.UPDATE)
        scale = self._scale()
        if self.loss_scale is not None:
            self.runtime.optimizer.override_loss_scale(scale)
        set_learning_rate(self.runtime.optimizer, learning_rate)
        self.runtime.step()
        norm = float(self.runtime.get_global_grad_norm())
        skipped = bool(self.runtime.optimizer.overflow)
        if skipped and self.loss_scale is None:
            raise TrainingFailed(
                f"the gradients are not finite (norm {norm}); nothing was updated", hint=NOT_FINITE_HINT
            )
        if self.loss_scale is not None:
            self.loss_scale.update(overflowed=skipped)
        return Update(grad_norm=norm, loss_scale=scale, skipped=skipped)

    def rest(self) -> None:
        """Does nothing: every module lets its weights go when it is done."""

    def trained(self) -> dict[str, Tensor]:
        return self.shares.trained()

    def put_back(self, weights: Mapping[str, Tensor]) -> None:
        self.shares.put_back(weights)

    def state(self) -> EngineState:
        """Masters and states as one process names them, whatever they are divided into."""
        facts = self.loss_scale.facts() if self.loss_scale is not None else {}
        return EngineState(tensors=self.shares.states(), facts=facts)

    def restore(self, state: EngineState) -> None:
        self.shares.restore(state.tensors)
        if self.loss_scale is not None:
            self.loss_scale.restore(state.facts)

    def resident(self) -> list[Tensor]:
        return self.shares.resident()

    def _scale(self) -> float:
        return 1.0 if self.loss_scale is None else self.loss_scale.value
