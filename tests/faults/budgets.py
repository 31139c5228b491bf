"""A device with so many bytes and no more: every tensor of the process is counted, and what is over is refused."""

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fitune.measure.memory import LiveTensors


class Budget(LiveTensors):
    """Counts what operations are given, too: tensors that are read from a file are made by no operation."""

    def __init__(self, budget_bytes=None):
        self.budget_bytes = budget_bytes
        self.refusals = 0
        super().__init__(())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _add(self, tensor):
        if tensor.device.type != "meta":
            super()._add(tensor)

    def _note_peak(self):
        if self.budget_bytes is not None and self.current_bytes > self.budget_bytes:
            self.refusals += 1
            over = self.current_bytes - self.budget_bytes
            raise torch.OutOfMemoryError(
                f"device out of memory: {over} bytes more than its {self.budget_bytes}"
            )
        super()._note_peak()

    @property
    def peak_bytes(self):
        return max(self.peaks.values())
