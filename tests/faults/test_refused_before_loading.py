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


def test_nothing_fits(call, tmp_path, data_file):
    words = ("--tuning", "full", "--offload-optimizer", "device", "--output-dir", tmp_path / "run")
    err = call("train", *GPU, "--gpu", "t4", *words, "--data", data_file).ends(
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


@pytest.mark.parametrize(
    ("gpus", "nodes", "said"),
    [
        (1, 1, "135.7 GiB a node, 57.6 usable, 78.1 short"),
        (
            4,
            2,
            "12.0 + weights 7.5 + optimizer 44.9 + gradients 15.0 + gradient copies 8.3 = 87.6 GiB a node",
        ),
    ],
)
def test_a_host_holds_the_shares_of_all_its_ranks(call, tmp_path, data_file, gpus, nodes, said):
    """3 GiB for each of four processes; of two nodes each holds half of weights, optimizer and gradients."""
    words = ("--offload-parameters", "cpu", "--offload-optimizer", "cpu", "--output-dir", tmp_path / "run")
    words += ("--tuning", "full", "--data", data_file, "--offload-activations", "device")
    err = call("train", *GPU, "--gpu", "a100-40gb", "--gpus", gpus, "--nodes", nodes, *words).ends(2)
    assert said in " ".join(err.split())
    assert not (tmp_path / "run").exists()


def test_bf16_on_a_device_that_has_none(call):
    call("plan", *GPU, "--gpu", "t4", "--tuning", "qlora", "--precision", "bf16-master").ends(
        2,
        "t4 (compute capability 7.5) has no bf16",
        "asked for: precision: bf16-master",
        "try: precision: fp16",
    )


@pytest.mark.parametrize(("quantiser", "library"), [("nf4", "bitsandbytes"), ("hqq", "hqq.core.quantize")])
def test_a_quantiser_that_is_not_installed(train, monkeypatch, quantiser, library):
    monkeypatch.undo()  # the check is the first thing that loading does
    monkeypatch.setitem(sys.modules, library, None)
    train(tuning="qlora", quantization=quantiser).ends(2, "pip install 'fitune[quant]'")


@pytest.mark.parametrize("name", ["state.pt", "folder"])
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
