"""A small base model of the demo's own: a byte-level BPE tokenizer and a Llama with random weights."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BOS, EOS, PAD = "<|begin|>", "<|end|>", "<|pad|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")

INITIALIZER_RANGE = 0.05
"""Close to 1/√hidden_size, so that a narrow model starts with signals of size one."""

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
    {{- '<|' ~ message.role ~ '|>' -}}
    {%- if message.role == 'assistant' -%}
        {%- generation -%}{{- message.content ~ eos_token -}}{%- endgeneration -%}
    {%- else -%}
        {{- message.content -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of the model, under Hugging Face's names."""

    vocab_size: int
    """The most tokens there may be; the model gets as many as the texts give, rounded up to a multiple of 64."""
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int


def write_base_model(directory: Path, texts: Iterable[str], *, shape: Shape, seed: int) -> None:
    """Write model and tokenizer as a Hugging Face folder; the tokenizer learns its merges from ``texts``."""
    tokenizer = train_tokenizer(texts, vocab_size=shape.vocab_size, context=shape.max_position_embeddings)
    model = random_model(shape, tokenizer, seed=seed)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def train_tokenizer(texts: Iterable[str], *, vocab_size: int, context: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE: every text can be encoded, and decoding gives it back. A row begins with BOS, as in Llama."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    special = [BOS, EOS, PAD, *ROLES]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, backend.token_to_id(BOS))]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=BOS, eos_token=EOS, pad_token=PAD,
        extra_special_tokens=list(ROLES), model_max_length=context, clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def random_model(shape: Shape, tokenizer: PreTrainedTokenizerFast, *, seed: int) -> LlamaForCausalLM:
    """Random fp32 weights; input and output embeddings are one matrix."""
    config = LlamaConfig(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_attention_heads,
        max_position_embeddings=shape.max_position_embeddings,
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    for block in model.model.layers:
        let_values_pass(block.self_attn.v_proj.weight, block.self_attn.o_proj.weight)
    return model


@torch.no_grad()
def let_values_pass(value_weight: torch.Tensor, output_weight: torch.Tensor) -> None:
    """Make attention begin as a copy: value = random rotation R, output = Rᵀ, so that output · value = identity.

    Trained transformers show such a diagonal, and starting with it spares a small model the steps to find it
    (mimetic initialisation, Trockman & Kolter 2023, arXiv 2305.09828, with the sign that copies).
    Both weights are square: as many key/value heads as heads.
    """
    torch.nn.init.orthogonal_(value_weight)
    output_weight.copy_(value_weight.T)
