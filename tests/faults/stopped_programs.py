"""The program with a place to be stopped at: ``stopped_programs.py PLACE N ARGUMENTS``, where PLACE is a function.

Its N-th call prints READY and waits for a signal.
"""

import pkgutil
import signal
import sys
import time

import torch

from fitune.cli import main


def wait_in(target, call):
    module_name, _, name = target.rpartition(".")
    owner, real, calls = pkgutil.resolve_name(module_name), pkgutil.resolve_name(target), [0]

    def waiting(*words, **named):
        calls[0] += 1
        if calls[0] == call:
            print("READY", flush=True)
            for _ in range(12_000):
                time.sleep(0.01)  # a signal's handler runs in between
        return real(*words, **named)

    setattr(owner, name, waiting)


if __name__ == "__main__":
    # What was started in the background ignores SIGINT, and so does all that it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    target, call, *words = sys.argv[1:]
    wait_in(target, int(call))
    sys.argv[1:] = words
    main()
