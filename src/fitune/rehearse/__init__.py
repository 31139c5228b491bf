"""The Plan's own step on fake tensors: every allocation and every free, without a GPU and without weights."""
