"""A divided run whose model its devices could not hold is exported from what is on the disk, tensor by tensor."""

from dataclasses import replace

import pytest
from transformers import AutoTokenizer

from conftest import plan_of
from fitune.train.again import TrainedSource
from fitune.train.export import handover_of, stored_weights
from fitune.values.plan import Zero
from runs import same_weights, trained
from train.test_several_processes import tied_like

TINY_BYTES = 1000


def on_small_devices(plan):
    gpu = replace(plan.hardware.gpu, memory_bytes=TINY_BYTES)
    hardware = replace(plan.hardware, gpu=gpu, gpus_per_node=2)
    return replace(plan, hardware=hardware, sharding=Zero(stage=3, backend="fsdp"))


def small_handover(plan, source, report):
    small = on_small_devices(plan)
    weights = stored_weights(small, source)
    assert weights is not None
    words = {"tokenizer": AutoTokenizer.from_pretrained(plan.model_path), "report": report}
    handover = handover_of(None, weights, plan=small, on_note=print, **words)
    assert handover.weights is not None
    return handover


@pytest.mark.parametrize("settings", [{"tuning": "full"}, {"tuning": "lora", "export": "merged"}])
def test_it_is_what_the_run_itself_exported(model_folder, data_file, tmp_path, settings):
    words = {"max_steps": 2, "save_steps": 2, "learning_rate": 1e-2, **settings}
    plan = plan_of(model_folder, data_file, tmp_path / "run", **words)
    report = trained(plan)
    checkpoint = TrainedSource(path=tmp_path / "run/checkpoints/step-2", kind="checkpoint")
    handover = small_handover(plan, checkpoint, report)
    out = handover.trained(tmp_path / "out", secure=False)
    if settings["tuning"] == "full":
        assert same_weights(out / "model.safetensors", tmp_path / "run/model/model.safetensors")
        return
    assert same_weights(out / "adapter_model.safetensors", tmp_path / "run/adapter/adapter_model.safetensors")
    for source in (checkpoint, TrainedSource(path=tmp_path / "run/adapter", kind="adapter")):
        merged, loss = small_handover(plan, source, report).merged(None, tmp_path / f"merged {source.kind}")
        assert loss is None
        assert same_weights(merged / "model.safetensors", tmp_path / "run/merged/model.safetensors")


def test_a_model_that_a_device_holds_twice_is_loaded_whole(model_folder, data_file, tmp_path):
    plan = plan_of(model_folder, data_file, tmp_path)
    source = TrainedSource(path=tmp_path, kind="checkpoint")
    assert stored_weights(plan, source) is None
    divided = replace(plan, sharding=Zero(stage=3, backend="fsdp"))
    assert stored_weights(divided, source) is None


def test_a_tied_table_that_trained_is_read_from_the_adapter_that_names_it_twice(
    model_folder, data_file, tmp_path
):
    folder = tied_like(model_folder, tmp_path / "tied")
    words = {"lora_modules_to_save": ["embed_tokens"], "max_steps": 2, "learning_rate": 1e-2}
    plan = plan_of(folder, data_file, tmp_path / "run", tuning="lora", **words)
    report = trained(plan)
    source = TrainedSource(path=tmp_path / "run/adapter", kind="adapter")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    weights = stored_weights(small := on_small_devices(plan), source)
    handover = handover_of(None, weights, plan=small, on_note=print, tokenizer=tokenizer, report=report)
    out = handover.trained(tmp_path / "out", secure=False)
    assert same_weights(*(one / "adapter_model.safetensors" for one in (out, source.path)))
