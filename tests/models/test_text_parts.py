"""Checkpoints that also see: their text part alone is planned, loaded, trained and exported."""

import shutil
import warnings
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Ministral3ForCausalLM,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralForCausalLM,
)

from conftest import plan_of
from fitune.errors import ModelError
from fitune.estimate.parameters import count_parameters
from fitune.models.adapter_file import check_adapter
from fitune.models.adapters import load_adapter
from fitune.models.readers import text_config
from fitune.models.weights import load_model
from fitune.rehearse.profile import TransformersTracer
from fitune.train.prepare import prepare
from fitune.values.model.tracer import trace_with
from laws.test_memory_prediction import bench
from runs import trained

TEXT = {
    "vocab_size": 384, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "initializer_range": 0.1, "tie_word_embeddings": False,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
FOR_BLOCKS = {
    **TEXT, "tie_word_embeddings": True, "num_kv_shared_layers": 1, "num_hidden_layers": 2,
    "layer_types": ["full_attention", "full_attention"],
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 384,
}  # fmt: skip
"""Embeddings for every block, and keys and values of the last block that an earlier one made."""
SOUND = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
IDS = torch.arange(3, 40)[None]


def seeing(kind):
    torch.manual_seed(0)
    if kind == "gemma3":
        text = {**TEXT, "sliding_window": 64, "tie_word_embeddings": True}
        return Gemma3ForConditionalGeneration(
            Gemma3Config(text_config=text, vision_config=VISION, mm_tokens_per_image=4)
        )
    if kind == "gemma4":
        text = {**FOR_BLOCKS, "global_head_dim": 64, "use_double_wide_mlp": True}
        whole = Gemma4ForConditionalGeneration(
            Gemma4Config(text_config=text, vision_config=VISION, audio_config=SOUND)
        )
        for number, block in enumerate(whole.model.language_model.layers):
            block.layer_scalar.fill_(0.9 + number / 20)  # a buffer, which the published ones have, too
        return whole
    vision = {**VISION, "head_dim": 16, "model_type": "pixtral"}
    config = Mistral3Config(
        text_config={**TEXT, "model_type": kind}, vision_config=vision, tie_word_embeddings=False
    )
    return Mistral3ForConditionalGeneration(config)


CLASSES = {
    "gemma3": Gemma3ForCausalLM, "gemma4": Gemma4ForCausalLM,
    "ministral3": Ministral3ForCausalLM, "mistral": MistralForCausalLM,
}  # fmt: skip
ON_CPU = {"dtype": torch.float32, "device": torch.device("cpu")}


@pytest.fixture(params=["gemma3", "gemma4", "ministral3", pytest.param("mistral", marks=pytest.mark.slow)])
def kind(request):
    return request.param


@pytest.fixture
def folder(kind, model_folder, tmp_path):
    """A checkpoint with a vision tower and the tokenizer of the usual model."""
    trace_with(TransformersTracer)
    target = tmp_path / "seeing"
    shutil.copytree(model_folder, target, ignore=shutil.ignore_patterns("*.safetensors*", "*config.json"))
    shutil.copy(model_folder / "tokenizer_config.json", target)
    seeing(kind).save_pretrained(target)
    return target


def plan_on(folder, data_file, **settings):
    return plan_of(folder, data_file, folder.parent / "run", max_steps=1, **settings)


@torch.no_grad()
def answers(model):
    return model.eval()(input_ids=IDS).logits


def test_the_text_part_alone_is_read_and_answers_like_the_whole(kind, folder, untraced):
    loaded = load_model(str(folder), **ON_CPU)
    assert type(loaded) is CLASSES[kind]
    torch.testing.assert_close(answers(loaded), answers(seeing(kind)), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "tuning"),
    [
        ("gemma3", "lora"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("gemma4", "full"), ("ministral3", "full"))
        ),
        pytest.param("mistral", "full", marks=pytest.mark.weekly),
    ],
)
def test_the_peak_is_the_predicted_one(kind, folder, data_file, tuning, traces):
    """A trace of blocks that are unlike takes half a minute."""
    plan = plan_on(folder, data_file, tuning=tuning)
    prepared = prepare(plan)
    held = sum(p.numel() for name, p in prepared.model.whole.named_parameters() if "lora_" not in name)
    assert held == count_parameters(plan.model).total
    rows = bench.random_rows((64,) * plan.batch.micro_batch_size, vocab_size=384)
    predicted = max(bench.predicted_peaks(plan, rows).values())
    measured = max(bench.peaks_of_step(prepared, plan, rows).values())
    assert measured == pytest.approx(predicted, rel=0.01)


def test_an_adapter_fits_the_whole_that_users_load(kind, folder, data_file, untraced):
    """Under the whole's names, and on its language model alone: towers have linears of the same names."""
    exported = Path(str(trained(plan_on(folder, data_file, learning_rate=5e-2)).exported))
    assert check_adapter(exported, base=folder) == ()
    ours = answers(load_adapter(load_model(str(folder), **ON_CPU), exported))
    whole = type(seeing(kind)).from_pretrained(folder)
    untrained = answers(whole)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*missing|.*unexpected")  # PEFT only warns
        adapted = PeftModel.from_pretrained(whole, str(exported))
    torch.testing.assert_close(answers(adapted), ours, rtol=0, atol=1e-5)
    assert not torch.allclose(untrained, ours, atol=1e-3)
    assert not [name for name, _ in adapted.named_parameters() if "lora" in name and "vision" in name]


FULL, MERGED = {"tuning": "full"}, {"export": "merged"}


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("gemma3", FULL),
        ("gemma4", MERGED),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("gemma4", FULL), ("ministral3", MERGED))),
    ],
    ids=str,
)
def test_a_whole_export_is_the_language_model(kind, folder, data_file, words, untraced):
    exported = trained(plan_on(folder, data_file, **words)).exported
    found = AutoModelForCausalLM.from_pretrained(str(exported))
    assert type(found) is CLASSES[kind]
    assert answers(found).isfinite().all()


WIDTHS = {
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064,
}  # fmt: skip


def test_a_vision_model_whose_text_part_is_none_by_itself_is_said_to_be_one():
    """Not that its files are cut short."""
    text = {"model_type": "mllama_text_model", **WIDTHS}
    for config in (
        {"model_type": "qwen2_5_vl", **WIDTHS, "vision_config": {}},
        {"model_type": "mllama", "text_config": text, "vision_config": {}},
    ):
        with pytest.raises(
            ModelError, match="is a vision model, and its text part cannot be .* alone"
        ) as caught:
            text_config(config)
        assert caught.value.hint == "a text model of its size: Qwen/Qwen2.5-7B"
