"""Names of what is not finished yet: hidden, not to be guessed, and telling which process left them.

Whoever could guess such a name could put a link there before and have another file written over.
"""

import os
import re
import secrets
import shutil
from pathlib import Path

TEMPORARY = ".tmp-"
"""How the name of every unfinished file and folder begins."""


def temporary_sibling(target: Path) -> Path:
    """A hidden name next to ``target`` that nobody can guess and that says whose it is."""
    return target.with_name(f"{TEMPORARY}{target.name}-{os.getpid()}-{secrets.token_hex(8)}")


def remove_stale_siblings(folder: Path, name: str = "") -> None:
    """Remove what dead processes, or an earlier failure of this one, left half done of ``name`` in ``folder``; of
    every name when there is none.

    A link among them is removed itself, never what it points to.
    """
    owned = re.compile(f"{re.escape(TEMPORARY)}{re.escape(name) or '.+'}-([0-9]{{1,10}})-[0-9a-f]{{16}}")
    for path in list(folder.iterdir()) if folder.is_dir() else ():
        match = owned.fullmatch(path.name)
        if match and (int(match[1]) == os.getpid() or not process_lives(int(match[1]))):
            remove(path)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder that may be there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def process_lives(pid: int) -> bool:
    """On this machine."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True  # somebody else's process is a process
    return True
