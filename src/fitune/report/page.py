"""Pages from Jinja2 templates: one file each, with nothing to load from anywhere and nothing to execute.

Names of models, paths, settings and answers come from strangers: everything is escaped but what is Markup.
"""

from pathlib import Path
from typing import Any

from fitune.errors import RunDirectoryError
from fitune.files import write_atomically


def render(template: str, **values: Any) -> str:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fitune.report"), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template(template).render(**values)


def write_page(path: Path, text: str) -> Path:
    """Whole or not at all. Raises RunDirectoryError when the file cannot be written."""
    try:
        write_atomically(path, text)
    except OSError as error:
        raise RunDirectoryError(f"{path}: cannot be written: {error.strerror or error}") from None
    return path
