"""Paths of a plan in its run's directory: they hold whatever folder a program is started in, and move with the run."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fitune.files import is_there
from fitune.spec.plan import DataSource, Plan


def placed(plan: Plan) -> Plan:
    """The plan with absolute paths: that of the run, and those of model and data that exist in the current folder."""

    def absolute(path: str) -> str:
        """The absolute path of what is in the current folder; a URL, a Hub id and all else as it is."""
        file = (
            os.path.join(path, "config.json") if path == plan.model_path else path
        )  # else a Hub id, like a folder
        return os.path.abspath(path) if "://" not in path and is_there(file) else path

    return _with_paths(plan, absolute, output_dir=os.path.abspath(Path(plan.run.output_dir).expanduser()))


def moved(plan: Plan, directory: Path) -> Plan:
    """The plan of a run that lies in ``directory`` now. What is no longer where it was is looked for beside it, where
    it lay before."""
    before = plan.run.output_dir

    def beside(path: str) -> str:
        """The path; where it is gone, the one with the same place relative to ``directory``, if that exists."""
        if not (os.path.isabs(before) and os.path.isabs(path)) or is_there(path):
            return path
        now = os.path.normpath(directory / os.path.relpath(path, before))
        return now if is_there(now) else path

    return _with_paths(plan, beside, output_dir=str(directory))


def _with_paths(plan: Plan, change: Callable[[str], str], *, output_dir: str) -> Plan:
    def changed(sources: tuple[DataSource, ...]) -> tuple[DataSource, ...]:
        """The sources with their paths changed."""
        return tuple(replace(source, path=change(source.path)) for source in sources)

    data = replace(
        plan.data, sources=changed(plan.data.sources), eval_sources=changed(plan.data.eval_sources),
        chat_template=change(plan.data.chat_template),
    )  # fmt: skip
    run = replace(plan.run, output_dir=output_dir)
    return replace(plan, model_path=change(plan.model_path), data=data, run=run)
