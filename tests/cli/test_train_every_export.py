"""`fitune train` ends well for each thing a run can hand over."""

import pytest


@pytest.mark.parametrize(
    ("settings", "written"),
    [
        (["--tuning", "full"], "model/model.safetensors"),
        (["--tuning", "lora", "--export", "merged"], "merged/model.safetensors"),
        (["--tuning", "lora"], "adapter/adapter_model.safetensors"),
    ],
)
def test_the_export_is_there(
    settings, written, model_folder, data_file, tmp_path,
    call,
):  # fmt: skip
    words = ["--model", str(model_folder), "--data", str(data_file), "--output-dir", str(tmp_path / "run")]
    words += ["--gpu", "cpu", "--seq-len", "64", "--max-steps", "2", "--samples", "0", *settings]
    call("train", *words).ends(0)
    assert (tmp_path / "run" / written).is_file()
