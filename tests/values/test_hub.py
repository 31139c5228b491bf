"""No library that fitune imports fetches compiled code from a hub."""

import io
import logging
import subprocess
import sys

import pytest

from fitune.values.hub import keep_out_hub_kernels


def test_kernels_cannot_be_imported_unless_the_user_has(tmp_path):
    (tmp_path / "kernels.py").write_text("raise SystemExit('imported')")
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import fitune\n"
        "try:\n    import kernels\nexcept ImportError:\n    pass\n"
        "import types; mine = sys.modules['kernels'] = types.ModuleType('kernels')\n"
        "from fitune.values.hub import keep_out_hub_kernels; keep_out_hub_kernels()\n"
        "import kernels; sys.exit(kernels is not mine)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize("name", ["transformers.integrations.hub_kernels", "transformers.activations"])
def test_a_missing_kernel_is_no_line_on_start_and_other_warnings_are(name):
    keep_out_hub_kernels()
    lines = io.StringIO()
    handler = logging.StreamHandler(lines)
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        logger.error("`mamba_inner_fn` is falling back to its reference PyTorch implementation")
        logger.error("anything else")
    finally:
        logger.removeHandler(handler)
    assert lines.getvalue() == "anything else\n"
