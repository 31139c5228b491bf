"""No compiled code from a hub: what ``kernels`` would download is run by whoever imported it, and nobody is asked.

bitsandbytes fetches one whenever it is imported on a CPU with AVX-512 BF16, transformers where an attention or experts
implementation is not installed. Without the library both use what they bring themselves.
"""

import logging
import os
import sys
from typing import Any


def keep_out_hub_kernels() -> None:
    """Make ``import kernels`` fail in this process, unless the user's own code imported it before."""
    modules: dict[str, Any] = sys.modules
    modules.setdefault("kernels", None)
    os.environ.setdefault("USE_HUB_KERNELS", "NO")  # transformers asks this, too
    # bitsandbytes tells people at every start to install what is kept out.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
