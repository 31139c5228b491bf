"""A page is written whole or not at all."""

from pathlib import Path

from fitune.errors import RunDirectoryError
from fitune.spec.disk import write_atomically


def write_page(path: Path, page: str) -> Path:
    """Raises RunDirectoryError when the file cannot be written."""
    try:
        write_atomically(path, page)
    except OSError as error:
        raise RunDirectoryError(f"{path}: cannot be written: {error.strerror or error}") from None
    return path
