"""AdamW in backward by the ordinary loop: the plain run's losses, weights and checkpoints."""

import pytest

from fitune.values.plan import Full, InBackward
from runs import (
    losses,
    same_weights,
    stopped_and_resumed,
    trained,
)

COMMON = {
    "tuning": "full", "micro_batch_size": 8, "gradient_accumulation_steps": 1, "max_grad_norm": 0,
    "max_steps": 6, "save_steps": 2, "weight_decay": 0.1,
}  # fmt: skip


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16-master"])
def test_it_is_the_plain_run(make_plan, tmp_path, precision):
    plain = make_plan(**COMMON, precision=precision, output_dir=str(tmp_path / "plain"))
    ours = make_plan(
        **COMMON, precision=precision, optimizer_in_backward=True, output_dir=str(tmp_path / "ours")
    )
    assert isinstance(ours.tuning, Full)
    assert isinstance(ours.tuning.update, InBackward)
    one, two = trained(plain), trained(ours)
    assert losses(plain) == losses(ours)
    assert same_weights(one.exported, two.exported)


def test_interrupted_and_resumed_it_ends_bit_for_bit_the_same(make_plan, tmp_path):
    settings = {**COMMON, "optimizer_in_backward": True, "max_grad_norm": 1.0}
    plans = [make_plan(**settings, output_dir=str(tmp_path / name)) for name in ("straight", "broken")]
    assert plans[0].goes_back_twice
    stopped_and_resumed(*plans)


def test_a_run_goes_on_in_backward(make_plan, tmp_path):
    """With the states of the ordinary engine: what to do when its memory runs out."""
    settings = {**COMMON, "output_dir": str(tmp_path / "broken")}
    plain, ours = make_plan(**settings), make_plan(**settings, optimizer_in_backward=True)
    straight = make_plan(**{**settings, "output_dir": str(tmp_path / "straight")})
    one = trained(straight)
    trained(plain, stop_after=3)
    two = trained(ours, resume=True)
    assert losses(straight) == losses(ours)
    assert same_weights(one.exported, two.exported)
