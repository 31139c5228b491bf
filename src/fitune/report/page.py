"""Pages from Jinja2 templates, with nothing to load from anywhere and nothing to execute.

Names of models, paths, settings and answers come from strangers: everything is escaped but what is Markup.
"""

import base64
import errno
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fitune.errors import MissingExtra, RunDirectoryError
from fitune.files import write_atomically


@dataclass(frozen=True, slots=True)
class Tile:
    """A figure at the head of a page."""

    name: str
    value: str
    below: str


def render(template: str, *, scripts: Sequence[str] = (), **values: Any) -> str:
    """A page, with those files of ``templates/`` as its one script: the page's policy lets it run by its hash."""
    from markupsafe import Markup

    if scripts:
        folder = Path(__file__).parent / "templates"
        script = "\n".join((folder / name).read_text(encoding="utf-8") for name in scripts)
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        values |= {"script": Markup(script), "script_hash": digest}
    text: str = _environment().get_template(template).render(**values)
    return text


@cache
def _environment() -> Any:
    """Keeps the templates that were compiled."""
    import jinja2

    return jinja2.Environment(
        loader=jinja2.PackageLoader("fitune.report"), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip


def pictures_or_advice(draw: Callable[[], Any], *, without: Any) -> tuple[Any, str]:
    """Returns what ``draw`` returns and an empty text; without matplotlib ``without`` and how to install it."""
    try:
        return draw(), ""
    except MissingExtra as error:
        return without, f"No {error.what}: {error.hint}"


def write_page(path: Path, text: str) -> Path:
    """Whole or not at all. Raises RunDirectoryError when the file cannot be written."""
    if path.is_dir():
        raise RunDirectoryError(f"{path} is a folder, not a file", hint=f"{path / 'page.html'}")
    try:
        write_atomically(path, text)
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise RunDirectoryError(
            f"{path}: cannot be written: {error.strerror or error}",
            hint="all figures are in the files beside it; with room the same command writes the page"
            if is_full
            else None,
        ) from None
    return path
