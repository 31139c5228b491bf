"""AdamW in backward by the ordinary loop: the plain run's losses, weights and checkpoints."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fitune.spec.plan import Full, InBackward
from fitune.train.run import run
from train.test_run import callbacks, losses

COMMON = {
    "tuning": "full", "micro_batch_size": 8, "gradient_accumulation_steps": 1, "max_grad_norm": 0,
    "max_steps": 6, "save_steps": 2, "weight_decay": 0.1,
}  # fmt: skip


def exported(report):
    return load_file(Path(report.exported) / "model.safetensors")


def assert_same(one, other):
    ours, theirs = exported(one), exported(other)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("precision", ["fp32", "bf16-master"])
def test_it_is_the_plain_run(make_plan, tmp_path, precision):
    plain = make_plan(**COMMON, precision=precision, output_dir=str(tmp_path / "plain"))
    ours = make_plan(
        **COMMON, precision=precision, optimizer_in_backward=True, output_dir=str(tmp_path / "ours")
    )
    assert isinstance(ours.tuning, Full)
    assert isinstance(ours.tuning.update, InBackward)
    one, two = run(plain, callbacks=callbacks()), run(ours, callbacks=callbacks())
    assert losses(plain) == losses(ours)
    assert_same(one, two)


def test_interrupted_and_resumed_it_ends_bit_for_bit_the_same(make_plan, tmp_path):
    settings = {**COMMON, "optimizer_in_backward": True, "max_grad_norm": 1.0}
    straight = make_plan(**settings, output_dir=str(tmp_path / "straight"))
    broken = make_plan(**settings, output_dir=str(tmp_path / "broken"))
    assert straight.goes_back_twice
    one = run(straight, callbacks=callbacks())
    run(broken, callbacks=callbacks(stop_after=3))
    two = run(broken, callbacks=callbacks(), resume=True)
    assert losses(straight) == losses(broken)
    assert_same(one, two)


def test_a_run_goes_on_in_backward(make_plan, tmp_path):
    """With the states of the ordinary engine: what to do when its memory runs out."""
    settings = {**COMMON, "output_dir": str(tmp_path / "broken")}
    plain, ours = make_plan(**settings), make_plan(**settings, optimizer_in_backward=True)
    straight = make_plan(**{**settings, "output_dir": str(tmp_path / "straight")})
    one = run(straight, callbacks=callbacks())
    run(plain, callbacks=callbacks(stop_after=3))
    two = run(ours, callbacks=callbacks(), resume=True)
    assert losses(straight) == losses(ours)
    assert_same(one, two)
