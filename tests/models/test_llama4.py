"""Llama 4's text part: chunks of a row, a scale that counts tokens, a router that is no plain linear."""

from dataclasses import replace

import pytest
import torch
from transformers import Llama4Config, Llama4ForCausalLM, Llama4ForConditionalGeneration, Llama4TextConfig

from fitune.errors import FituneError
from fitune.models.low_bit.quantised import is_dense_linear
from fitune.models.row_attention import Rows
from fitune.values.model.model_config import load_model_spec
from fitune.values.rules import require_rules
from models.streams import assert_same_step, loss_and_gradients, make_rows, reference
from models.tiny_models import load
from plans import plan_for

TEXT = {
    "hidden_size": 32, "intermediate_size": 32, "intermediate_size_mlp": 64, "num_hidden_layers": 4, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 200, "num_local_experts": 4,
    "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "attention_chunk_size": 8, "floor_scale": 4,
    "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.1,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128, "image_size": 28,
    "vision_output_dim": 32, "patch_size": 14, "projector_input_dim": 32, "projector_output_dim": 32,
}  # fmt: skip
CHUNK = 8
(ROW,) = make_rows((2 * CHUNK + 5,))


def tiny():
    torch.manual_seed(0)
    return Llama4ForCausalLM(Llama4TextConfig(**TEXT)).train()


@pytest.fixture
def folder(tmp_path, traces):
    """A config.json as it is published, with the vision part beside the text part."""
    text = {**TEXT, "attention_chunk_size": 8192}  # a row that is traced would be cut into hundreds
    Llama4Config(text_config=text).save_pretrained(tmp_path / "llama4")
    return tmp_path / "llama4"


@pytest.mark.parametrize(("attention", "blocks"), [("sdpa", 0), ("eager", 3)])
def test_a_row_of_several_chunks_is_trained_as_transformers_does(attention, blocks):
    found = loss_and_gradients(tiny(), [ROW], attention=attention, blocks=blocks)
    assert_same_step(found, reference(tiny(), [ROW]))


def test_rows_are_cut_from_their_own_beginning():
    assert Rows((20, 3, 8)).cut(8).lengths == (8, 8, 4, 3, 8)
    short = Rows((3, 8))
    assert short.cut(8) is short


def test_its_published_config_is_planned_one_row_at_a_time(folder):
    """Queries are scaled by their position in the whole stream."""
    spec = load_model_spec(str(folder))
    assert (spec.model_type, spec.has_vision_part, spec.separates_rows) == ("llama4_text", True, False)
    assert "router" not in spec.adaptable_names
    packed = replace(plan_for(spec, tuning="lora", rows=1, seq_len=64), model_path=spec.name)
    with pytest.raises(FituneError, match="a row would depend on the rows before it"):
        require_rules(packed, "plan")
    alone = replace(packed, batch=replace(packed.batch, packing=False))
    require_rules(alone, "plan", "train", "rehearse")


def test_its_text_part_is_loaded_from_the_whole_checkpoint(tmp_path):
    torch.manual_seed(0)
    whole = Llama4ForConditionalGeneration(Llama4Config(text_config=TEXT, vision_config=VISION))
    whole.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert isinstance(loaded, Llama4ForCausalLM)
    with torch.no_grad():
        assert torch.equal(
            loaded(input_ids=ROW[None]).logits, whole.language_model(input_ids=ROW[None]).logits
        )


def test_the_router_is_not_packed_and_linears_of_other_classes_are():
    from transformers.models.falcon.modeling_falcon import FalconLinear

    routers = [module for module in tiny().modules() if type(module).__name__ == "Llama4Router"]
    assert routers
    assert not any(map(is_dense_linear, routers))
    assert is_dense_linear(FalconLinear(4, 4))
