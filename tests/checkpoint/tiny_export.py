"""A Llama of 30 thousand parameters, a byte tokenizer and an adapter with something in it."""

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from fitune.checkpoint.layout import ExportFolder

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
CARD = "# what it is\n"
IDS = torch.arange(24).reshape(2, 12) * 11 % 260
TARGETS = ("q_proj", "v_proj", "down_proj")


def tiny_base(folder, *, tied=False, dtype=torch.float32):
    """Random weights written to ``folder`` and loaded from there, as a run would."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied, initializer_range=0.1,
    )  # fmt: skip
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


def with_adapter(base, *, rank=4, zero=False):
    """LoRA on ``TARGETS``; B is random unless ``zero``, so that the adapter changes the logits."""
    torch.manual_seed(1)
    config = LoraConfig(r=rank, lora_alpha=8, target_modules=list(TARGETS), task_type="CAUSAL_LM")
    model = get_peft_model(base, config, autocast_adapter_dtype=False)
    return model if zero else with_random_b(model)


def with_random_b(model):
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


@torch.no_grad()
def answer(model):
    return model.eval()(input_ids=IDS).logits


def assert_peft_answers(model, base, exported):
    """PEFT on the base in a folder answers with what was exported as the trained model does, and the base does not."""
    plain = AutoModelForCausalLM.from_pretrained(base)
    untrained = answer(plain)
    reloaded = PeftModel.from_pretrained(plain, exported)
    assert torch.equal(answer(reloaded), answer(model))
    assert (answer(model) - untrained).abs().max() > 0.1


def byte_tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="!", pad_token="!")


def into(target, **choice):
    """An export folder with what tests put beside weights."""
    words = {"chat_template": TEMPLATE, "card": CARD, **choice}
    return ExportFolder(target=target, tokenizer=byte_tokenizer(), **words)
