"""Everything the demo needs, written into one folder without a network: a small base model, rows and recipes.

Its recipes are written as a user would write them: they lie beside the data and can be run again.

Its world is a small shop's orders, told as plain text and asked for as a task. Pretraining text tells of an order and
then says again what it said, in other words: a model that reads it learns what goes with goods, a colour, a number and
a city, and to look back for it. The task asks for the order in a form the text never shows. Its held-out rows are about
goods and cities that no training row of the task names, so that no answer can be remembered from one: the form has to
be learned and the values have to be read.

Its numbers were found by trying on two CPU cores, where about 5 thousand tokens/s are trained, with three wishes: the
whole under three minutes, a base that can read but not do the task, and a task that is learned and not remembered.

* Without ``let_values_pass`` a model of this size had not learned to copy a value out of its
  sentence after 140,000 tokens (2.6 nats for a value, 14 % right); with it, half were right after 90,000.
* A learning rate of 5e-3 kept it from learning to copy at all; 1e-3 to 2e-3 do.
* Goods named in the singular after a plural sentence took longest to learn (81 % recalled after 130,000 tokens and
  4 layers); goods named as they stand: 98 %.
* Text that says everything again in one form only (``The city is Oslo.``), with 20 goods and cities, made
  fine-tuning remember the cities of its rows: 32 % of the held-out rows right with LoRA, 18 % in full. Two forms and
  28 goods and cities, changed together: 95 to 100 % and 89 to 96 % in trials on three seeds, 91 % and 90 % with the
  settings below (``fitune train``, seed 0). The base has 0 %: it recalls the order, but in the forms of its text.
"""

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from fitune.values.deepspeed import tell_deepspeed_where


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoFiles:
    """Paths of the demo's parts. All but ``base`` are there when ``write_demo`` returns."""

    start: Path
    """The model folder with random weights."""
    base: Path
    """The base model: what the pretraining recipe exports."""
    pretrain_text: Path
    train: Path
    test: Path
    pretrain_recipe: Path
    lora_recipe: Path
    full_recipe: Path
    divided_recipe: Path
    """The full one once more, by several processes."""


Shape = dict[str, Any]
"""Sizes of the model, as LlamaConfig names them. ``vocab_size``: the most tokens there may be; the model gets as many
as the texts give, rounded up to a multiple of 64."""
SHAPE: Shape = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 2048,
}

PRETRAINING_TEXTS = 4500
TRAINING_ROWS = 600
HELD_OUT_ROWS = 100
MAX_NEW_TOKENS = 32
"""The longest answer has 20 tokens with its end."""

Keys = dict[str, Any]
"""Keys of a recipe."""
OF_ALL: Keys = {
    "seq_len": 256, "packing": True, "micro_batch_size": 2, "gradient_accumulation_steps": 1, "precision": "fp32",
    "optimizer": "adamw", "lr_scheduler": "cosine", "warmup_ratio": 0.05,
}  # fmt: skip
PRETRAIN: Keys = {"tuning": "full", "learning_rate": 1.5e-3, "max_steps": 350}
LORA: Keys = {"tuning": "lora", "lora_r": 16, "learning_rate": 2e-3, "max_steps": 100}
FULL: Keys = {"tuning": "full", "learning_rate": 2e-4, "max_steps": 80}
TWO_PROCESSES: Keys = {"gpus": 2, "zero": 3, "backend": "fsdp", "micro_batch_size": 1}
"""They share the micro-batch, so that a step has the same rows."""


def write_demo(directory: Path, *, seed: int) -> DemoFiles:
    """Write texts, rows, recipes and the model with random weights; the same bytes for the same seed."""
    files = DemoFiles(
        start=directory / "start",
        base=directory / "base" / "model",
        pretrain_text=directory / "pretrain.jsonl",
        train=directory / "train.jsonl",
        test=directory / "test.jsonl",
        pretrain_recipe=directory / "pretrain.yaml",
        lora_recipe=directory / "lora.yaml",
        full_recipe=directory / "full.yaml",
        divided_recipe=directory / "divided.yaml",
    )
    texts = list(pretraining_texts(PRETRAINING_TEXTS, seed=seed))
    write_base_model(files.start, texts, shape=SHAPE, seed=seed)
    _write_rows(files.pretrain_text, ({"text": text} for text in texts))
    _write_rows(files.train, training_exercises(TRAINING_ROWS, seed=seed))
    _write_rows(files.test, held_out_exercises(HELD_OUT_ROWS, seed=seed))
    _write_recipes(files)
    return files


def _write_rows(path: Path, rows: Iterable[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _write_recipes(files: DemoFiles) -> None:
    base = files.base.relative_to(files.start.parent)
    task = {"model": str(base), "data": files.train.name, "eval_data": files.test.name}
    for path, keys, purpose in (
        (
            files.pretrain_recipe,
            {"model": files.start.name, "data": files.pretrain_text.name, **OF_ALL, **PRETRAIN},
            "A base model: every parameter trained on plain text, from random weights",
        ),
        (files.lora_recipe, task | OF_ALL | LORA, "The task, by low-rank adapters on the frozen base"),
        (files.full_recipe, task | OF_ALL | FULL, "The task, by training every parameter of the base"),
        (
            files.divided_recipe, task | OF_ALL | FULL | TWO_PROCESSES,
            "The same by two processes, each with a share of every tensor",
        ),
    ):  # fmt: skip
        folder = files.base.parent if path == files.pretrain_recipe else path.with_suffix("")
        path.write_text(recipe_text(keys | {"output_dir": str(folder)}, purpose, path), encoding="utf-8")


def recipe_text(keys: Keys, purpose: str, path: Path) -> str:
    """YAML of one run. ``path`` is where the recipe itself will lie."""
    again = f"# {purpose}\n# Run it again with: fitune train {quote(str(path))} --overwrite\n"
    return again + yaml.safe_dump(keys, sort_keys=False, allow_unicode=True, width=10_000)


GOODS = (
    "lamps", "chairs", "tables", "clocks", "baskets", "kettles", "mirrors", "carpets", "blankets", "pillows",
    "ladders", "bottles", "buckets", "teapots", "candles", "hammers", "violins", "guitars", "drums", "cameras",
    "tents", "bicycles", "helmets", "jackets", "wallets", "notebooks", "pencils", "kites",
)  # fmt: skip
CITIES = (
    "Oslo", "Paris", "Rome", "Madrid", "Lisbon", "Vienna", "Prague", "Berlin", "Warsaw", "Dublin",
    "London", "Athens", "Helsinki", "Zurich", "Geneva", "Milan", "Turin", "Naples", "Porto", "Seville",
    "Bergen", "Hamburg", "Munich", "Krakow", "Budapest", "Sofia", "Riga", "Tallinn",
)  # fmt: skip
COLOURS = ("red", "blue", "green", "yellow", "black", "white", "brown", "grey", "purple", "orange")
NUMBERS = ("two", "three", "four", "five", "six", "seven", "eight", "nine")
"""In words; the first is 2."""
PEOPLE = (
    "Anna", "Ben", "Clara", "David", "Elena", "Felix", "Grace", "Hugo", "Irene", "Jonas", "Karin", "Leo",
)  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

HELD_OUT = 6
"""The last goods and cities are kept for the held-out rows; pretraining text names them like all others."""

SENTENCES = (
    "{person} ordered {number} {colour} {goods} for {city} on {day}.",
    "On {day} {person} asked for {number} {colour} {goods} to be sent to {city}.",
    "{number} {colour} {goods} go to {city}, ordered by {person} on {day}.",
    "A customer in {city}, {person}, wants {number} {colour} {goods} by {day}.",
    "Please send {person} in {city} {number} {goods} in {colour} before {day}.",
    "The van for {city} carries {number} {colour} {goods} for {person} this {day}.",
    "{person} from {city} is waiting for {number} {goods}, all {colour}, due {day}.",
    "By {day} the shop must pack {number} {colour} {goods} and ship them to {city} for {person}.",
)
RECALLS = (
    ("The goods are {goods}.", "goods: {goods}"),
    ("The colour is {colour}.", "colour: {colour}"),
    ("The number is {count}.", "number: {count}"),
    ("The city is {city}.", "city: {city}"),
    ("The name is {person}.", "name: {person}"),
    ("The day is {day}.", "day: {day}"),
)
"""Facts of an order that a text repeats, in any succession: as a sentence, or as an entry in the order book."""
QUESTION = "{sentence}\nList the order."
ANSWER = "goods: {goods} | colour: {colour} | count: {count} | city: {city}"

Order = dict[str, str]
"""The words of one order by the names that stand in braces above; ``count`` is the number in figures."""
Exercise = dict[str, str]
"""One row of the task: id, prompt and completion."""


def pretraining_texts(count: int, *, seed: int) -> Iterator[str]:
    """Short texts: an order, and what was ordered once more, as sentences or as an entry of the order book."""
    rng = random.Random(f"pretraining {seed}")
    for _ in range(count):
        order = _draw(rng, GOODS, CITIES)
        first, again = _sentence(rng, order), rng.sample(RECALLS, len(RECALLS))
        if rng.random() < 0.5:
            yield " ".join([first, *(sentence.format(**order) for sentence, _ in again)])
        else:
            yield f"{first} In the book: {', '.join(entry.format(**order) for _, entry in again)}."


def training_exercises(count: int, *, seed: int) -> list[Exercise]:
    """Rows to train on; none names a held-out goods or city."""
    return _exercises("train", count, GOODS[:-HELD_OUT], CITIES[:-HELD_OUT], seed=seed)


def held_out_exercises(count: int, *, seed: int) -> list[Exercise]:
    """Rows to score on; every one names held-out goods and a held-out city."""
    return _exercises("test", count, GOODS[-HELD_OUT:], CITIES[-HELD_OUT:], seed=seed)


def _exercises(
    name: str, count: int, goods: tuple[str, ...], cities: tuple[str, ...], *, seed: int
) -> list[Exercise]:
    """``count`` rows with different prompts, from a stream of random numbers of their own."""
    rng = random.Random(f"{name} {seed}")
    rows: dict[str, Exercise] = {}
    while len(rows) < count:
        order = _draw(rng, goods, cities)
        prompt = QUESTION.format(sentence=_sentence(rng, order))
        row = {"id": f"{name}-{len(rows) + 1:04d}", "prompt": prompt, "completion": ANSWER.format(**order)}
        rows.setdefault(prompt, row)
    return list(rows.values())


def _draw(rng: random.Random, goods: tuple[str, ...], cities: tuple[str, ...]) -> Order:
    order = {
        "goods": rng.choice(goods), "colour": rng.choice(COLOURS), "number": rng.choice(NUMBERS),
        "city": rng.choice(cities), "person": rng.choice(PEOPLE), "day": rng.choice(DAYS),
    }  # fmt: skip
    return order | {"count": str(NUMBERS.index(order["number"]) + 2)}


def _sentence(rng: random.Random, order: Order) -> str:
    """The order in one of the SENTENCES, with a capital letter at its beginning."""
    text = rng.choice(SENTENCES).format(**order)
    return text[0].upper() + text[1:]


BOS, EOS, PAD = "<|begin|>", "<|end|>", "<|pad|>"
ROLE_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>")

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


def write_base_model(directory: Path, texts: Iterable[str], *, shape: Shape, seed: int) -> None:
    """Write model and tokenizer as a Hugging Face folder; the tokenizer learns its merges from ``texts``."""
    tokenizer = train_tokenizer(
        texts, vocab_size=shape["vocab_size"], context=shape["max_position_embeddings"]
    )
    model = random_model(shape, tokenizer, seed=seed)
    transformers_logging.disable_progress_bar()
    tell_deepspeed_where(has_gpu=torch.cuda.is_available())
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def train_tokenizer(texts: Iterable[str], *, vocab_size: int, context: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE: every text can be encoded, and decoding gives it back. A row begins with BOS, as in Llama."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    special = [BOS, EOS, PAD, *ROLE_TOKENS]
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
        extra_special_tokens=list(ROLE_TOKENS), model_max_length=context, clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def random_model(shape: Shape, tokenizer: PreTrainedTokenizerFast, *, seed: int) -> LlamaForCausalLM:
    """Random fp32 weights; input and output embeddings are one matrix."""
    config = LlamaConfig(
        **shape | {"vocab_size": -(-len(tokenizer) // 64) * 64},
        num_key_value_heads=shape["num_attention_heads"],
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
