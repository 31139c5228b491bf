"""The frame that every page of ours has: one file, with nothing to load from anywhere and nothing to execute."""

from importlib.resources import files
from pathlib import Path
from string import Template

from fitune.errors import RunDirectoryError
from fitune.files import write_atomically
from fitune.report.pieces import Html, safe


def page(title: str, body: Html) -> str:
    folder = files("fitune.report")
    template = Template(folder.joinpath("page.html").read_text(encoding="utf-8"))
    style = folder.joinpath("style.css").read_text(encoding="utf-8")
    return template.substitute(title=safe(title), style=style, body=body)


def write_page(path: Path, text: str) -> Path:
    """Whole or not at all. Raises RunDirectoryError when the file cannot be written."""
    try:
        write_atomically(path, text)
    except OSError as error:
        raise RunDirectoryError(f"{path}: cannot be written: {error.strerror or error}") from None
    return path
