"""A scoring of twenty rows by the tiny model, and what it leaves."""

from pathlib import Path

from fitune.demo.files import training_exercises
from fitune.score.engines.engine import Sampling
from fitune.score.plan import ScorePlan
from fitune.score.run import score
from jsonl import write_lines

ROWS = 20


def write_data(path, *, count=ROWS, changed=""):
    rows = training_exercises(count, seed=2)
    if changed:
        rows[3]["prompt"] = changed
    return write_lines(path, rows)


def plan_for(model, data, out):
    """Answers are written eight rows at a time."""
    sampling = Sampling(max_new_tokens=8)
    return ScorePlan(
        model=str(model), sources=(data,), output_dir=str(out), sampling=sampling, batch_size=1, shard_rows=8
    )


def quietly(plan, progress=lambda done, total: None):
    return score(plan, say=lambda line: None, progress=progress)


def answers(plan):
    return Path(plan.output_dir) / "answers.jsonl"


def everything(plan):
    """All that a run leaves but its report, which tells the time it took."""
    folder = Path(plan.output_dir)
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("report.json", "run.lock")
    }
