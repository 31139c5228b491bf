"""Names that stay inside their folder."""

import os
from pathlib import Path, PurePosixPath, PureWindowsPath

from fitune.errors import RunDirectoryError


def inside(root: Path, name: str) -> Path:
    """``root / name`` for a name that stays below ``root``.

    Raises RunDirectoryError for absolute names, names with ``..`` and names that pass through a symbolic link.
    """
    parts = PurePosixPath(name).parts
    if not parts or "\0" in name or "\\" in name:
        raise RunDirectoryError(f"{name!r} is not a name inside {root}", hint="use a plain name like run-1")
    if PurePosixPath(name).is_absolute() or PureWindowsPath(name).drive:
        raise RunDirectoryError(
            f"{name!r} is absolute, outside {root}", hint="use a name relative to the folder"
        )
    if ".." in parts:
        raise RunDirectoryError(f"{name!r} leaves {root}", hint="use a name without '..'")
    path = root
    for part in parts:
        path = path / part
        if path.is_symlink():
            raise RunDirectoryError(
                f"{path} is a symbolic link, to {os.readlink(path)}", hint="remove the link"
            )
    return path
