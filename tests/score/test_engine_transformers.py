"""Answers depend on their prompt alone: not on the batch, not on the order, not on the model's own settings."""

from dataclasses import replace

import pytest
import torch
from transformers import GenerationConfig

from fitune.data.conversations.messages import Conversation, Message
from fitune.demo.files import training_exercises
from fitune.models.attention import use_attention
from fitune.score.engines import engine_transformers
from fitune.score.engines.continuous import can_join
from fitune.score.engines.engine import Continuation, Request, Sampling
from fitune.score.engines.engine_transformers import TransformersEngine, answer_all
from fitune.score.tasks import to_task
from models.streams import make_rows
from models.tiny_models import tiny_model

GREEDY = Sampling(max_new_tokens=12)
WARM = Sampling(max_new_tokens=12, temperature=0.8, top_p=0.9, seed=3)


@pytest.fixture(scope="module")
def tasks(tiny):
    """17 prompts of very different length."""
    rows = training_exercises(17, seed=1)
    texts = [row["prompt"][: 3 + 5 * place] for place, row in enumerate(rows)]
    asked = [(Message("user", text), Message("assistant", "x")) for text in texts]
    return [
        to_task(Conversation(messages, "here"), id=f"row-{place * 7 % 17}", template=tiny.template)
        for place, messages in enumerate(asked)
    ]


def ask(tiny, tasks, sampling, **more):
    return answer_all(tiny.model, tiny.tokenizer, tiny.template, tasks, sampling, **more)


def engine_of(tiny, batch_size, model=None):
    return TransformersEngine(
        model=model or tiny.model, tokenizer=tiny.tokenizer, template=tiny.template, batch_size=batch_size
    )


@torch.no_grad()
def require_greedy(model, prompt, written, most, stop):
    """Each token is the likeliest behind those before it, by one pass over the whole text, without a cache and without
    padding; the row ends at the first that stops it, or at its limit."""
    logits = model(input_ids=torch.tensor([[*prompt, *written]])).logits[0, len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == list(written)
    assert not stop & set(written[:-1])
    assert written[-1] in stop or len(written) == most


def test_answers_are_the_most_likely_tokens(tiny, tasks):
    answers = ask(tiny, tasks, GREEDY, batch_size=5)
    for task, answer in zip(tasks, answers, strict=True):
        require_greedy(tiny.model, task.prompt_ids, answer.token_ids, 12, tiny.template.stop_ids)
        assert answer.completion_tokens == len(answer.token_ids)
        assert answer.text == tiny.tokenizer.decode(answer.token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_the_batch_changes_no_answer(tiny, tasks, sampling):
    alone = ask(tiny, tasks, sampling, batch_size=1)
    together = ask(tiny, tasks, sampling, batch_size=7)
    assert alone == together
    assert [a.logprob for a in alone] == pytest.approx([a.logprob for a in together], abs=1e-4)
    assert alone[::-1] == ask(tiny, tasks[::-1], sampling, batch_size=4)
    assert len({answer.text for answer in alone}) > 3, (
        "a model that says the same to everything proves nothing"
    )


def test_sampled_answers_follow_the_seed(tiny, tasks):
    texts = [answer.text for answer in ask(tiny, tasks, WARM)]
    assert texts == [answer.text for answer in ask(tiny, tasks, WARM)]
    assert texts != [answer.text for answer in ask(tiny, tasks, replace(WARM, seed=4))]
    assert texts != [answer.text for answer in ask(tiny, tasks, GREEDY)]


def renamed(task, id_):
    return replace(task, question=replace(task.question, id=id_))


COLD = 0.15
"""At 0.5 the likeliest of 384 tokens has 2 %, and a temperature that is ignored would not show."""


def test_sampling_draws_from_the_softmax(tiny, tasks):
    """First tokens of 800 rows with one prompt: the likeliest as often as its probability says, within 5 sigma."""
    draws = 800
    one = [renamed(tasks[0], str(number)) for number in range(draws)]
    answers = ask(tiny, one, Sampling(max_new_tokens=1, temperature=COLD), batch_size=draws)
    with torch.no_grad():
        logits = tiny.model(input_ids=torch.tensor([tasks[0].prompt_ids])).logits[0, -1]
    chances = (logits / COLD).softmax(-1).tolist()
    texts = tiny.tokenizer.batch_decode([[token] for token in range(len(chances))], skip_special_tokens=True)
    text = texts[chances.index(max(chances))]
    chance = sum(c for c, other in zip(chances, texts, strict=True) if other == text)
    seen = sum(answer.text == text for answer in answers)
    assert 0.1 < chance < 0.9  # it is flat at temperature 1
    assert abs(seen - chance * draws) < 5 * (draws * chance * (1 - chance)) ** 0.5


def test_an_answer_ends_at_every_end_of_turn_id(tiny, tasks, monkeypatch):
    (whole,) = ask(tiny, [tasks[16]], GREEDY)
    turn_end = whole.token_ids[3]
    listed = GenerationConfig(eos_token_id=[tiny.tokenizer.eos_token_id, turn_end])
    monkeypatch.setattr(tiny.model, "generation_config", listed)
    (answer,) = ask(tiny, [tasks[16]], GREEDY)
    length = whole.token_ids.index(turn_end) + 1
    assert (answer.finish_reason, answer.completion_tokens) == ("stop", length)
    assert answer.text == tiny.tokenizer.decode(whole.token_ids[: length - 1], skip_special_tokens=True)


def test_a_model_in_training_answers_by_our_settings_and_goes_on_training_with_its_own(
    tiny, tasks, monkeypatch
):
    """Mode, attention and what its makers would have ``generate`` do are set aside and put back."""
    plain = ask(tiny, tasks, GREEDY)
    before = tiny.model.config._attn_implementation
    settings = GenerationConfig(
        do_sample=True, temperature=2.0, repetition_penalty=5.0, max_new_tokens=1,
        eos_token_id=tiny.model.generation_config.eos_token_id,
    )  # fmt: skip
    monkeypatch.setattr(tiny.model, "generation_config", settings)
    try:
        use_attention(tiny.model, "sdpa")
        own = tiny.model.config._attn_implementation
        tiny.model.train()
        assert own != before
        assert ask(tiny, tasks, GREEDY) == plain
        assert tiny.model.training
        assert tiny.model.config._attn_implementation == own
        assert tiny.model.generation_config is settings
    finally:
        tiny.model.eval()
        tiny.model.set_attn_implementation(before)


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt2", "qwen3_moe", "phi3", "falcon"])
def test_rows_that_enter_and_leave_write_what_they_write_alone(tiny, family):
    """Sliding windows, learned positions, experts, fused and shared heads: 14 rows through 4 places, each with a limit
    of its own, one of them beyond two growths of the cache."""
    model = tiny_model(family).eval()
    limits = [70 if place == 3 else 1 + place * 5 % 11 for place in range(14)]
    requests = [
        Request(id=str(place), prompt_ids=tuple(row.tolist()), sampling=Sampling(max_new_tokens=most))
        for place, (row, most) in enumerate(
            zip(make_rows([3 + 5 * place % 37 for place in range(14)]), limits, strict=True)
        )
    ]
    assert can_join(model)
    found = {one.id: one.token_ids for one in engine_of(tiny, 4, model).answer(requests)}
    assert len(found) == len(requests)
    for one in requests:
        stop = tiny.template.stop_ids | {2}
        require_greedy(model, one.prompt_ids, found[one.id], one.sampling.max_new_tokens, stop)


BOUNDARY = 24
# three short, three that cross while they answer, one whose last new token would be the first beyond, three long
AROUND = (4, 9, 15, 17, 19, 24, 16, 25, 31, 60)


@pytest.mark.parametrize("family", ["phi3", "llama"])
def test_with_longrope_answers_are_equal_alone_and_beside_prompts_beyond_its_boundary(tiny, family):
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": BOUNDARY,
        "short_factor": [1.0, 1.1, 1.3, 2.0], "long_factor": [1.5, 4.0, 9.0, 30.0],
    }  # fmt: skip
    model = tiny_model(family, rope_parameters=rope, original_max_position_embeddings=BOUNDARY).eval()
    requests = [
        Request(id=str(len(row)), prompt_ids=tuple(row.tolist()), sampling=Sampling(max_new_tokens=8))
        for row in make_rows(AROUND)
    ]

    def answers(asked, batch_size):
        return {one.id: one.token_ids for one in engine_of(tiny, batch_size, model).answer(asked)}

    alone = {}
    for request in requests:
        alone |= answers([request], 1)
    assert len(alone) == len(requests)
    assert answers(requests, 16) == answers(requests[::-1], 3) == alone


def test_prompts_that_enter_together_need_little_padding(tiny):
    """In order of length, so the padding of all groups together is less than one batch of the longest prompt."""
    lengths = [3 + 37 * place % 150 for place in range(60)]
    requests = [
        Request(id=str(place), prompt_ids=(5,) * length, sampling=Sampling(max_new_tokens=1 + place % 4))
        for place, length in enumerate(lengths)
    ]
    read = []
    with tiny.model.get_input_embeddings().register_forward_hook(
        lambda _, ids, __: read.append(ids[0].numel() if ids[0].shape[1] > 1 else 0)
    ):
        assert len(list(engine_of(tiny, 8).answer(requests))) == 60
    assert sum(lengths) < sum(read) < sum(lengths) + 8 * max(lengths)


def test_a_row_ends_at_its_stop_text(tiny):
    """The tokens are those of the row that goes on, up to the first that completes the text."""
    engine = engine_of(tiny, 2)
    prompt = tuple(tiny.tokenizer.encode("what is 2 plus 3?"))
    free = Request(id="0", prompt_ids=prompt, sampling=Sampling(max_new_tokens=24))
    (whole,) = engine.answer([free])
    wanted = tiny.tokenizer.decode(list(whole.token_ids[9:11]))
    asked = [replace(free, id="1", stop=("not there", wanted)), replace(free, id="2", stop=("not there",))]
    found = {each.id: each for each in engine.answer(asked)}
    assert found["2"].token_ids == whole.token_ids
    end = len(found["1"].token_ids)
    assert found["1"].token_ids == whole.token_ids[:end]
    assert (end <= 11, found["1"].finish_reason) == (True, "stop")
    assert wanted in tiny.tokenizer.decode(list(whole.token_ids[:end]))
    assert wanted not in tiny.tokenizer.decode(list(whole.token_ids[: end - 1]))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_likelihoods_are_those_of_the_whole_softmax(tiny, family):
    """Gemma-2 caps its logits; rows of different length share a batch; logits are made for one chunk at a time."""
    model = tiny_model(family).eval()
    engine = engine_of(tiny, 3, model)
    rows = [row.tolist() for row in make_rows([5, 21, 9, 60])]
    asked = [
        Continuation(id=str(place), prompt_ids=tuple(row[:3]), token_ids=tuple(row[3:]))
        for place, row in enumerate(rows)
    ]
    too_long = Continuation(id="long", prompt_ids=(5,) * 250, token_ids=(6,) * 8)
    found = {likelihood.id: likelihood for likelihood in engine.loglikelihoods([*asked, too_long])}
    assert found["long"].error == (
        "prompt 250 + continuation 8 - 1 = 257 tokens to be read, the model has room for 256"
    )
    for place, row in enumerate(rows):
        with torch.no_grad():
            logprobs = model(input_ids=torch.tensor([row])).logits[0].log_softmax(-1)
        expected = [float(logprobs[at - 1, row[at]]) for at in range(3, len(row))]
        assert found[str(place)].logprobs == pytest.approx(expected, abs=1e-4)
        best = [int(logprobs[at - 1].argmax()) for at in range(3, len(row))]
        assert found[str(place)].is_greedy == (best == row[3:])


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_texts_behind_one_prompt_share_it_and_weigh_what_they_weigh_alone(tiny, family, monkeypatch):
    """Four prompts of other lengths with 2 to 4 texts of 1 to 20 tokens; alone, the same texts share nothing."""
    model = tiny_model(family).eval()
    engine = engine_of(tiny, 5, model)
    prompts = [row.tolist() for row in make_rows([5, 40, 11, 80])]
    texts = [row.tolist() for row in make_rows([1, 9, 20, 3])]
    asked = [
        Continuation(id=f"{p} {t}", prompt_ids=tuple(prompt), token_ids=tuple(texts[t]))
        for p, prompt in enumerate(prompts)
        for t in range(2 + p % 3)
    ]
    read = []
    with model.get_input_embeddings().register_forward_hook(lambda _, ids, __: read.append(ids[0].numel())):
        together = {found.id: found for found in engine.loglikelihoods(asked)}
    assert len(together) == len(asked)
    assert sum(read) < sum(len(one.ids) for one in asked)
    monkeypatch.setattr(engine_transformers, "can_join", lambda model: False)
    for one in asked:
        (alone,) = engine.loglikelihoods([one])
        assert together[one.id].logprobs == pytest.approx(alone.logprobs, abs=1e-4)
        assert together[one.id].is_greedy == alone.is_greedy
