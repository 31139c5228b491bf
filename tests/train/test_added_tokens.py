"""Tokens that a recipe adds: known to the tokenizer, trained, resumed, exported, merged, scored."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from fitune.data.preparing import prepare_data
from fitune.errors import ModelError, RecipeError
from fitune.models.readers import model_config
from fitune.models.tokens import add_rows, planned_tokenizer
from fitune.rehearse.step import rehearse
from fitune.score.engines.engine import Sampling
from fitune.score.plan import ScorePlan
from fitune.score.run import score
from fitune.session.exporting import export_run
from fitune.train.prepare import prepare
from fitune.values.named_templates import CHATML_MARKS
from fitune.values.plan import DataSource, Nf4
from jsonl import write_lines
from models.tiny_models import beside_tokenizer, load
from runs import trained

TOKENS = ["<think>", "</think>"]
IDS = torch.arange(3, 40)[None]


@pytest.fixture
def padded_folder(model_folder, tmp_path):
    """The same tokenizer with a table of 16 spare rows, embedding and head one tensor."""
    torch.manual_seed(0)
    config = LlamaConfig.from_pretrained(model_folder, vocab_size=400, tie_word_embeddings=True)
    return beside_tokenizer(LlamaForCausalLM(config), model_folder, tmp_path / "padded")


@pytest.fixture
def thoughts(tmp_path):
    rows = [
        {"question": f"What is {a} plus {b}?", "answer": f"<think>{a}, {b}</think>{a + b}"}
        for a in range(2, 9)
        for b in range(3, 11)
    ]
    return write_lines(tmp_path / "thoughts.jsonl", rows)


@torch.no_grad()
def answer(model, ids=IDS):
    return model.eval()(input_ids=ids).logits


def tokens_in(plan):
    return len(AutoTokenizer.from_pretrained(plan.model_path))


def test_new_rows_begin_near_the_mean_and_old_ones_stay(make_plan):
    plan = make_plan(added_tokens=TOKENS)
    assert plan.model.vocab_size == max(384, tokens_in(plan) + 2)
    base, grown = (load(plan.model_path) for _ in range(2))
    add_rows(grown, plan)
    ids = planned_tokenizer(plan).convert_tokens_to_ids(TOKENS)
    for table in ("get_input_embeddings", "get_output_embeddings"):
        old, new = getattr(base, table)().weight, getattr(grown, table)().weight
        learned = min(ids)
        assert torch.equal(new[:learned], old[:learned])
        mean, spread = old[:learned].mean(dim=0), old[:learned].std(dim=0)
        assert ((new[ids] - mean).abs() < 0.06 * spread).all()
        assert not torch.equal(new[ids[0]], new[ids[1]])
    again = load(plan.model_path)
    add_rows(again, plan)
    assert torch.equal(again.get_input_embeddings().weight, grown.get_input_embeddings().weight)


def test_spare_rows_are_taken_first(make_plan, padded_folder):
    plan = make_plan(model=str(padded_folder), added_tokens=TOKENS)
    assert plan.model.vocab_size == 400
    many = make_plan(
        model=str(padded_folder), added_tokens=[f"<{n}>" for n in range(400 - tokens_in(plan) + 5)]
    )
    assert many.model.vocab_size == 405
    whole = prepare(many).model.whole.get_base_model()
    assert whole.get_input_embeddings().weight is whole.get_output_embeddings().weight
    assert whole.get_input_embeddings().weight.shape[0] == whole.config.vocab_size == 405


@pytest.mark.parametrize(("padded", "packed"), [(False, True), (True, False)])
def test_from_training_to_a_merged_model_that_transformers_loads_alone(
    make_plan, padded_folder, thoughts, tmp_path, padded, packed
):
    base = {"model": str(padded_folder)} if padded else {}
    plan = make_plan(**base, data=[str(thoughts)], added_tokens=TOKENS, max_steps=8)
    if packed:
        pytest.importorskip("bitsandbytes")
        plan = replace(plan, tuning=replace(plan.tuning, base=Nf4()))
    report = trained(plan)
    assert report.final_loss < report.first_loss
    adapter = Path(report.exported)
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    ids = tokenizer.convert_tokens_to_ids(TOKENS)
    assert tokenizer("a<think>b</think>").input_ids.count(ids[0]) == 1
    dense = AutoModelForCausalLM.from_pretrained(plan.model_path)
    dense.resize_token_embeddings(plan.model.vocab_size, mean_resizing=False)
    assert f"resize_token_embeddings({plan.model.vocab_size})" in (adapter / "README.md").read_text()
    expected = answer(PeftModel.from_pretrained(dense, adapter), torch.tensor([[5, *ids, 7]]))
    export_run(Path(plan.run.output_dir), None, None)
    merged = AutoModelForCausalLM.from_pretrained(Path(plan.run.output_dir) / "merged")
    assert merged.config.vocab_size == plan.model.vocab_size
    torch.testing.assert_close(answer(merged, torch.tensor([[5, *ids, 7]])), expected, rtol=0, atol=1e-4)
    assert (merged.get_output_embeddings().weight is merged.get_input_embeddings().weight) is padded
    assert len(AutoTokenizer.from_pretrained(Path(plan.run.output_dir) / "merged")) == len(tokenizer)


def test_in_the_data_they_are_one_token_each(make_plan, thoughts):
    plan = make_plan(data=[str(thoughts)], added_tokens=TOKENS)
    tokenizer = planned_tokenizer(plan)
    data = prepare_data(plan.data, tokenizer=tokenizer, tokenizer_path=plan.model_path, seq_len=64, seed=1)
    row = data.train.row(0)[0].tolist()
    assert [row.count(number) for number in tokenizer.convert_tokens_to_ids(TOKENS)] == [1, 1]


def test_full_fine_tuning_takes_new_tokens_too(make_plan, thoughts):
    plan = make_plan(tuning="full", data=[str(thoughts)], added_tokens=TOKENS, max_steps=1)
    report = trained(plan)
    model = AutoModelForCausalLM.from_pretrained(report.exported)
    assert model.get_input_embeddings().weight.shape[0] == plan.model.vocab_size
    assert AutoTokenizer.from_pretrained(report.exported).convert_tokens_to_ids("<think>") == tokens_in(plan)


def test_an_adapter_with_new_tokens_is_scored(make_plan, thoughts, tmp_path):
    plan = make_plan(data=[str(thoughts)], added_tokens=TOKENS, max_steps=1)
    adapter = trained(plan).exported
    report = score(
        ScorePlan(
            model=plan.model_path, adapter=str(adapter), sources=(DataSource(path=str(thoughts), sample=3),),
            output_dir=str(tmp_path / "scores"), sampling=Sampling(max_new_tokens=4),
        ),
        say=lambda line: None,
    )  # fmt: skip
    assert report.answered == 3


def test_the_rehearsal_has_the_new_rows(make_plan):
    many = [f"<{n}>" for n in range(300)]
    plain, grown = (
        make_plan(**extra, lora_modules_to_save=["embed_tokens", "lm_head"])
        for extra in ({}, {"added_tokens": many})
    )
    weights = [rehearse(plan, exact=True).phases for plan in (plain, grown)]
    first, second = (next(iter(phases.values()))["weights"] for phases in weights)
    added = grown.model.vocab_size - plain.model.vocab_size
    assert added > 200
    assert second - first == 2 * added * 32 * 4
    assert model_config(plain.model_path).vocab_size == 384


def test_the_marks_of_chatml_are_added_as_special_tokens(make_plan):
    with pytest.raises(RecipeError, match="the tokenizer has no token") as refused:
        make_plan(chat_template="chatml", added_tokens=CHATML_MARKS[:1])
    assert "added_tokens: ['<|im_end|>']" in refused.value.hint
    tokenizer = planned_tokenizer(make_plan(chat_template="chatml", added_tokens=[*CHATML_MARKS, "<think>"]))
    added = {token.content: token.special for token in tokenizer.added_tokens_decoder.values()}
    assert [added[token] for token in (*CHATML_MARKS, "<think>")] == [True, True, False]


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (["<think>", "<think>"], "names '<think>' twice"),
        ([" "], "' ' is empty"),
        (["</s>"], "'</s>' is token 2 of the tokenizer already"),
    ],
)
def test_tokens_that_cannot_be_added_are_refused(make_plan, tokens, words):
    with pytest.raises(RecipeError, match=words):
        make_plan(added_tokens=tokens)


def test_a_token_that_only_the_tokenizer_itself_knows_of_is_refused_before_anything_is_read(
    make_plan,
):
    plan = replace(make_plan(added_tokens=TOKENS), added_tokens=("</s>",))
    with pytest.raises(ModelError, match="'</s>' is token 2 of the tokenizer already"):
        trained(plan)
