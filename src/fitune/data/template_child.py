"""The process in which chat templates run: ``python -m fitune.data.template_child``, started by template_process.py.

It reads requests from a pipe and answers them, one after another. The memory of the process is limited, and the
processor time of every conversation; what goes beyond ends the process, whatever code it is in, and its parent says
so. Its environment holds no secrets, and it can write no file. Imports neither torch nor transformers: it starts in a
tenth of a second.
"""

import contextlib
import gc
import json
import os
import resource
import signal
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from fitune.data.answers import conversation_pieces, prompt_pieces
from fitune.data.formats import Message
from fitune.data.rendering import Renderer
from fitune.data.rows import BadRow
from fitune.data.sandbox import SafeTemplate
from fitune.errors import DataError

OUT_OF_MEMORY = 3
"""Exit code."""
_ENOUGH = 4 * 1024**2
"""Characters in one answer; the parent asks again for the rows that are left."""
_COLLECT_AFTER = 50_000
"""Objects, where Python has 700: of a batch of rows nearly all stay until it is answered, and are looked at in vain."""
_CHARACTERS_PER_S = 1_000_000
"""Long conversations may take longer: one takes well under a millisecond for each thousand characters."""


def to_bytes(message: Any) -> bytes:
    """JSON: nothing that the other process sends is run here."""
    return json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass")


def from_bytes(message: bytes) -> Any:
    """The other way."""
    return json.loads(message.decode("utf-8", "surrogatepass"))


def main() -> None:
    connection, cpu_s, memory_bytes = Connection(int(sys.argv[1])), float(sys.argv[2]), int(sys.argv[3])
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, memory_bytes)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER)
    renderers: dict[str, Renderer] = {}
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        while True:
            try:
                answer = _answer(from_bytes(connection.recv_bytes()), renderers, cpu_s)
                connection.send_bytes(to_bytes(answer))
            except MemoryError:
                os._exit(OUT_OF_MEMORY)


def _limit(kind: int, wanted: int) -> None:
    """A limit that holds already and is lower stays."""
    _, hard = resource.getrlimit(kind)
    value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(kind, (value, value))


def _answer(request: dict[str, Any], renderers: dict[str, Renderer], cpu_s: float) -> Any:
    """The rows of the request laid out, or errors in their place; the first ones, when the text gets long; or one
    error when the template is no template."""
    key = request["key"]
    try:
        if key not in renderers:
            with _processor_time(cpu_s):
                renderers[key] = _renderer(request["template"])
    except DataError as error:
        return _said(error)
    answer, size = [], 0
    for turns, where in request["rows"]:
        row = _laid_out(renderers[key], turns, where, request["ask"], cpu_s)
        answer.append(row)
        size += sum(len(piece[0]) for piece in row) if isinstance(row, list) else 0
        if size > _ENOUGH:
            break
    return answer


def _renderer(template: dict[str, Any]) -> Renderer:
    safe = SafeTemplate(template["source"], name=template["name"])
    return Renderer(safe, template["specials"], tuple(template["special_texts"]))


def _laid_out(renderer: Renderer, turns: list[list[Any]], where: str, ask: bool, cpu_s: float) -> Any:
    """Pieces as lists of their fields."""
    messages = [Message(role, content) for role, content in turns]
    characters = sum(len(message.content) for message in messages)
    lay_out = prompt_pieces if ask else conversation_pieces
    try:
        with _processor_time(cpu_s + characters / _CHARACTERS_PER_S):
            pieces = lay_out(renderer, messages, where=where)
    except BadRow as bad:
        return _said(bad)
    return [[p.text, p.supervised, p.plain, p.first, p.after_special] for p in pieces]


@contextlib.contextmanager
def _processor_time(seconds: float) -> Iterator[None]:
    """The system ends the process by SIGPROF when the block takes longer: it needs no help from what runs."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _said(error: DataError) -> dict[str, str | None]:
    return {"message": error.message, "hint": error.hint, "reason": getattr(error, "reason", None)}


if __name__ == "__main__":
    main()
