"""The command line inside the test's process: exit code, standard output, standard error."""

import pytest


@pytest.fixture
def train(call, model_folder, data_file, tmp_path):
    """``fitune train`` of two steps; keywords are settings on top, words are further options."""

    def run(*words, **settings):
        wanted = {
            "model": model_folder, "data": data_file, "tuning": "lora", "lora_r": 4, "precision": "fp32", "gpu": "cpu",
            "seq_len": 64, "micro_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 1e-2,
            "max_steps": 2, "save_steps": 0, "samples": 0, "output_dir": tmp_path / "run",
        }  # fmt: skip
        chosen = [
            word for key, value in {**wanted, **settings}.items() for word in ("--set", f"{key}={value}")
        ]
        return call("train", *chosen, *words)

    return run
