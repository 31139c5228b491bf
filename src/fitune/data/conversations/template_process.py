"""Chat templates, run in a process of their own: neither their time nor their memory is this process's.

One child, ``python -m fitune.data.conversations.template_process``, serves all templates of this process. It is started
when a template is first used (a tenth of a second: it imports neither torch nor transformers), answers batches of
conversations, and is started anew when it had to be ended. Its memory is limited, and the processor time of every
conversation; what goes beyond ends it, whatever code it is in, and its parent says so. Its environment holds no
secrets, and it can write no file.
"""

import atexit
import contextlib
import gc
import hashlib
import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from fitune.data.children import Child, ChildEnded
from fitune.data.conversations.answers import conversation_pieces, prompt_pieces
from fitune.data.conversations.messages import Conversation, Message
from fitune.data.conversations.rendering import Piece, Renderer
from fitune.data.conversations.sandbox import SafeTemplate
from fitune.data.conversations.tool_calls import ToolCall
from fitune.data.reading.rows import BadRow, from_message, to_message
from fitune.errors import DataError
from fitune.units import GIB, format_bytes

CPU_LIMIT_S = 2.0
"""Processor time of one conversation; a second more for each million characters."""
MEMORY_LIMIT_BYTES = 3 * GIB // 4
"""Bytes of the child's address space."""
_OUT_OF_MEMORY = 3
"""Exit code."""
_BY_LIMIT = (-signal.SIGPROF, _OUT_OF_MEMORY)
_LARGEST_ANSWER = 256 * 1024**2
"""Bytes: a rendering has at most sandbox.SIZE_LIMIT characters, and an answer ends after a long one."""
_ENOUGH = 4 * 1024**2
"""Characters in one answer; the parent asks again for the rows that are left."""
_COLLECT_AFTER = 50_000
"""Objects, where Python has 700: of a batch of rows nearly all stay until it is answered, and are looked at in vain."""
_CHARACTERS_PER_S = 1_000_000
"""Long conversations may take longer: one takes well under a millisecond for each thousand characters."""


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
            except ChildEnded as ended:
                tries += 1
                if len(batch) == 1 and (ended.status in _BY_LIMIT or tries > 2):
                    raise self._stopped(batch[0].where, ended) from None
                together = 1  # finds the conversation at which the child ended
                continue
            if isinstance(answer, dict):
                raise from_message(**answer)
            yield from map(_received, answer)
            done, tries = done + len(answer), 0

    def _request(self, conversations: Sequence[Conversation], *, ask: bool) -> dict[str, Any]:
        rows = [
            [[_turn(message) for message in each.messages], each.where, each.tools] for each in conversations
        ]
        return {"key": self._key, "ask": ask, "rows": rows}

    def _stopped(self, where: str, ended: ChildEnded) -> TemplateStopped:
        how = f"ended the process that runs it, with {ended.how}"
        if ended.status == -signal.SIGPROF:
            how = f"was still running after {CPU_LIMIT_S:g} s of processor time: an endless loop?"
        elif ended.status == _OUT_OF_MEMORY:
            how = f"needs more than {format_bytes(MEMORY_LIMIT_BYTES)} of memory"
        return TemplateStopped(
            f"{where}: {self._name} {how}",
            hint="look at the template's loops, or give another chat_template",
        )


def _turn(message: Message) -> list[Any]:
    """``message`` as JSON; most have no calls."""
    if not (message.calls or message.call_id):
        return [message.role, message.content]
    calls = [[call.name, call.arguments, call.id] for call in message.calls]
    return [message.role, message.content, calls, message.call_id]


def _message(role: Any, content: str, calls: Any = (), call_id: str = "") -> Message:
    """The other way."""
    return Message(role, content, tuple(ToolCall(*call) for call in calls), call_id)


def _received(row: Any) -> list[Piece] | BadRow:
    if isinstance(row, dict):
        return BadRow(row["message"], reason=row["reason"], hint=row["hint"])
    return [
        Piece(text, supervised=supervised, plain=plain, first=first, after_special=after_special)
        for text, supervised, plain, first, after_special in row
    ]


class _TemplateChild:
    """The child and the templates that it knows."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._lock = threading.Lock()
        self._known: set[str] = set()
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUTF8": "1"}
        if libraries := os.environ.get("LD_LIBRARY_PATH"):
            environment["LD_LIBRARY_PATH"] = libraries
        limits = (str(CPU_LIMIT_S), str(MEMORY_LIMIT_BYTES))
        self._child = Child("fitune.data.conversations.template_process", *limits, environment=environment)

    def ask(self, request: dict[str, Any], template: dict[str, Any]) -> Any:
        """The answer. The template goes with its first request. Raises ChildEnded."""
        with self._lock:
            if request["key"] not in self._known:
                request = request | {"template": template}
            try:
                self._child.send(_to_bytes(request))
                answer = _from_bytes(self._child.receive(largest_bytes=_LARGEST_ANSWER))
            except BaseException:
                end_child()  # interrupted, too: the answer would be taken for that of the next request
                raise
            self._known.add(request["key"])
            return answer

    def close(self) -> None:
        self._child.close()


_running: _TemplateChild | None = None


def _child() -> _TemplateChild:
    global _running
    if _running is None or _running.owner != os.getpid():
        _running = _TemplateChild()
    return _running


@atexit.register
def end_child() -> None:
    """The next template starts another one."""
    global _running
    child, _running = _running, None
    if child is not None and child.owner == os.getpid():
        child.close()


def _to_bytes(message: Any) -> bytes:
    """JSON: nothing that the other process sends is run here."""
    return json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _from_bytes(message: bytes) -> Any:
    """The other way."""
    return json.loads(message.decode("utf-8", "surrogatepass"))


def main() -> None:
    """Answers requests from the parent's pipe, under the limits of memory and files that it gives, until the
    parent is gone."""
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
                answer = _answer(_from_bytes(connection.recv_bytes()), renderers, cpu_s)
                connection.send_bytes(_to_bytes(answer))
            except MemoryError:
                os._exit(_OUT_OF_MEMORY)


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
        return to_message(error)
    answer, size = [], 0
    for turns, where, tools in request["rows"]:
        row = _laid_out(renderers[key], turns, where, tools, request["ask"], cpu_s)
        answer.append(row)
        size += sum(len(piece[0]) for piece in row) if isinstance(row, list) else 0
        if size > _ENOUGH:
            break
    return answer


def _renderer(template: dict[str, Any]) -> Renderer:
    safe = SafeTemplate(template["source"], name=template["name"])
    return Renderer(safe, template["specials"], tuple(template["special_texts"]))


def _laid_out(
    renderer: Renderer, turns: list[list[Any]], where: str, tools: str, ask: bool, cpu_s: float
) -> Any:
    """Pieces as lists of their fields."""
    messages = [_message(*turn) for turn in turns]
    characters = len(tools) + sum(len(message.text) for message in messages)
    lay_out = prompt_pieces if ask else conversation_pieces
    try:
        with _processor_time(cpu_s + characters / _CHARACTERS_PER_S):
            pieces = lay_out(renderer.with_tools(tools), messages, where=where)
    except BadRow as bad:
        return to_message(bad)
    return [[p.text, p.supervised, p.plain, p.first, p.after_special] for p in pieces]


@contextlib.contextmanager
def _processor_time(seconds: float) -> Iterator[None]:
    """The system ends the process by SIGPROF when the block takes longer: it needs no help from what runs."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main()
