"""The peak of a rank by fitune's estimate and rehearsal, and by torch's own FSDPMemTracker on the same fake ranks.

    python bench/fsdp_mem_tracker.py [--json results/fsdp_mem_tracker.json]

A six-block Llama of 2.7 M parameters, FSDP2 at stages 2 and 3 on two ranks, full fine-tuning and LoRA, none, half or
all blocks recomputed. All three look at the same engine and micro-batch; nothing is computed.
"""

import argparse
import itertools
import json
import sys
import tempfile
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mod_tracker import ModTracker
from transformers import LlamaConfig

from fitune.engine.ranks import local_part
from fitune.estimate.predict import predict
from fitune.models.readers import model_config
from fitune.rehearse.stand_ins import StandIns
from fitune.rehearse.step import full_stream, make_states, record_step, rehearsed
from fitune.rehearse.trace import peaks_by_kind
from fitune.values.model.model_config import load_model_spec
from fitune.values.model.traits import largest_rows
from fitune.values.plan import Plan, Zero

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from plans import CPU, plan_for

LAYERS = 6


class Tracker(FSDPMemTracker):
    """FSDPMemTracker that is told what a fake tensor cannot say: which positions have labels, how large a norm is."""

    def __init__(self, trunk: Any, answers: StandIns) -> None:
        super().__init__(trunk)
        self._answers = answers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        return super().__torch_dispatch__(self._answers.instead_of(func), types, args, kwargs)


def tracked(plan: Plan) -> dict[str, int]:
    """Bytes by kind at the peak of a second step, as FSDPMemTracker has it.

    States of the optimizer are told to it as inputs.
    """
    with rehearsed(plan, model_config(plan.model_path)) as prepared:
        engine, labels = prepared.engine, plan.batch.most_labels
        make_states(plan, engine, prepared.model.trained.values())
        stream = full_stream(largest_rows(plan))
        tracker = Tracker(engine.trunk, StandIns(gpu=plan.hardware.gpu, supervised_tokens=labels))
        states = map(local_part, engine.state().tensors.values())  # its track_external does nothing
        tracker.track_inputs((*stream.tensors(), *states))
        with tracker:
            engine.forward_backward(stream, divisor=labels, enter_phase=lambda phase: None, last=True)
            engine.update(learning_rate=1.0, enter_phase=lambda phase: None)
        [kinds] = tracker.get_tracker_snapshot("peak").values()
    return {str(kind).removeprefix("_FSDPRefType."): size for kind, size in kinds.items() if size}


def row_of(plan: Plan) -> dict[str, Any]:
    with ModTracker():  # the hooks that FSDPMemTracker puts on every module
        hooked = _rehearsed(plan)
    kinds = tracked(plan)
    return {
        "estimated": predict(plan).memory.tensor_peak_bytes,
        "rehearsed": _rehearsed(plan),
        "rehearsed_with_its_hooks": hooked,
        "tracked": kinds.pop("Total"),
        "tracked_kinds": kinds,
    }


def _rehearsed(plan: Plan) -> int:
    phases = peaks_by_kind(record_step(plan, model_config(plan.model_path)), on_cuda=False)
    return max(sum(sizes.values()) for sizes in phases.values())


def plans(folder: str) -> Any:
    spec = load_model_spec(folder)
    cases = itertools.product((2, 3), ("full", "lora"), (0, LAYERS // 2, LAYERS))
    for stage, tuning, recompute in cases:
        plan = plan_for(
            spec, hardware=replace(CPU, gpus_per_node=2), tuning=tuning, recompute=recompute, chunk=128, rows=2,
            seq_len=256, sharding=Zero(stage=stage, backend="fsdp"), model_path=folder,
        )  # fmt: skip
        yield {"stage": stage, "tuning": tuning, "recomputed": recompute}, plan


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        LlamaConfig(
            vocab_size=2048, hidden_size=256, intermediate_size=704, num_hidden_layers=LAYERS,
            num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=False,
        ).save_pretrained(folder)  # fmt: skip
        heads = "estimated", "rehearsed", "with its hooks", "FSDPMemTracker"
        print("stage tuning recomputed", *(f"{head:>15}" for head in heads), "   ratio")
        for case, plan in plans(folder):
            row = {**case, **row_of(plan)}
            rows.append(row)
            what = f"{row['stage']:5} {row['tuning']:6} {row['recomputed']:10}"
            bytes_of = "estimated", "rehearsed", "rehearsed_with_its_hooks", "tracked"
            print(
                what, *(f"{row[name]:15,}" for name in bytes_of), f"{row['tracked'] / row['rehearsed']:8.4f}"
            )
    if wanted.json:
        content = {"date": date.today().isoformat(), "torch": torch.__version__, "world": 2, "rows": rows}
        wanted.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
