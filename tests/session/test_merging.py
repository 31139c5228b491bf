"""Adapters that vLLM cannot take: merged, they answer as they do on their base."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from fitune.data.conversations.templates import load_template
from fitune.files import cache_folder
from fitune.models.adapters import load_adapter
from fitune.models.tokens import load_tokenizer
from fitune.score.engines.engine import Request, Sampling
from fitune.score.engines.engine_transformers import TransformersEngine
from fitune.session.events import ignore_event
from fitune.session.score import scoring
from fitune.session.score.scoring import merged_where_needed
from models.tiny_models import load

CPU = torch.device("cpu")


def save_adapter(model_folder, folder, **settings):
    """A and B random, tables that train moved a little."""
    torch.manual_seed(1)
    model = load(model_folder)
    words = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    adapted = get_peft_model(model, LoraConfig(**words | settings))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name or (parameter.requires_grad and "modules_to_save" in name):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    adapted.save_pretrained(folder)
    return str(folder)


def answers(model, model_folder):
    tokenizer = load_tokenizer(str(model_folder))
    engine = TransformersEngine(model=model, tokenizer=tokenizer, template=load_template(tokenizer))
    asked = [
        Request(id=str(n), prompt_ids=tuple(range(5, 15 + n)), sampling=Sampling(max_new_tokens=8))
        for n in range(9)
    ]
    return {completion.id: completion.token_ids for completion in engine.answer(asked)}


@pytest.mark.parametrize(
    "settings",
    [{"use_dora": True}, {"modules_to_save": ["embed_tokens", "lm_head"]}, {"rank_pattern": {"q_proj": 2}}],
    ids=["DoRA", "tables", "ranks"],
)
def test_a_merged_model_answers_as_the_adapter_does(settings, model_folder, tmp_path):
    adapter = save_adapter(model_folder, tmp_path / "adapter", **settings)
    merged = merged_where_needed(str(model_folder), adapter, emit=ignore_event)
    base = load(model_folder)
    plain = answers(base, model_folder)
    expected = answers(load_adapter(base, adapter), model_folder)
    found = answers(load(merged), model_folder)
    assert found == expected != plain


def test_it_is_merged_once_for_each_content(model_folder, tmp_path, monkeypatch):
    adapter = save_adapter(model_folder, tmp_path / "adapter", use_dora=True)
    said = []
    merged = merged_where_needed(str(model_folder), adapter, emit=said.append)
    assert any("cannot take" in str(line) and "(DoRA)" in str(line) for line in said)
    with monkeypatch.context() as patched:
        patched.setattr(scoring, "_merge", None)
        assert merged_where_needed(str(model_folder), adapter, emit=ignore_event) == merged
    other = save_adapter(model_folder, tmp_path / "adapter", use_dora=True, lora_alpha=16)
    assert merged_where_needed(str(model_folder), other, emit=ignore_event) != merged


def test_what_vllm_takes_is_not_merged(model_folder, tmp_path):
    adapter = save_adapter(model_folder, tmp_path / "adapter", use_rslora=True)
    assert merged_where_needed(str(model_folder), adapter, emit=ignore_event) == ""
    assert not (cache_folder() / "merged").exists()
