"""Law: a block that runs twice has the same dropout mask both times, whatever its architecture calls the rate.

With another mask the loss is the same and the gradients are wrong, so nothing but a comparison shows it.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from fitune.train.prepare import prepare_loaded
from fitune.values.model.config_schema import is_random_rate
from fitune.values.model.model_config import load_model_spec
from fitune.values.plan import Recompute
from models.streams import forward_backward
from train.test_traced_walks import bench

FOUND = json.loads((Path(__file__).parents[2] / "results/architectures.json").read_text())
TRAINED = [
    name
    for name, row in FOUND.items()
    if isinstance(row.get("full"), dict) and row["full"].get("ok") and name in CONFIG_MAPPING
    if name != "diffllama"
]
"""Those that the installed transformers has; DiffLlama's class refuses dropout."""
QUICK = ("biogpt", "gpt2", "gpt_neo", "gpt_neox", "mixtral", "opt", "starcoder2")
"""Every name of a rate that any of them has, at least once."""


def rates(config):
    """Names of the class's rates of random numbers, but for whole layers left out."""
    values = config.to_dict().items()
    return [n for n, v in values if is_random_rate(n) and isinstance(v, float | int) and "layerdrop" not in n]


def gradients(folder, made, *, recomputed):
    spec = load_model_spec(str(folder))
    plan = replace(made._plan(spec, folder, "full"), recompute=Recompute(blocks=recomputed))
    prepared = prepare_loaded(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), plan)
    rows = made._rows() if spec.separates_rows else made._rows()[:1]
    stream = made._stream(rows)
    torch.manual_seed(7)
    supervised = sum(len(row) - 1 for row in rows)
    forward_backward(prepared.engine, stream, supervised)
    return {name: p.grad for name, p in prepared.model.trained.items() if p.grad is not None}


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in sorted(TRAINED)],
)
def test_recomputed_blocks_have_the_gradients_of_kept_ones(model_type, tmp_path):
    """Each rate alone: one that has no name here would hide behind another."""
    made = bench()
    for rate in rates(made.small_config(model_type)):
        torch.manual_seed(0)
        config = made.small_config(model_type)
        setattr(config, rate, 0.1)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        made._randomise(model)
        model.save_pretrained(tmp_path / rate)
        kept = gradients(tmp_path / rate, made, recomputed=0)
        again = gradients(tmp_path / rate, made, recomputed=config.get_text_config().num_hidden_layers)
        assert kept.keys() == again.keys()
        for name, wanted in kept.items():
            largest = float(wanted.abs().max())
            assert torch.allclose(again[name], wanted, rtol=1e-4, atol=1e-5 * largest), (rate, name)
