"""vLLM itself beside transformers: tokens, log-probabilities, ends, seeds, adapters.

``FITUNE_VLLM_PYTHON`` names the python of an environment that has vLLM; `make vllm` makes one for a CPU.
"""

import os
from collections import Counter
from contextlib import closing

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from fitune.data.conversations.templates import load_template
from fitune.demo.files import training_exercises, write_base_model
from fitune.errors import CheckpointError
from fitune.models.adapters import load_adapter
from fitune.models.tokens import load_tokenizer
from fitune.recipe.score_recipe import score_recipe
from fitune.score.engines.engine import Continuation, Request, Sampling, listed_stop_ids
from fitune.score.engines.engine_transformers import TransformersEngine
from fitune.score.engines.engine_vllm import VllmEngine
from fitune.session.events import ignore_event
from fitune.session.score.scoring import score_dataset
from jsonl import read_lines, write_lines
from models.tiny_models import load
from score.conftest import Tiny

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(
        not os.environ.get("FITUNE_VLLM_PYTHON"), reason="FITUNE_VLLM_PYTHON names no python that has vLLM"
    ),
]

SHAPE = dict(
    vocab_size=384,
    hidden_size=128,  # heads of 32: vLLM's attention on a CPU has none of 8
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=192,
)
CPU = torch.device("cpu")
WARM = Sampling(max_new_tokens=12, temperature=0.8, top_p=0.9, seed=3)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A random model of which one of its frequent tokens ends an answer."""
    folder = tmp_path_factory.mktemp("vllm") / "model"
    write_base_model(folder, [row["prompt"] for row in training_exercises(200, seed=0)], shape=SHAPE, seed=0)
    tokenizer = load_tokenizer(str(folder))
    model = load(folder)
    found = Tiny(folder, model, tokenizer, load_template(tokenizer))
    written = Counter(c.token_ids[6] for c in ours(found).answer(asked(found, Sampling(max_new_tokens=12))))
    (often, _), *_ = written.most_common(1)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, often]
    model.generation_config.save_pretrained(folder)
    return found


@pytest.fixture(scope="module")
def plain(small):
    engine = theirs(small)
    yield engine
    engine.close()


def asked(small, sampling):
    rows = training_exercises(200, seed=1)
    prompts = [small.tokenizer(row["prompt"])["input_ids"] for row in rows]
    return [
        Request(id=str(place), prompt_ids=tuple(prompt), sampling=sampling)
        for place, prompt in enumerate(prompts)
    ]


def ours(small, model=None):
    return TransformersEngine(model=model or small.model, tokenizer=small.tokenizer, template=small.template)


def theirs(small, **more):
    return VllmEngine(
        model=str(small.folder), tokenizer=str(small.folder),
        stop_ids=small.template.stop_ids | listed_stop_ids(str(small.folder)),
        settings={"dtype": "float32", "enforce_eager": True}, **more,
    )  # fmt: skip


def save_adapter(small, folder, *, b=0.3, **settings):
    """A LoRA adapter of PEFT's whose A and B are random."""
    torch.manual_seed(1)
    model = load(small.folder)
    config = {"r": 5, "lora_alpha": 10, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    adapted = get_peft_model(model, LoraConfig(**config | settings))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn_like(parameter) * b)
    adapted.save_pretrained(folder)
    return str(folder)


def require_equal(one, other, requests):
    expected = {completion.id: completion for completion in one.answer(requests)}
    found = {completion.id: completion for completion in other.answer(requests)}
    assert found.keys() == expected.keys()
    same = [key for key, completion in expected.items() if found[key].token_ids == completion.token_ids]
    assert len(same) >= 0.95 * len(requests)
    for key in same:
        assert found[key].finish_reason == expected[key].finish_reason
        assert found[key].logprobs == pytest.approx(expected[key].logprobs, abs=1e-4)
    assert {found[key].finish_reason for key in same} == {"stop", "length"}


def test_greedy_answers_are_those_of_transformers(small, plain):
    require_equal(ours(small), plain, asked(small, Sampling(max_new_tokens=12)))


def test_a_row_is_told_when_it_ends_not_when_all_have_ended(plain):
    long, short = (
        Request(id=str(new), prompt_ids=(5, 6, 7), sampling=Sampling(max_new_tokens=new)) for new in (40, 1)
    )
    assert [completion.id for completion in plain.answer([long, short])] == ["1", "40"]


def test_a_prompt_beyond_the_context_is_an_error_of_its_row(plain):
    long, fits = (
        Request(id=str(n), prompt_ids=(5,) * n, sampling=Sampling(max_new_tokens=12)) for n in (181, 180)
    )
    found = {completion.id: completion for completion in plain.answer([long, fits])}
    assert found["181"].error == "prompt 181 + max_new_tokens 12 = 193 tokens, the model has room for 192"
    assert not found["180"].error
    assert found["180"].tokens


def test_drawn_answers_depend_on_prompt_and_seed_alone(small, plain):
    requests = asked(small, WARM)[:40]
    once = {c.id: c.token_ids for c in plain.answer(requests)}
    assert {c.id: c.token_ids for c in plain.answer(requests[::-1])} == once
    (alone,) = plain.answer(requests[7:8])
    assert alone.token_ids == once["7"]
    other = asked(small, Sampling(max_new_tokens=12, temperature=0.8, top_p=0.9, seed=4))[:40]
    assert {c.id: c.token_ids for c in plain.answer(other)} != once


def test_likelihoods_are_those_of_transformers(small, plain):
    requests = asked(small, Sampling(max_new_tokens=12))[:20]
    greedy = [(c.id, c.token_ids) for c in plain.answer(requests)]
    prompts = {request.id: request.prompt_ids for request in requests}
    continuations = [Continuation(id=f"g{id}", prompt_ids=prompts[id], token_ids=ids) for id, ids in greedy]
    continuations += [
        Continuation(id=f"o{id}", prompt_ids=prompts[id], token_ids=(9, *ids)) for id, ids in greedy
    ]
    expected = {found.id: found for found in ours(small).loglikelihoods(continuations)}
    for found in plain.loglikelihoods(continuations):
        assert found.logprobs == pytest.approx(expected[found.id].logprobs, abs=1e-4)
        assert found.is_greedy == expected[found.id].is_greedy == found.id.startswith("g")
    (long,) = plain.loglikelihoods([Continuation(id="long", prompt_ids=(5,) * 180, token_ids=(5,) * 12)])
    assert long.error == "prompt 180 + continuation 12 + 1 written = 193 tokens, the model has room for 192"


def test_answers_with_an_adapter_are_those_of_transformers(small, tmp_path):
    adapter = save_adapter(small, tmp_path, use_rslora=True)
    adapted = load_adapter(load(small.folder), adapter)
    requests = asked(small, Sampling(max_new_tokens=12))
    base = {completion.id: completion.token_ids for completion in ours(small).answer(requests)}
    expected = {completion.id: completion.token_ids for completion in ours(small, adapted).answer(requests)}
    assert sum(expected[key] != ids for key, ids in base.items()) > 100
    with closing(theirs(small, adapter=adapter, rank=5)) as engine:
        require_equal(ours(small, adapted), engine, requests)


def test_an_adapter_that_vllm_does_not_apply_is_refused(small, tmp_path):
    """vLLM looks at the last part of a module's name; a block that the model does not have is left out in silence."""
    adapter = save_adapter(small, tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    save_file({name.replace(".layers.", ".layers.7"): t for name, t in load_file(file).items()}, file)
    said = "the adapter changes nothing, although its B matrices"
    with (
        closing(theirs(small, adapter=adapter, rank=5)) as engine,
        pytest.raises(CheckpointError, match=said),
    ):
        next(engine.answer(asked(small, Sampling(max_new_tokens=12))))


def test_an_adapter_whose_b_is_zero_answers_as_the_base(small, tmp_path):
    with closing(theirs(small, adapter=save_adapter(small, tmp_path, b=0.0), rank=5)) as engine:
        require_equal(ours(small), engine, asked(small, Sampling(max_new_tokens=12)))


def test_what_vllm_says_of_an_adapter_it_refuses_is_shown(small, tmp_path):
    with pytest.raises(CheckpointError, match=r"vLLM refuses the adapter: .*DoRA"):
        theirs(small, adapter=save_adapter(small, tmp_path, use_dora=True), rank=5)


def test_an_adapter_that_has_to_be_merged_is_scored_as_by_transformers(small, tmp_path, monkeypatch):
    monkeypatch.setenv("FITUNE_CACHE", str(tmp_path / "cache"))
    adapter = save_adapter(small, tmp_path / "adapter", use_dora=True)
    rows = [
        {"prompt": row["prompt"], "completion": row["completion"]} for row in training_exercises(60, seed=1)
    ]
    data = write_lines(tmp_path / "rows.jsonl", rows)
    found = {}
    for engine in ("transformers", "vllm"):
        score_dataset(
            score_recipe(
                model=str(small.folder),
                adapter=adapter,
                data=str(data),
                out=tmp_path / engine,
                engine=engine,
                max_new_tokens=12,
            ),
            emit=ignore_event,
        )
        lines = read_lines(tmp_path / engine / "answers.jsonl")
        found[engine] = [line["response"]["body"]["choices"] for line in lines]
    same = sum(
        one[0]["message"] == other[0]["message"]
        for one, other in zip(found["transformers"], found["vllm"], strict=True)
    )
    assert same >= 0.95 * len(rows)
