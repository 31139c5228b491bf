"""The run directory is for the run alone: nothing that goes into a run may lie where its results go."""

from collections.abc import Iterator
from pathlib import Path, PurePath, PurePosixPath

from fitune.errors import RunDirectoryError
from fitune.files import path_fault, remove
from fitune.values.plan import Plan
from fitune.values.run_directory import FILES, FOLDERS, LAUNCH_LOCK, LOCK, LOGS, RETRY, require_real_files


def require_own_directory(plan: Plan) -> None:
    """Raises RunDirectoryError when output_dir would mix with the model or the data, replace files of others,
    or follow a link out of it."""
    directory = Path(plan.run.output_dir).expanduser()
    try:
        if fault := path_fault(str(directory)):
            raise ValueError(fault)
        directory = directory.resolve()
    except (ValueError, OSError, RuntimeError) as error:  # RuntimeError: links that lead to one another
        raise RunDirectoryError(f"output_dir: {error}", hint="choose another output_dir") from None
    for setting, name in [("model", plan.model_path), *_sources(plan)]:
        path = Path(name).expanduser()
        if path.exists():  # Hub ids and URLs name no such path
            _refuse_overlap(directory, setting, path.resolve())
    if plan.run.upload_to:
        for setting, url in _sources(plan):  # places in stores: ``s3:/bucket/folder``
            if "://" in url:
                _refuse_overlap(PurePosixPath(plan.run.upload_to), setting, PurePosixPath(url))
    require_real_files(directory)
    try:
        is_run, folders = (directory / "plan.json").exists(), [directory / name for name in FOLDERS]
        foreign = [one.name for one in folders if not is_run and one.is_dir() and any(one.iterdir())]
    except OSError as error:
        raise RunDirectoryError(
            f"output_dir {directory} cannot be used: {error.strerror}", hint="choose another output_dir"
        ) from None
    if foreign:
        raise RunDirectoryError(
            f"output_dir {directory} has {', '.join(f'{name}/' for name in foreign)} and no plan.json, so it is no "
            "run; its results would replace them",
            hint="choose another output_dir",
        )


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


def _sources(plan: Plan) -> Iterator[tuple[str, str]]:
    for setting, sources in (("data", plan.data.sources), ("eval_data", plan.data.eval_sources)):
        for source in sources:
            yield setting, source.path.rpartition("#")[0] or source.path


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
    folder = outside / ("trained" if path.name == "runs" else "runs")
    raise RunDirectoryError(
        f"output_dir {_shown(directory)} {fault}",
        hint=f"an output_dir of its own, e.g. {_shown(folder / directory.name)}",
    )
