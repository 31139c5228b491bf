"""Ray's set-up of torch's process group, over the network interface that Ray itself uses. Needs ray."""

import os
from typing import Any

import psutil
from ray.train.torch import TorchConfig

import ray


def use_own_interface() -> None:
    """Let gloo take the interface with this node's address: it would take the one that this machine's name leads to,
    which often is lo."""
    own = ray.util.get_node_ip_address()
    for name, addresses in psutil.net_if_addrs().items():
        if own in (each.address for each in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


class OwnInterfaceBackend(TorchConfig().backend_cls):  # type: ignore[misc]  # ray does not type it
    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        worker_group.execute(use_own_interface)
        super().on_start(worker_group, backend_config)


class OwnInterface(TorchConfig):  # type: ignore[misc]  # ray does not type it
    @property
    def backend_cls(self) -> type:
        return OwnInterfaceBackend
