"""The program, where memory runs out in the second step of a process that was not begun anew."""

import os
import sys

from fitune.cli import main
from fitune.models.language_model import LanguageModel

if __name__ == "__main__":
    print("process", os.getpid(), flush=True)
    real, calls = LanguageModel.loss_and_gradient, [0]

    def failing(*words, **named):
        calls[0] += 1
        if calls[0] == 2:
            raise RuntimeError("unable to mmap 4096 bytes from file <weights>: Cannot allocate memory (12)")
        return real(*words, **named)

    if "compare" in sys.argv:
        LanguageModel.loss_and_gradient = failing  # type: ignore[method-assign]
    main()
