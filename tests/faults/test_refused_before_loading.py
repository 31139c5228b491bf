"""What cannot run is said before anything is loaded or written: nothing fits, the host is too small, the device has no
bf16, a quantiser is not installed, a checkpoint is a pickle (rows 20, 23, 42)."""

import pickle
import sys
from importlib import import_module

import pytest

from faults.adapters import Payload
from models.tiny_models import with_ids_moved_up

GPU = ("--model", "meta-llama/Llama-3.1-8B", "--host-memory", "64GiB")


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch):
    def load(*words, **named):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(import_module("fitune.train.prepare"), "load_model", load)


@pytest.mark.parametrize("command", ["plan", "train"])
def test_nothing_fits(call, tmp_path, data_file, command):
    more = (
        ("--data", data_file, "--output-dir", tmp_path / "run")
        if command == "train"
        else ("--details",) * (command == "plan")
    )
    err = call(command, *GPU, "--gpu", "t4", "--tuning", "full", "--offload-optimizer", "device", *more).ends(
        2,
        "nothing fits: meta-llama/Llama-3.1-8B on one t4",
        "smallest memory that is enough",
        "the smallest known GPU that holds it",
    )
    assert "try: tuning: lora" in err or "tuning: qlora" in err
    assert not (tmp_path / "run").exists()


def test_a_gpu_that_is_not_here_is_said_before_the_data_is_read(train, tmp_path, monkeypatch):
    def read(*words, **named):
        raise AssertionError("the data was tokenised")

    monkeypatch.setattr(import_module("fitune.train.run"), "prepare_data", read)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    train(gpu="3090").ends(2, "the plan is for rtx-3090, and torch sees no CUDA device")
    assert not (tmp_path / "run").exists()


def test_a_host_that_is_too_small_for_what_was_offloaded(call, tmp_path, data_file):
    words = ("--offload-parameters", "cpu", "--offload-optimizer", "cpu", "--output-dir", tmp_path / "run")
    call("train", *GPU, "--gpu", "a100-40gb", "--tuning", "full", "--data", data_file, *words).ends(
        2, "but not the host", "135.7 GiB a node, 57.6 usable, 78.1 short"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        (
            1,
            "processes 12.0 + weights 15.0 + optimizer 89.7 + gradients 29.9 + gradient copies 16.5 = 163.1 GiB",
        ),
        (
            2,
            "processes 12.0 + weights 7.5 + optimizer 44.9 + gradients 15.0 + gradient copies 8.3 = 87.6 GiB",
        ),
    ],
)
def test_a_host_holds_the_shares_of_all_its_ranks(call, tmp_path, data_file, nodes, said):
    """3 GiB for each of four processes; of two nodes each holds half of weights, optimizer and gradients."""
    words = ("--offload-parameters", "cpu", "--offload-optimizer", "cpu", "--output-dir", tmp_path / "run")
    device = ("--gpu", "a100-40gb", "--gpus", 4, "--nodes", nodes, "--offload-activations", "device")
    err = call("train", *GPU, *device, "--tuning", "full", "--data", data_file, *words).ends(2)
    assert f"{said} a node, 57.6 usable" in " ".join(err.split())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("gpu", "capability", "precision"), [("v100-32gb", "7.0", "bf16"), ("t4", "7.5", "bf16-master")]
)
def test_bf16_on_a_device_that_has_none(call, gpu, capability, precision):
    call("plan", *GPU, "--gpu", gpu, "--tuning", "qlora", "--precision", precision).ends(
        2,
        f"{gpu} (compute capability {capability}) has no bf16",
        f"asked for: precision: {precision}",
        "try: precision: fp16",
    )


def test_a_device_without_bf16_is_planned_with_fp16(call):
    call("plan", *GPU, "--gpu", "v100-32gb", "--tuning", "qlora").ends(0, "fp16")


@pytest.mark.parametrize(("quantiser", "library"), [("nf4", "bitsandbytes"), ("hqq", "hqq.core.quantize")])
def test_a_quantiser_that_is_not_installed(train, monkeypatch, quantiser, library):
    monkeypatch.undo()  # the check is the first thing that loading does
    monkeypatch.setitem(sys.modules, library, None)
    train(tuning="qlora", quantization=quantiser).ends(2, "pip install 'fitune[quant]'")


@pytest.mark.parametrize("name", ["state.pt", "checkpoint.ckpt", "training_args.bin", "folder"])
def test_a_pickled_checkpoint_is_refused_and_not_run(train, tmp_path, name):
    """A file, or the folder of another trainer."""
    path = tmp_path / name
    if name == "folder":
        path.mkdir()
    inside = path / "optimizer.pt" if name == "folder" else path
    inside.write_bytes(pickle.dumps(Payload(tmp_path / "exploded")))
    train(resume=path).ends(2, str(path))
    assert not (tmp_path / "exploded").exists()
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_of_another_model(train, tmp_path, model_folder):
    """An id beyond the embedding is an assertion inside a kernel on a GPU, which takes the process down."""
    mixed = with_ids_moved_up(model_folder, tmp_path / "mixed", by=300)
    train(model=mixed).ends(2, "the embedding has 384 rows: they are of different models")
    assert not (tmp_path / "run").exists()
