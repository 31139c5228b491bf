"""A save by one process, and what lies in a run's folder of checkpoints."""

from fitune.checkpoint.slices import share_of
from fitune.engine.ranks import ALONE
from fitune.train.saving import save_together


def save_checkpoint(root, state, *, descent, keep, eval_loss, on_note=lambda note: None):
    save_together(
        ALONE, root, share_of(state, rank=0), descent=descent, keep=keep, eval_loss=eval_loss, on_note=on_note, spare=()
    )  # fmt: skip
    return root / "checkpoints" / f"step-{state.step}"


def names(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())
