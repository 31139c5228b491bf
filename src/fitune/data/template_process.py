"""Chat templates, run in a process of their own: neither their time nor their memory is this process's.

One child serves all templates of this process. It is started when the first template is used (a tenth of a second),
answers batches of conversations, and is started anew when it had to be ended.
"""

import atexit
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from multiprocessing import Pipe
from typing import Any

from fitune.data.encoding import Piece
from fitune.data.formats import Conversation
from fitune.data.rows import BadRow
from fitune.data.template_child import OUT_OF_MEMORY, from_bytes, to_bytes
from fitune.errors import DataError
from fitune.units import GIB, format_bytes

CPU_LIMIT_S = 2.0
"""Processor time of one conversation; a second more for each million characters."""
MEMORY_LIMIT_BYTES = 3 * GIB // 4
"""Bytes of the child's address space."""
_LARGEST_ANSWER = 256 * 1024**2
"""Bytes: a rendering has at most sandbox.SIZE_LIMIT characters, and an answer ends after a long one."""


class TemplateStopped(DataError):
    """The template went beyond its time or its memory."""


class RemoteTemplate:
    """A chat template in the child. Raises DataError, when it is first used, if the source is no valid Jinja."""

    def __init__(
        self, source: str, *, name: str, specials: dict[str, str], special_texts: Sequence[str]
    ) -> None:
        self._name = name
        self._template = {
            "source": source,
            "name": name,
            "specials": specials,
            "special_texts": special_texts,
        }
        text = json.dumps(self._template, sort_keys=True).encode()
        self._key = hashlib.blake2b(text, digest_size=16).hexdigest()

    def lay_out(
        self, conversations: Sequence[Conversation], *, ask: bool = False
    ) -> Iterator[list[Piece] | BadRow]:
        """The pieces of every conversation, or what is wrong with it; ``ask``: of prompts without their answer.

        Raises TemplateStopped, naming the row. Not all of it is in memory at once, however much the template writes.
        """
        done, together, tries = 0, len(conversations), 0
        while done < len(conversations):
            batch = conversations[done : done + together]
            try:
                answer = _child().ask(self._request(batch, ask=ask), self._template)
            except _Ended as ended:
                tries += 1
                if len(batch) == 1 and (ended.by_limit or tries > 2):
                    raise self._stopped(batch[0].where, ended) from None
                together = 1  # finds the conversation at which the child ended
                continue
            if isinstance(answer, dict):
                raise DataError(answer["message"], hint=answer["hint"])
            yield from map(_received, answer)
            done, tries = done + len(answer), 0

    def _request(self, conversations: Sequence[Conversation], *, ask: bool) -> dict[str, Any]:
        rows = [
            [[[message.role, message.content] for message in conversation.messages], conversation.where]
            for conversation in conversations
        ]
        return {"key": self._key, "ask": ask, "rows": rows}

    def _stopped(self, where: str, ended: "_Ended") -> TemplateStopped:
        return TemplateStopped(
            f"{where}: {self._name} {ended.how}",
            hint="look at the template's loops, or give another chat_template",
        )


def _received(row: Any) -> list[Piece] | BadRow:
    if isinstance(row, dict):
        return BadRow(row["message"], reason=row["reason"], hint=row["hint"])
    return [
        Piece(text, supervised=supervised, plain=plain, first=first, after_special=after_special)
        for text, supervised, plain, first, after_special in row
    ]


class _Ended(Exception):
    """The child is gone; ``how`` says why, after the template's name."""

    def __init__(self, status: int) -> None:
        self.by_limit = status in (-signal.SIGPROF, OUT_OF_MEMORY)
        self.how = f"ended the process that runs it, with status {status}"
        if status == -signal.SIGPROF:
            self.how = f"was still running after {CPU_LIMIT_S:g} s of processor time: an endless loop?"
        elif status == OUT_OF_MEMORY:
            self.how = f"needs more than {format_bytes(MEMORY_LIMIT_BYTES)} of memory"
        super().__init__(self.how)


class _Child:
    """A new program, not a fork: torch and tokenizers have threads, which a fork would leave behind."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._lock = threading.Lock()
        self._known: set[str] = set()
        self._connection, theirs = Pipe()
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUTF8": "1"}
        if libraries := os.environ.get("LD_LIBRARY_PATH"):
            environment["LD_LIBRARY_PATH"] = libraries
        limits = (str(theirs.fileno()), str(CPU_LIMIT_S), str(MEMORY_LIMIT_BYTES))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "fitune.data.template_child", *limits],
                pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                start_new_session=True, env=environment,
            )  # fmt: skip

    def ask(self, request: dict[str, Any], template: dict[str, Any]) -> Any:
        """The answer. The template goes with its first request. Raises _Ended."""
        with self._lock:
            if request["key"] not in self._known:
                request = request | {"template": template}
            try:
                self._connection.send_bytes(to_bytes(request))
                answer = from_bytes(self._connection.recv_bytes(_LARGEST_ANSWER))
            except (EOFError, OSError):
                raise _Ended(self.close()) from None
            except BaseException:
                self.close()  # interrupted: the answer would be taken for that of the next request
                raise
            self._known.add(request["key"])
            return answer

    def close(self) -> int:
        """End the process at once; its exit status."""
        global _running
        _running = None
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout=1)
        self._process.kill()
        return self._process.wait()


_running: _Child | None = None


def _child() -> _Child:
    global _running
    if _running is None or _running.owner != os.getpid():
        _running = _Child()
    return _running


@atexit.register
def end_child() -> None:
    """The next template starts another one."""
    if _running is not None and _running.owner == os.getpid():
        _running.close()
