"""Weights that are divided while they are read: a tensor is whole on a rank for a moment, and then only its rows."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.nn import Parameter

from fitune.engine.host import HostMemory


def divided_dimension(shares: int) -> Callable[[Tensor], Shard]:
    """Divide rows, unless they are fewer than the shares: then some ranks would hold nothing, so columns if even."""

    def dimension(tensor: Tensor) -> Shard:
        """Shard(1) for a matrix of fewer rows than shares whose columns divide evenly, else Shard(0)."""
        few_rows = tensor.ndim > 1 and tensor.shape[0] < shares
        return Shard(1) if few_rows and tensor.shape[1] % shares == 0 else Shard(0)

    return dimension


class KeptRows:
    """This rank's rows of tensors that a model has stand-ins for, until fully_shard has made room for them.

    A stand-in has device, type and shape of the whole tensor and takes the memory of one element, so adapters can be
    put beside it. Its content means nothing.
    """

    def __init__(self, mesh: DeviceMesh, *, on_host: bool = False) -> None:
        """``on_host``: the rows are kept there, whatever device the whole tensors come to."""
        self._on_host = on_host
        self._rank = mesh.get_local_rank(mesh.ndim - 1)
        self._shares = mesh.size(mesh.ndim - 1)
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def keep(self, whole: Tensor) -> Tensor:
        """Keep this rank's rows of ``whole``; returns the stand-in."""
        own = self._rows_of(whole)[0].clone(memory_format=torch.contiguous_format)
        if self._on_host:
            own = own.to("cpu")
        stand_in = whole.new_zeros(1).expand(whole.shape)
        self._kept[_storage(stand_in)] = (stand_in, own)
        return stand_in

    def _rows_of(self, whole: Tensor) -> tuple[Tensor, bool]:
        """This rank's part of ``whole``, a view, and True if it is as long as the first rank's."""
        dimension = divided_dimension(self._shares)(whole).dim
        parts = whole.detach().chunk(self._shares, dimension)
        own = parts[self._rank] if self._rank < len(parts) else whole.detach().narrow(dimension, 0, 0)
        return own, own.shape == parts[0].shape

    @contextmanager
    def put_into(self, group: nn.Module, *, host: HostMemory | None = None) -> Iterator[None]:
        """Inside, ``group`` is divided by fully_shard; after it its parameters hold the rows that were kept.

        With ``host`` its other parameters hold their rows, too, and all rows are in its rooms: FSDP2 pins what is not
        pinned yet by torch's own allocator, which takes powers of two. That is left with rows that it has to pad.
        """
        places = [
            (module, name, parameter)
            for module in group.modules()
            for name, parameter in module.named_parameters(recurse=False)
            if not isinstance(parameter, DTensor) and (host is not None or _storage(parameter) in self._kept)
        ]
        empty = {
            id(parameter): Parameter(torch.empty_like(parameter, device="meta").contiguous(), parameter.requires_grad)
            for _, _, parameter in places
        }  # fmt: skip
        for module, name, parameter in places:
            module.register_parameter(name, empty[id(parameter)])
        yield
        filled: dict[int, Parameter] = {}
        for module, name, parameter in places:
            if id(parameter) not in filled:
                like = module.get_parameter(name)
                assert isinstance(like, DTensor)
                part, is_full = self._rows_of(parameter)
                _, own = self._kept.pop(_storage(parameter), (parameter, part))
                if host is not None:
                    room = host.empty_like(own) if is_full else torch.empty_like(own, device="cpu")
                    own = room.copy_(own)
                rows = divided(own, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())
                filled[id(parameter)] = Parameter(rows, parameter.requires_grad)
            module.register_parameter(name, filled[id(parameter)])


def divided(
    own: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    *,
    shape: torch.Size,
    stride: tuple[int, ...],
) -> DTensor:
    """The tensor of ``shape`` of which this rank has ``own``, which stays where it is.

    ``DTensor.from_local`` moves it to the mesh's device (torch 2.13): FSDP2 refuses weights on the host that were
    moved, and states on the host would go through the GPU at each save. So the layout is made of a tensor without
    memory.
    """
    layout = DTensor.from_local(
        torch.empty_like(own, device="meta"), mesh, placements, run_check=False, shape=shape, stride=stride
    )
    return DTensor(own, layout._spec, requires_grad=False)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
