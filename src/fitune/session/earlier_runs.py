"""A run that is in output_dir already: is it this one, and is it complete?"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from fitune.checkpoint.differences import compare_plans, difference_table, with_unsaid_fields
from fitune.checkpoint.resume import last_saved
from fitune.errors import RunDirectoryError
from fitune.files import read_text
from fitune.spec.plan import Plan
from fitune.spec.reports import RunReport
from fitune.spec.serial import from_data, parse_json

T = TypeVar("T")


def complete_run(directory: Path, plan: Plan, *, resume: bool | str) -> RunReport | None:
    """The report of this very run if ``directory`` holds it complete, else None. A longer one is left to ``resume``.

    Raises RunDirectoryError when it holds a complete run of other settings that nobody asked to continue, or one
    that is trained and lacks its export only.
    """
    ended = _ended(directory)
    if isinstance(resume, str) or ended is None or not (ended.status == "complete" or ended.lacks_export):
        return None
    saved = _read_or_refuse(Plan, directory / "plan.json", lambda data: with_unsaid_fields(data, plan))
    differences = [
        d for d in compare_plans(saved, plan) if not d.allowed or d.setting.startswith("schedule.duration")
    ]
    if not differences and ended.status == "complete":
        return ended
    has_checkpoint = last_saved(directory) is not None
    if resume and has_checkpoint:
        return None
    if ended.lacks_export:
        raise RunDirectoryError(
            f"{directory} is trained; only its export failed: {ended.reason}",
            hint=f"fitune export {directory}, or --overwrite to start anew",
        )
    if resume:
        raise RunDirectoryError(
            f"{directory} holds a complete run and no checkpoint (save_steps was 0): there is nothing to go on from\n"
            f"{difference_table(differences)}",
            hint="--overwrite to start anew, or another output_dir; with save_steps a run can be made longer",
        )
    longer = " --resume to make it longer," if has_checkpoint and all(d.allowed for d in differences) else ""
    raise RunDirectoryError(
        f"{directory} holds a complete run of other settings\n{difference_table(differences)}",
        hint=f"{longer} --overwrite to start anew, or another output_dir".strip(),
    )


def _ended(directory: Path) -> RunReport | None:
    if not (directory / "report.json").is_file():
        return None
    return _read_or_refuse(RunReport, directory / "report.json")


def _read_or_refuse(cls: type[T], file: Path, completed: Callable[[Any], Any] = lambda data: data) -> T:
    try:
        return from_data(cls, completed(parse_json(read_text(file, follow_links=False))))
    except (OSError, ValueError) as error:
        raise RunDirectoryError(
            f"{file} cannot be read: {error}", hint="--overwrite, or another output_dir"
        ) from None
