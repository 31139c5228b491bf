"""What LoRA adapts, as people write it: names, patterns, blocks, and what is refused."""

import pytest

from fitune.errors import RecipeError
from fitune.recipe.targets import resolve_adapted
from plans import known, recipe_of, small_llama

LLAMA = small_llama(num_hidden_layers=12)


@pytest.mark.parametrize(
    ("wanted", "targets", "layers"),
    [
        (["all-linear"], LLAMA.adaptable_names, ()),
        (["self_attn.q_proj"], ("q_proj",), ()),
        (["(q|v)_proj"], ("q_proj", "v_proj"), ()),
        ([r".*self_attn\.[qkvo]_proj"], ("q_proj", "k_proj", "v_proj", "o_proj"), ()),
        ([r"mlp\..*", "o_proj"], ("o_proj", "gate_proj", "up_proj", "down_proj"), ()),
        ([r"model\.layers\.(1[01]|9)\.mlp\.(up|down)_proj"], ("up_proj", "down_proj"), (9, 10, 11)),
        (["model.layers.7.mlp.up_proj", "model.layers.8.mlp.up_proj"], ("up_proj",), (7, 8)),
        ([r"model.language_model.layers.[\d]+.self_attn.q_proj"], ("q_proj",), ()),
    ],
)
def test_names_and_patterns_find_their_linears(wanted, targets, layers):
    assert resolve_adapted(LLAMA, targets=wanted) == (targets, layers)


def test_a_last_part_that_names_two_linears_is_told_apart_by_the_whole_name():
    gpt2 = known("gpt2")
    assert resolve_adapted(gpt2, targets=["c_proj"])[0] == ("c_proj",)
    chosen, _ = resolve_adapted(gpt2, targets=["attn.c_proj"])
    assert chosen == ("attn.c_proj",)
    assert [m.name for m in gpt2.linears if m.is_target(chosen)] == ["attn.c_proj"]


@pytest.mark.parametrize(
    ("wanted", "layers"),
    [([], ()), ([3], (3,)), ([2, 0, 1], (0, 1, 2)), (list(range(12)), ())],
)
def test_blocks_are_sorted_and_all_of_them_are_none_in_particular(wanted, layers):
    assert resolve_adapted(LLAMA, targets=["q_proj"], layers=wanted)[1] == layers


def test_blocks_of_a_pattern_and_of_lora_layers_must_both_hold():
    pattern = [r"model\.layers\.[0-5]\..*"]
    assert resolve_adapted(LLAMA, targets=pattern, layers=[4, 5, 6])[1] == (4, 5)
    for layers, words in (
        ([8, 9], "no block in common: blocks 8–9 and blocks 0–5"),
        ([12], "there is no block 12; tiny/llama has 12, numbered 0 to 11"),
        ([1, 2, 1], "names block 1 twice"),
    ):
        with pytest.raises(RecipeError, match=words):
            resolve_adapted(LLAMA, targets=pattern, layers=layers)


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ([], "lora_target_modules is empty"),
        (["q_prj"], "(?s)'q_prj' is no linear of this model; .*did you mean 'q_proj'"),
        ([" "], "a name is empty"),
        (["q_proj", "embed_tokens"], r"(?s)only those get adapters.*lora_modules_to_save: \[embed_tokens\]"),
        ([r".*\.embed_tokens"], r"(?s)matches no linear.*lora_modules_to_save: \[embed_tokens\]"),
        (["lm_head"], r"(?s)'lm_head' is no linear of a block.*lora_modules_to_save: \[lm_head\]"),
        (["(q|v_proj"], "is no regular expression: "),
        (
            [".*qkv"],
            r"the pattern '\.\*qkv' matches no linear of tiny/llama, whose blocks have self_attn\.q_proj, ",
        ),
        (
            [r".*layers\.1\..*q_proj", r".*layers\.[12]\..*up_proj"],
            r"adapts self_attn\.q_proj in block 1 and mlp\.up_proj in blocks 1–2",
        ),
    ],
)
def test_what_matches_nothing_is_refused_with_what_there_is(wanted, words):
    with pytest.raises(RecipeError, match=words):
        resolve_adapted(LLAMA, targets=wanted)


@pytest.mark.parametrize(
    ("written", "numbers"),
    [
        ("24-31", list(range(24, 32))),
        ("0-2, 7", [0, 1, 2, 7]),
        ([1, "3-4"], [1, 3, 4]),
        (5, [5]),
        ("all", []),
    ],
)
def test_ranges_of_blocks_are_read(written, numbers):
    assert recipe_of("m", lora_layers=written).lora_layers == numbers


@pytest.mark.parametrize("written", ["-1", "3-1", "1..3", True, "0-99999999", ""])
def test_what_is_no_range_is_refused(written):
    with pytest.raises(RecipeError, match="lora_layers"):
        recipe_of("m", lora_layers=written)


def test_a_pattern_with_a_comma_is_one_pattern():
    pattern = r"layers\.\d{1,2}\.q_proj"
    assert recipe_of("m", lora_target_modules=pattern).lora_target_modules == [pattern]
