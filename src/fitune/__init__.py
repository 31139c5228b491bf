"""fitune: fine-tune large language models within the memory you have."""

from fitune.spec.hub import keep_out_hub_kernels

__version__ = "0.1.0"

keep_out_hub_kernels()  # before any room imports a library that would fetch them
