"""A model by the name that people give it: a folder, a name on the Hub, an adapter, or the directory of a run."""

from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from fitune.errors import CheckpointError, ModelError, RunDirectoryError
from fitune.files import path_fault
from fitune.models.adapter_file import CONFIG, read_adapter_config
from fitune.models.weight_files import base_reference
from fitune.report.run_files import read_run
from fitune.train.again import EXPORT_FOLDERS
from fitune.values.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel:
    """The place of a model's files."""

    title: str
    model: str
    """Folder or Hub id of the weights; of an adapter, those of its base."""
    adapter: str = ""
    run: Plan | None = None
    """The plan of the run that trained it."""
    warning: str = ""

    @property
    def texts(self) -> str:
        """Folder of the tokenizer and its chat template: an adapter's own where it has them, as its run trained."""
        has_its_own = self.adapter and (Path(self.adapter) / "tokenizer.json").is_file()
        return self.adapter if has_its_own else self.model

    @property
    def base(self) -> str:
        """The weights as every name of them says it."""
        return base_reference(self.model)


def find_model(word: str) -> NamedModel:
    """The model that ``word`` names. Raises RunDirectoryError for a run that has exported nothing yet, ModelError for a
    folder that is none of these."""
    if fault := path_fault(word):
        raise ModelError(
            fault, hint="a model folder, a name on the Hub, an adapter, or the directory of a run"
        )
    folder = Path(word).expanduser()
    title = folder.name or folder.resolve().name
    if (folder / "plan.json").is_file():
        return _of_run(folder, title)
    if (folder / CONFIG).is_file():
        return _of_adapter(folder, title)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder}: neither a model (config.json), an adapter ({CONFIG}) nor a run (plan.json)",
            hint="the output_dir of a run, or a folder of its export",
        )
    if not folder.is_dir() and (folder.is_absolute() or word.startswith((".", "~")) or word.count("/") > 1):
        raise ModelError(f"{word}: no such folder", hint="a folder, or a name on the Hub such as owner/name")
    return NamedModel(title=title, model=str(folder) if folder.is_dir() else word)


def _of_run(run: Path, title: str) -> NamedModel:
    """The run's adapter on its base, or else the model that it exported."""
    files = read_run(run)
    warning = ""
    if files.run is None or files.run.status != "complete":
        warning = f"{run} is not complete: this is what it exported last"
    for kind in EXPORT_FOLDERS.values():
        folder = run / kind
        if folder.is_dir():
            is_adapter = (folder / CONFIG).is_file()
            return NamedModel(
                title=title,
                model=files.plan.model_path if is_adapter else str(folder),
                adapter=str(folder) if is_adapter else "",
                run=files.plan,
                warning=warning,
            )
    raise RunDirectoryError(
        f"{run} has exported nothing yet: there is no {', '.join(EXPORT_FOLDERS.values())} in it",
        hint=f"wait for its end, or fitune export {quote(str(run))}",
    )


def _of_adapter(folder: Path, title: str) -> NamedModel:
    base = read_adapter_config(folder).base_model_name_or_path
    if not base:
        raise CheckpointError(
            f"{folder / CONFIG}: base_model_name_or_path is missing, so its base is not known",
            hint="write the base's folder or Hub id there",
        )
    of_run = folder.name in EXPORT_FOLDERS.values() and (folder.parent / "plan.json").is_file()
    return NamedModel(
        title=f"{folder.resolve().parent.name}/{title}" if of_run else title, model=base, adapter=str(folder)
    )
