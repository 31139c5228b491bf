"""The program, where memory runs out on rank 1 in its third loss, once: the file that FAILED names says that it did."""

import os
from pathlib import Path

import torch

from fitune.cli import main
from fitune.models.language_model import LanguageModel

if __name__ == "__main__":
    torch.set_num_threads(1)
    real, calls, failed = LanguageModel.loss_and_gradient, [0], Path(os.environ["FAILED"])

    def failing(*words, **named):
        calls[0] += 1
        if calls[0] == 3 and not failed.exists():
            failed.touch()
            raise torch.OutOfMemoryError("device out of memory: 4096 bytes more than its 1048576")
        return real(*words, **named)

    if os.environ.get("RANK") == "1":
        LanguageModel.loss_and_gradient = failing
    main()
