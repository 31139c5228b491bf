"""On the path of every Python that run.sh starts: NULLCUDA_COMPUTE has operations computed (compute.py)."""

import importlib.abc
import importlib.machinery
import os
import sys


def _gloo_for_nccl(torch):
    """NCCL is not stubbed: several processes meet by gloo, which copies tensors of the card through the host."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    begin = dist.init_process_group

    def init_process_group(backend=None, *args, **kwargs):
        kwargs.pop("device_id", None)
        return begin(
            backend.replace("nccl", "gloo") if isinstance(backend, str) else backend, *args, **kwargs
        )

    dist.init_process_group = init_process_group


class _AfterTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module):
            sys.meta_path.remove(
                self
            )  # not before: datasets asks for the spec alone, to know whether there is a torch
            run(module)
            module.backends.cuda.enable_cudnn_sdp(False)  # cuDNN is not stubbed
            _gloo_for_nccl(module)
            if os.environ.get("NULLCUDA_COMPUTE"):
                import compute

                compute.begin()

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("NULLCUDA_LIB"):
    sys.meta_path.insert(0, _AfterTorch())
