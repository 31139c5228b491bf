"""The run directory is for the run alone: nothing that goes into a run may lie where its results go."""

import re
from collections.abc import Iterator
from pathlib import Path, PurePath, PurePosixPath

from fitune.errors import RunDirectoryError
from fitune.files import path_fault, remove
from fitune.spec.plan import Plan
from fitune.spec.run_directory import FILES, FOLDERS, LAUNCH_LOCK, LOCK, LOGS, RETRY, require_real_files


def require_own_directory(plan: Plan) -> None:
    """Raises RunDirectoryError when output_dir would mix with the model or the data, replace files of others,
    or follow a link out of it."""
    directory = _resolved(Path(plan.run.output_dir).expanduser())
    for setting, path in _inputs(plan):
        _refuse_overlap(directory, setting, path)
    if plan.run.upload_to:
        for setting, url in _remote_inputs(plan):
            _refuse_overlap(_in_store(plan.run.upload_to), setting, url)
    for setting, pattern in _patterns(plan):
        if not isinstance(pattern, Path):
            _refuse_matched(_in_store(plan.run.upload_to), setting, pattern)
        else:
            _refuse_matched(directory, setting, pattern)
    require_real_files(directory)
    try:
        if not (directory / "plan.json").exists():
            _refuse_foreign_folders(directory)
    except OSError as error:
        raise RunDirectoryError(
            f"output_dir {directory} cannot be used: {error.strerror}", hint="choose another output_dir"
        ) from None


def _resolved(path: Path) -> Path:
    try:
        if fault := path_fault(str(path)):
            raise ValueError(fault)
        return path.resolve()
    except (ValueError, OSError, RuntimeError) as error:  # RuntimeError: links that lead to one another
        raise RunDirectoryError(f"output_dir: {error}", hint="choose another output_dir") from None


def require_removable(directory: Path) -> None:
    """Raises RunDirectoryError when ``directory`` holds files and no run: --overwrite removes runs only."""
    if not directory.is_dir() or (directory / "plan.json").is_file():
        return
    if any(entry.name not in (*_LOCKS, RETRY, LOGS) for entry in directory.iterdir()):
        raise RunDirectoryError(
            f"output_dir {directory} has files and no plan.json, so it is no run and is not removed",
            hint="choose another output_dir",
        )


def remove_run(directory: Path) -> None:
    """Remove what an earlier run wrote, and nothing else that lies there. The caller holds the lock."""
    for name in (*FOLDERS, *FILES):
        if name not in _LOCKS:
            remove(directory / name)


_LOCKS = (LOCK, LAUNCH_LOCK)
_MODEL_FILES = ("tokenizer", "tokenizer_config", "config")


def _inputs(plan: Plan) -> Iterator[tuple[str, Path]]:
    """Paths that the plan reads from this disk; Hub ids and URLs name no such path."""
    for setting, name in [("model", plan.model_path), *_sources(plan)]:
        path = Path(name).expanduser()
        if path.exists():
            yield setting, path.resolve()


def _remote_inputs(plan: Plan) -> Iterator[tuple[str, PurePosixPath]]:
    """Places in stores that the plan reads."""
    return ((setting, _in_store(name)) for setting, name in _sources(plan) if "://" in name)


def _sources(plan: Plan) -> Iterator[tuple[str, str]]:
    for setting, sources in (("data", plan.data.sources), ("eval_data", plan.data.eval_sources)):
        for source in sources:
            yield setting, source.path.rpartition("#")[0] or source.path


def _patterns(plan: Plan) -> Iterator[tuple[str, PurePath]]:
    """Sources that name files by a pattern."""
    for setting, name in _sources(plan):
        if re.search(r"[*?\[]", name) and not Path(name).exists():
            yield setting, _in_store(name) if "://" in name else _resolved(Path(name).expanduser())


def _in_store(url: str) -> PurePosixPath:
    """``s3:/bucket/folder``"""
    return PurePosixPath(url)


_READ_AS_DATA = (
    *FILES, "checkpoints/step-1/state.json", "adapter/adapter_config.json",
    *(f"{name}/{file}.json" for name in ("adapter", "merged", "model") for file in _MODEL_FILES),
)  # fmt: skip
"""Names below the output with a suffix that patterns for data look for."""


def _refuse_matched(place: PurePath, setting: str, pattern: PurePath) -> None:
    """Raises RunDirectoryError when the pattern would find what the run writes."""
    from fsspec.utils import glob_translate

    part_of_a_name = r"(?<=[^/])\*\*|\*\*(?=[^/])"
    finds = re.compile(glob_translate(re.sub(part_of_a_name, "*", str(pattern))))
    name = next((name for name in _READ_AS_DATA if finds.match(str(place / name))), None)
    if name is not None:
        raise RunDirectoryError(
            f"output_dir {_shown(place)} must not lie where the {setting} pattern {_shown(pattern)} looks: "
            f"{name} of the run would be read as {setting}",
            hint="an output_dir of its own, or a narrower pattern",
        )


def _shown(path: PurePath) -> str:
    return str(path) if path.is_absolute() else str(path).replace(":/", "://", 1)


def _refuse_overlap(directory: PurePath, setting: str, path: PurePath) -> None:
    is_folder = path in directory.parents and (not isinstance(path, Path) or path.is_dir())
    if path == directory:
        fault = f"is the {setting} itself"
    elif any(directory / name in (path, *path.parents) for name in (*FILES, *FOLDERS)):
        fault = f"must not contain the {setting} {_shown(path)}: the run would write over it"
    elif is_folder and setting != "model":
        fault = f"must not lie in the {setting} folder {_shown(path)}: what the run writes would be read as {setting}"
    else:
        return
    outside = min(path, directory, key=lambda place: len(place.parts)).parent
    raise RunDirectoryError(
        f"output_dir {_shown(directory)} {fault}",
        hint=f"an output_dir of its own, e.g. {_shown(outside / 'runs' / directory.name)}",
    )


def _refuse_foreign_folders(directory: Path) -> None:
    foreign = [name for name in FOLDERS if (directory / name).is_dir() and any((directory / name).iterdir())]
    if foreign:
        raise RunDirectoryError(
            f"output_dir {directory} has {', '.join(f'{name}/' for name in foreign)} and no plan.json, so it is no "
            "run; its results would replace them",
            hint="choose another output_dir",
        )
