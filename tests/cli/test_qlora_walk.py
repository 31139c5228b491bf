"""The ready recipe goes from a base folder to a merged model that transformers loads alone."""

import json
import stat
from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from runs import report_of

pytest.importorskip("bitsandbytes")
READY = Path(__file__).parents[2] / "recipes" / "demo_qlora_tiny.yaml"


@pytest.mark.filterwarnings("ignore")
def test_trained_on_nf4_it_is_merged_into_the_base_as_it_is_on_disk_and_needs_no_fitune(
    model_folder, data_file, tmp_path, call
):
    """Experts on HQQ: tests/train/test_experts.py."""
    run = tmp_path / "run"
    recipe = {
        **yaml.safe_load(READY.read_text(encoding="utf-8")), "model": str(model_folder), "data": str(data_file),
        "eval_data": f"{data_file}#8", "gpu": "cpu", "seq_len": 64, "max_steps": 6, "learning_rate": 1e-2,
        "samples": 0, "output_dir": str(run),
    }  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    merged = run / "merged"
    printed = call("train", tmp_path / "recipe.yaml").ends(0, f"merged model: {merged} (verified)")
    assert "fitune export" not in printed, "there is nothing left to export"
    call("export", run).ends(2, "merged its adapter already")
    report = report_of(run)
    assert report.final_loss < report.first_loss
    modes = {stat.S_IMODE(file.stat().st_mode) for file in merged.iterdir()}
    assert len(modes) == 1, "weights can be read by whoever reads the card"
    config = json.loads((merged / "config.json").read_text())
    assert not {"quantization_config", "auto_map"} & config.keys()
    assert not (merged / "adapter_config.json").exists()  # with one, transformers would load it by PEFT
    tokenizer = AutoTokenizer.from_pretrained(merged)
    ids = tokenizer("What is 4 plus 5?", return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == "What is 4 plus 5?"
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(merged)(ids).logits
        before = base(ids).logits
        adapted = PeftModel.from_pretrained(base, str(run / "adapter"))(ids).logits
    torch.testing.assert_close(logits, adapted, rtol=0, atol=1e-5)
    assert (adapted - before).abs().max() > 0.03
