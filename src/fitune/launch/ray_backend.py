"""Parts of fitune that Ray Train calls: its set-up of torch's process group, over the network interface that Ray
itself uses, its word of lost workers, and of its controller, whose room is given back. Needs ray."""

import os
from collections.abc import Callable
from typing import Any

from ray.core.generated.gcs_pb2 import PlacementGroupTableData
from ray.train import UserCallback
from ray.train.torch import TorchConfig
from ray.train.v2._internal.execution.callback import ControllerCallback
from ray.util.placement_group import PlacementGroup, remove_placement_group

import ray
from fitune.launch.place import interfaces_at


def use_own_interface() -> None:
    """Let gloo take the interface with this node's address: it would take the one that this machine's name leads to,
    which often is lo."""
    for name in interfaces_at(ray.util.get_node_ip_address()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


class OwnInterfaceBackend(TorchConfig().backend_cls):  # type: ignore[misc]  # ray does not type it
    """Sets up torch's process group after each worker has chosen the interface with its node's address."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Every worker runs ``use_own_interface`` before torch looks for an interface."""
        worker_group.execute(use_own_interface)
        super().on_start(worker_group, backend_config)


class OwnInterface(TorchConfig):  # type: ignore[misc]  # ray does not type it
    """Settings of torch in Ray Train, with the choice of the interface added."""

    @property
    def backend_cls(self) -> type:
        """Read by Ray when it starts the workers."""
        return OwnInterfaceBackend


class LossesTold(UserCallback):  # type: ignore[misc]  # ray does not type it
    """Calls ``told`` with the ranks that Ray found ended, on the driver's node, before Ray ends the others."""

    def __init__(self, told: Callable[[list[int]], None]) -> None:
        self._told = told

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Ray gives the errors by rank; the ranks are told in order."""
        self._told(sorted(worker_exceptions))


class ControllerTold(ControllerCallback):  # type: ignore[misc]  # ray does not type it
    """Tells ``mailbox`` which actor starts and watches the workers, as soon as it lives, before there is room for
    them."""

    def __init__(self, mailbox: Any) -> None:
        self._mailbox = mailbox

    def after_controller_start(self, train_run_context: Any) -> None:
        """Runs inside that actor."""
        self._mailbox.control.remote(ray.get_runtime_context().current_actor)


def remove_groups_of(controller: Any) -> None:
    """Remove the placement groups that ``controller``, which was ended, made: Ray keeps them, and the resources of the
    workers with them, until the job of this driver ends. Ray's own list of groups does not say who made them."""
    for record in ray._private.state.state._connect_and_get_accessor().get_placement_group_table():
        group = PlacementGroupTableData.FromString(record)
        if group.creator_actor_id == controller._actor_id.binary():
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(group.placement_group_id)))
