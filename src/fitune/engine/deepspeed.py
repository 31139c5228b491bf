"""DeepSpeed: ZeRO-1, -2 and -3 by its own runtime, inside the process group that is there already.

Rajbhandari et al. 2020 (arXiv 1910.02054). Learning rate, loss and accumulation are fitune's: DeepSpeed is given whole
losses whose gradients are those of the global batch, once for every micro-batch, and told which of them is the last.
"""

import logging
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Parameter

from fitune.engine.gradient_scale import LossScale
from fitune.engine.host import HostMemory
from fitune.engine.kept_rows import divided
from fitune.engine.optimizers import build_torch_optimizer, set_learning_rate
from fitune.engine.plain import Seed
from fitune.engine.protocol import Engine, EngineState, EnterPhase, LossModel, Update
from fitune.errors import HardwareError, first_line, require_library
from fitune.values.deepspeed import deepspeed_config, tell_deepspeed_where
from fitune.values.plan import Plan
from fitune.values.predictions import Phase


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


def _pin_in(host: HostMemory) -> None:
    """Let DeepSpeed pin tensors in rooms of ``host``, which are as large as they are: torch's are powers of two."""

    def pin_memory(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        """Returns a pinned copy."""
        return host.empty_like(tensor).copy_(tensor)

    import_deepspeed().accelerator.get_accelerator().pin_memory = pin_memory


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
        reason = first_line(error)
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
        """Returns the result of ``work``."""
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

    @property
    def weight(self) -> Parameter:
        """The head's own, or its stand-in."""
        return self._head[0].weight

    @property
    def bias(self) -> Parameter | None:
        """The head's own, or its stand-in; None where it has none."""
        return self._head[0].bias

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of ``hidden`` [..., D]."""
        [head] = self._head
        with nullcontext() if self._held else _gathered(head):
            return head.forward(hidden)

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


def _gathered(module: nn.Module) -> AbstractContextManager[None]:
    """Inside, the weights of ``module`` are whole on every rank."""
    return import_deepspeed().zero.GatheredParameters(list(module.parameters(recurse=False)))


def _keep_no_weights(whole: nn.Module) -> None:
    """Let linears keep their weight for backward as a parameter, which DeepSpeed empties, and not as a view of it.

    torch's own linear keeps ``weight.t()``, and with it the storage: gathered weights would stay until backward.
    """
    import_deepspeed()
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    def product(module: nn.Linear, hidden: Tensor) -> Tensor:
        """The linear's own product."""
        return zero3_linear_wrap(hidden, module.weight, module.bias)

    for module in whole.modules():
        if type(module) is nn.Linear:
            module.forward = partial(product, module)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """``elements`` of a weight from ``start`` on, which are those of flat tensor ``group`` from ``offset`` on."""

    group: int
    offset: int
    start: int
    elements: int


class DeepSpeedEngine(Engine):
    """The engine protocol around DeepSpeed's runtime."""

    def __init__(
        self,
        model: LossModel,
        trained: Mapping[str, Parameter],
        *,
        whole: nn.Module,
        head: Head,
        plan: Plan,
        host: HostMemory | None,
    ) -> None:
        """``model`` is made of ``whole``, with ``head`` in the place of its head; ``host`` pins what is offloaded.

        Raises NoPinnedMemory.
        """
        self.model = model
        self.head = head
        self.world = dist.get_world_size()
        self.loss_scale = LossScale(plan.precision)
        config = deepspeed_config(plan)
        stage = config["zero_optimization"]["stage"]
        if stage == 3:
            _keep_no_weights(whole)
        if host is not None:
            _pin_in(host)
        self.runtime, *_ = import_deepspeed().initialize(
            model=Trunk(whole),
            optimizer=build_torch_optimizer(trained, plan.optimizer),
            config=config,
            dist_init_required=False,
        )
        if host is not None:  # trained weights had rooms of their own before they were in one
            host.unpin_idle()
        self.optimizer = self.runtime.optimizer
        """DeepSpeed's, around torch's."""
        self.parameters = dict(trained)
        self.shares: FlatShares | TensorShares = (TensorShares if stage == 3 else FlatShares)(self.optimizer)
        self.pieces = {name: self.shares.piece(parameter) for name, parameter in self.parameters.items()}
        self.mesh = init_device_mesh("cpu", (self.world,))

    def forward_backward(
        self, batch: Any, *, divisor: int, enter_phase: EnterPhase, last: bool = True
    ) -> Tensor:
        """DeepSpeed averages gradients over ranks, and they are to be summed: the loss is times their number."""
        self.runtime.set_gradient_accumulation_boundary(last)
        scale = self.world * self.loss_scale.value / divisor
        losses: list[Tensor] = []
        with ExitStack() as until_backward_ends:

            def work() -> Tensor:
                """Forward and loss; returns an fp32 scalar whose backward passes on the gradients computed here."""
                hidden_TD = self.model.hidden_states(batch)
                enter_phase(Phase.LOSS)
                standing_in = until_backward_ends.enter_context(self.head.held())
                loss, gradient_TD = self.model.loss_and_gradient(hidden_TD.detach(), batch, scale=scale)
                losses.append(loss)
                gradients = [gradient_TD]
                for stand_in in standing_in.values():  # which forgets its gradient
                    gradients.append(stand_in.grad)
                    stand_in.grad = None
                if not standing_in:
                    until_backward_ends.close()
                return Seed.apply(gradients, hidden_TD, *standing_in).sum()

            enter_phase(Phase.FORWARD)
            seed = self.runtime(work)
            enter_phase(Phase.BACKWARD)
            self.runtime.backward(seed, scale_wrt_gas=False)
        return losses[0]

    def update(self, *, learning_rate: float, enter_phase: EnterPhase) -> Update:
        """Norm, clipping and step are DeepSpeed's; it steps nothing where a gradient is not finite."""
        enter_phase(Phase.UPDATE)
        if self.loss_scale.is_used:
            self.optimizer.override_loss_scale(self.loss_scale.value)
        set_learning_rate(self.optimizer, learning_rate)
        self.runtime.step()
        norm = float(self.runtime.get_global_grad_norm())
        return self.loss_scale.after_step(norm, skipped=bool(self.optimizer.overflow))

    def trained(self) -> dict[str, Tensor]:
        """The trained weights by name: whole at stages 1 and 2; at stage 3 this rank's rows, copied to the host, and
        those on NVMe are read one weight at a time."""
        found: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            if isinstance(self.shares, FlatShares):
                found[name] = parameter.detach()
                continue
            with _share_in_memory(parameter) as share:
                found[name] = self._by_rows(name, share.narrow(0, 0, self.pieces[name].elements))
        return found

    @torch.no_grad()
    def put_back(self, weights: Mapping[str, Tensor]) -> None:
        """Weights and their fp32 masters take the values of ``weights``."""
        for name, piece, flat, _ in self._each(is_changed=True):
            whole = weights[name]
            own = whole.flatten().narrow(0, piece.start, piece.elements)
            self.shares.put_weight(self.parameters[name], whole, own)
            _cut(flat.detach(), piece).copy_(own)

    def state(self) -> EngineState:
        """``master/<weight>``, and ``<state>/<weight>`` once there are states, by rows; called by every rank."""
        found: dict[str, Tensor] = {}
        for name, piece, flat, state in self._each():
            for kind, value in {"master": flat.detach(), **state}.items():
                if isinstance(value, Tensor):
                    by_rows = value.dim() > 0
                    found[f"{kind}/{name}"] = self._by_rows(name, _cut(value, piece)) if by_rows else value
        return EngineState(tensors=found, facts=self.loss_scale.facts())

    @torch.no_grad()
    def restore(self, state: EngineState) -> None:
        """Go on from ``state``. One without masters is of an optimizer that stepped the weights themselves."""
        kinds: dict[str, list[str]] = {}  # only names: each tensor is read when its turn comes
        for key in state.tensors:
            kind, _, name = key.partition("/")
            kinds.setdefault(name, []).append(kind)
        if odd := kinds.keys() - self.pieces.keys():
            raise KeyError(min(odd))
        for name, piece, flat, own in self._each(is_changed=True):
            for kind in kinds.get(name, ()):
                whole = state.tensors[f"{kind}/{name}"]
                if whole.dim() == 0:
                    own[kind] = whole.to(flat.device).clone()
                    continue
                if kind != "master" and kind not in own:
                    own[kind] = torch.zeros_like(flat, dtype=whole.dtype, requires_grad=False)
                target = flat.detach() if kind == "master" else own[kind]
                _cut(target, piece).copy_(whole.flatten().narrow(0, piece.start, piece.elements))
        self.loss_scale.restore(state.facts)

    def resident(self) -> list[Tensor]:
        """Masters and states; at stage 3 also DeepSpeed's own gradient buffers."""
        flats = self.shares.flats
        states = [value for flat in flats for value in self.optimizer.state[flat].values()]
        return [*flats, *(value for value in states if isinstance(value, Tensor)), *self.shares.buffers]

    def _each(self, *, is_changed: bool = False) -> Iterator[tuple[str, Piece, Tensor, dict[str, Any]]]:
        """Each weight's name and piece with the flat tensor it is in and that one's states, which are in memory until
        the next is asked for."""
        for group, flat in enumerate(self.shares.flats):
            with self.shares.in_memory(group, is_changed=is_changed):
                for name, piece in self.pieces.items():
                    if piece.group == group:
                        yield name, piece, flat, self.optimizer.state[flat]

    def _by_rows(self, name: str, stretch: Tensor) -> DTensor:
        """The tensor like weight ``name`` of which this rank has ``stretch``, divided by rows, on the host."""
        parameter, piece = self.parameters[name], self.pieces[name]
        shape = torch.Size(getattr(parameter, "ds_shape", parameter.shape))
        whole = torch.zeros(math.prod(shape), dtype=stretch.dtype, device=stretch.device)
        whole.narrow(0, piece.start, piece.elements).copy_(stretch)
        dist.all_reduce(whole)  # every element is on one rank, and zero on the others
        rows = whole.view(shape).chunk(self.mesh.size())
        rank = self.mesh.get_local_rank()
        own = rows[rank] if rank < len(rows) else whole.view(shape)[:0]
        stride = torch.empty(shape, device="meta").stride()
        host = own.to("cpu", copy=True)
        return divided(host, self.mesh, [Shard(0)], shape=shape, stride=stride)


class FlatShares:
    """Stages 1 and 2: every rank has all weights, and a stretch of each group's masters."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @property
    def flats(self) -> list[Tensor]:
        """fp32 masters, one flat tensor for each group."""
        return self.optimizer.single_partition_of_fp32_groups

    @property
    def buffers(self) -> list[Tensor]:
        """An empty list: nothing else stays between two steps."""
        return []

    def in_memory(self, group: int, *, is_changed: bool) -> AbstractContextManager[None]:
        """Inside, masters and states of flat tensor ``group`` are in memory, as always."""
        return nullcontext()

    def piece(self, parameter: Parameter) -> Piece:
        """The elements of a weight whose masters this rank has."""
        mapping = parameter._hp_mapping
        if mapping is None:  # all of it is in other ranks' stretches
            groups = enumerate(self.optimizer.bit16_groups)
            group = next(i for i, each in groups if any(p is parameter for p in each))
            return Piece(group=group, offset=0, start=0, elements=0)
        own, of_weight = mapping.hp_fragment_address, mapping.lp_fragment_address
        return Piece(
            group=mapping.param_group_index, offset=own.start, start=of_weight.start, elements=own.numel
        )

    def put_weight(self, parameter: Parameter, whole: Tensor, own: Tensor) -> None:
        """The weight takes the values of ``whole``."""
        parameter.data.copy_(whole)


class TensorShares:
    """Stage 3: every rank has the same stretch of each weight, padded where the weight ends."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @property
    def flats(self) -> list[Tensor]:
        """fp32 masters, one flat tensor for each group."""
        return self.optimizer.fp32_partitioned_groups_flat

    @property
    def buffers(self) -> list[Tensor]:
        """DeepSpeed's gradient shares and sum buffers."""
        sums = [bucket.buffer for bucket in self.optimizer.ipg_buckets.values() if bucket.buffer is not None]
        return [self.optimizer.grad_partitions_flat_buffer, *sums]

    @contextmanager
    def in_memory(self, group: int, *, is_changed: bool) -> Iterator[None]:
        """Inside, masters and states of flat tensor ``group`` are in memory, read from NVMe where they wait there.

        Small shares are never written to NVMe: DeepSpeed's swapper does not know them.
        """
        swapper, flat = getattr(self.optimizer, "optimizer_swapper", None), self.flats[group]
        if swapper is None or not swapper.is_swappable_tensor(
            numel=self.optimizer.fp16_partitioned_groups_flat_numel[group]
        ):
            yield
            return
        swapper.swap_in_optimizer_state(flat)
        try:
            yield
        finally:
            if is_changed:
                swapper.swap_out_optimizer_state(flat)
            else:
                swapper.release_swap_buffers(flat)

    def piece(self, parameter: Parameter) -> Piece:
        """The elements of a weight that this rank has."""
        group, offset, elements = self.optimizer.grad_position[self.optimizer.get_param_id(parameter)]
        start = min(elements * dist.get_rank(parameter.ds_process_group), parameter.ds_numel)
        return Piece(
            group=group, offset=offset, start=start, elements=min(elements, parameter.ds_numel - start)
        )

    def put_weight(self, parameter: Parameter, whole: Tensor, own: Tensor) -> None:
        """This rank's share takes the values ``own`` of it."""
        with _share_in_memory(parameter, is_changed=True) as share:
            share.narrow(0, 0, own.numel()).copy_(own)
        if parameter.shape == whole.shape:  # a small one, which stays whole
            parameter.data.copy_(whole)


@contextmanager
def _share_in_memory(parameter: Parameter, *, is_changed: bool = False) -> Iterator[Tensor]:
    """Yields this rank's share of a weight, which inside is read from NVMe where it waits there."""
    share, swapper = parameter.ds_tensor, parameter.nvme_swapper
    if share.final_location != "nvme":
        yield share
        return
    swapper.swap_in([parameter], async_op=False)
    try:
        yield share
    finally:
        if is_changed:
            swapper.swap_out_and_release([parameter])
        else:
            swapper.remove_partition_and_release_buffers([parameter])


def _cut(flat: Tensor, piece: Piece) -> Tensor:
    return flat.narrow(0, piece.offset, piece.elements)
