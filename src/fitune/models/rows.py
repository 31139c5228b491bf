"""Where the rows of a stream begin and end, as attention wants to know it."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor


class Rows:
    """Lengths of the rows in a stream; one object goes through all blocks.

    Not a tuple: torch.compile looks into those, and would compile each block again for every new number of rows.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = tuple(lengths)
        self._bounds: dict[torch.device, Tensor] = {}

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def bounds(self, device: torch.device) -> Tensor:
        """int32 [rows + 1]: 0, and where each row ends. Brought to the device once for all blocks."""
        if device not in self._bounds:
            ends = list(itertools.accumulate(self.lengths, initial=0))
            self._bounds[device] = torch.tensor(ends, dtype=torch.int32, device=device)
        return self._bounds[device]
