"""A mixture of experts on a packed base, with adapters on attention and on the experts: trained like PEFT trains it."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from conftest import plan_of
from fitune.errors import RecipeError
from fitune.models.adapters import add_adapters
from fitune.models.low_bit.packing import quantise_blocks
from fitune.models.low_bit.quantised import PackedWeight
from fitune.values.plan import Dense, Nf4
from models.tiny_models import beside_tokenizer, tiny_model
from optional_libraries import NEEDS_HQQ
from runs import (
    assert_merged,
    stopped_and_resumed,
    trained,
)

pytest.importorskip("bitsandbytes")

WORDS = ["all-linear", "experts"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.fixture
def make_mixture(model_folder, data_file, tmp_path):
    """``make_plan`` on a tiny Qwen3 mixture with the tokenizer of the usual model."""
    mixture = tiny_model("qwen3_moe", vocab_size=384, num_hidden_layers=2)
    folder = beside_tokenizer(mixture, model_folder, tmp_path / "mixture")

    def make(**settings):
        words = {"tuning": "qlora", "lora_target_modules": WORDS, "lora_r": 4, **settings}
        return plan_of(folder, data_file, tmp_path / str(len(list(tmp_path.iterdir()))), **words)

    return make


def packed_twin(plan):
    """The packed model with fresh adapters, under transformers' own forward."""
    model = AutoModelForCausalLM.from_pretrained(plan.model_path, dtype=torch.float32)
    quantise_blocks(model.model.layers, plan.tuning.base)
    return add_adapters(model, plan.tuning, dtype=torch.float32, seed=plan.run.seed)


def dense_twin(plan):
    """transformers' model over the weights that the packed one stands for."""
    dense = AutoModelForCausalLM.from_pretrained(plan.model_path, dtype=torch.float32)
    packed = AutoModelForCausalLM.from_pretrained(plan.model_path, dtype=torch.float32)
    quantise_blocks(packed.model.layers, plan.tuning.base)
    with torch.no_grad():
        for name, module in packed.named_modules():
            if isinstance(module, PackedWeight):
                stack = name.replace("packed_", "")
                dense.get_parameter(stack if "packed_" in name else f"{name}.weight").copy_(
                    module.dequantised()
                )
    return dense


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("experts", [True, False], ids=["experts too", "attention"])
def test_losses_and_gradients_are_pefts_over_the_dequantised_weights(make_mixture, experts):
    plan = make_mixture(lora_target_modules=WORDS if experts else ["all-linear"])
    ours = packed_twin(plan)
    words = {"target_parameters": STACKS} if experts else {}
    torch.manual_seed(plan.run.seed)
    theirs = get_peft_model(
        dense_twin(plan),
        LoraConfig(
            r=4, lora_alpha=plan.tuning.alpha, target_modules=ATTENTION, task_type="CAUSAL_LM", **words
        ),
    )
    both = [{n: p for n, p in model.named_parameters() if p.requires_grad} for model in (ours, theirs)]
    assert both[0].keys() == both[1].keys()
    steps = [torch.optim.AdamW(trained.values(), lr=1e-2) for trained in both]
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        ids = torch.randint(3, 90, (2, 24), generator=generator)
        found, expected = (model(input_ids=ids, labels=ids).loss for model in (ours, theirs))
        assert found.item() == pytest.approx(expected.item(), abs=1e-6)
        found.backward()
        expected.backward()
        for name, parameter in both[0].items():
            torch.testing.assert_close(parameter.grad, both[1][name].grad, rtol=1e-3, atol=1e-6)
        for step in steps:
            step.step()
            step.zero_grad()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("quantization", ["nf4", pytest.param("hqq", marks=NEEDS_HQQ)])
def test_it_learns_resumes_bit_for_bit_and_peft_reads_its_adapter(make_mixture, tmp_path, quantization):
    straight, broken = (
        make_mixture(save_steps=2, output_dir=str(tmp_path / name), quantization=quantization)
        for name in ("a", "b")
    )
    one = stopped_and_resumed(straight, broken)
    assert one.final_loss < one.first_loss
    ours = load_file(Path(one.exported) / "adapter_model.safetensors")
    twin = packed_twin(straight)
    state = {name.replace(".weight", ".default.weight"): tensor for name, tensor in ours.items()}
    assert not twin.load_state_dict(state, strict=False).unexpected_keys
    again = PeftModel.from_pretrained(dense_twin(straight), one.exported)
    ids = torch.arange(3, 40)[None]
    torch.testing.assert_close(twin(input_ids=ids).logits, again(input_ids=ids).logits, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("quantization", ["nf4", pytest.param("hqq", marks=NEEDS_HQQ)])
def test_merged_it_is_the_16_bit_base_and_the_adapter(make_mixture, quantization):
    assert_merged(make_mixture(max_steps=3, learning_rate=5e-2, quantization=quantization))


def test_beside_dense_experts_too(make_mixture):
    plan = make_mixture(tuning="lora", max_steps=3)
    assert (plan.tuning.base, plan.tuning.targets) == (Dense(), (*ATTENTION, *STACKS))
    report = trained(plan)
    assert report.final_loss < report.first_loss


@pytest.mark.parametrize("words", [{"lora_dropout": 0.1}, {"dora": True}, {"lora_layers": [0]}], ids=str)
def test_what_peft_cannot_is_refused(make_mixture, words):
    with pytest.raises(RecipeError, match="PEFT adapts experts in all blocks alike"):
        make_mixture(**words)


def test_down_proj_names_no_experts(make_mixture):
    with pytest.raises(RecipeError, match="experts adapts those of all experts"):
        make_mixture(lora_target_modules=["down_proj"])
    assert make_mixture(lora_target_modules=["experts.down_proj"]).tuning.targets == (STACKS[1],)
    assert make_mixture().tuning.base == Nf4()
