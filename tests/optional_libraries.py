"""Marks of cases that need a library which is not in every installation."""

from importlib.util import find_spec

import pytest

NEEDS_BITSANDBYTES = pytest.mark.skipif(
    not find_spec("bitsandbytes"), reason="needs bitsandbytes: fitune[quant]"
)
NEEDS_DEEPSPEED = pytest.mark.skipif(not find_spec("deepspeed"), reason="needs deepspeed: fitune[deepspeed]")
NEEDS_FTP = pytest.mark.skipif(not find_spec("pyftpdlib"), reason="needs a local FTP server: pyftpdlib")
NEEDS_S3 = pytest.mark.skipif(
    not (find_spec("s3fs") and find_spec("moto") and find_spec("flask")),
    reason="needs s3fs and a local S3 server: fitune[remote], moto[server]",
)
NEEDS_HQQ = pytest.mark.skipif(not find_spec("hqq"), reason="needs hqq: fitune[quant]")
NEEDS_LM_EVAL = pytest.mark.skipif(
    not find_spec("lm_eval"), reason="needs lm-evaluation-harness: fitune[lm-eval]"
)
