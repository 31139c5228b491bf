"""Growth of a run on Ray: room for more workers that lasts is taken, after a save.

Ray Train would grow by itself, but it ends its workers without a save, and counts cores that others hold.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from fitune.launch.ray_cluster import RayCluster, cluster_now

LASTS_SECONDS = 25.0
"""Room is taken once it was there for so long: Ray looks every 20 s which nodes there are, and would start a group on
those that it knows."""
_LOOK_SECONDS = 5.0


@dataclass(slots=True, kw_only=True)
class Growth:
    """Number of workers that train, and of those that have had room for a while."""

    each: Mapping[str, float]
    most: int
    left: set[str] = field(default_factory=set)
    """Ids of nodes that will be taken away."""
    workers: int = 0
    """Workers that train; 0 while none are known to."""
    wanted: int = 0
    """Workers that the group that begins should have."""
    _looked_at: float = 0.0
    _room_since: float | None = None

    def larger(self) -> int:
        """Workers that have room now, where more than those that train have had it for a while; else 0."""
        now = time.monotonic()
        if not 0 < self.workers < self.most or now - self._looked_at < min(_LOOK_SECONDS, LASTS_SECONDS):
            return 0
        self._looked_at = now
        room = min(self.most, workers_with_room(cluster_now().without(self.left), self.each, self.workers))
        if room <= self.workers:
            self._room_since = None
            return 0
        if self._room_since is None:
            self._room_since = now
        return room if now - self._room_since >= LASTS_SECONDS else 0

    def begin(self, workers: int) -> None:
        """A group of workers begins its steps. One that is smaller than wanted shows that Ray has no place for more."""
        if workers < self.wanted:
            self.most = workers
        self.workers, self.wanted, self._room_since = workers, 0, None


def workers_with_room(cluster: RayCluster, each: Mapping[str, float], workers: int) -> int:
    """Workers that have room beside everybody else, ``workers`` of this run among them.

    Where less is held than they need, they have just ended, and what is free is theirs.
    """
    held = {
        name: sum(node.resources.get(name, 0.0) for node in cluster.nodes) - cluster.free.get(name, 0.0)
        for name in each
    }
    are_there = all(held[name] >= workers * amount for name, amount in each.items())
    return workers + cluster.free_slots(each) if are_there else workers
