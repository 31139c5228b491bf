"""Batches of examples over all cores, in their order: the same rows whatever the number of processes."""

import os
import pickle
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from fitune.data.children import Beat, Child, ChildEnded, requests
from fitune.data.formats import Conversation, Example, Message, Text
from fitune.data.tokenising import MAX_TEXT, RowTokeniser, TokenRows, from_bytes, to_bytes
from fitune.errors import DataError
from fitune.spec.plan import DataPlan

_WORTH_A_START = 2**21
"""Characters that are tokenised here before other processes are started: about as long as a start takes."""
_AHEAD = 3
"""Batches that are on their way to each process: none waits for work, and memory stays bounded."""
_MAX_WORKERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All that the tokens of an example depend on."""

    data: DataPlan
    tokenizer: Any
    template: str
    """Jinja text; ``template_name`` is for messages."""
    template_name: str
    seq_len: int


def tokenised(
    batches: Iterator[list[Example]], job: Job, local: RowTokeniser, *, beat: Beat, workers: int | None = None
) -> Iterator[TokenRows]:
    """The rows of every batch, in order. A small dataset is tokenised here, the rest of a large one in ``workers``
    processes, by default one for each core. ``beat`` is called several times a second, and may raise to stop.

    An error of ``batches`` is raised after the rows before it: the first bad row is named, however many processes.
    """
    here = 0
    for batch in batches:
        size = sum(map(text_size, batch))
        if here + size > _WORTH_A_START or size > MAX_TEXT:
            yield from _by_workers(batch, batches, job, beat=beat, count=workers or _cores())
            return
        beat()
        here += size
        yield local(batch)


def text_size(example: Example) -> int:
    """Characters of its content."""
    return len(example.text) if isinstance(example, Text) else sum(len(m.content) for m in example.messages)


def _cores() -> int:
    return min(len(os.sched_getaffinity(0)), _MAX_WORKERS)


def _by_workers(
    first: list[Example], rest: Iterator[list[Example]], job: Job, *, beat: Beat, count: int
) -> Iterator[TokenRows]:
    started = [Child("fitune.data.workers", beat=beat) for _ in range(count)]
    waiting: deque[tuple[Child, list[Example]]] = deque()
    failed: DataError | None = None
    try:
        setup = pickle.dumps(job)
        for child in started:
            child.send(setup)
        turns = cycle(started)
        batch: list[Example] | None = first
        while batch is not None:
            child = next(turns)
            _send(child, batch)
            waiting.append((child, batch))
            if len(waiting) >= _AHEAD * count:
                yield _answer(*waiting.popleft())
            beat()
            try:
                batch = next(rest, None)
            except DataError as error:
                failed, batch = error, None
        while waiting:
            yield _answer(*waiting.popleft())
    finally:
        for child in started:
            child.close()
    if failed is not None:
        raise failed


def _send(child: Child, batch: list[Example]) -> None:
    try:
        child.send(pickle.dumps([_plain(example) for example in batch]))
    except ChildEnded as ended:
        raise _lost(batch, ended) from None


def _answer(child: Child, batch: list[Example]) -> TokenRows:
    try:
        head, ids, supervised, lengths = (child.receive() for _ in range(4))
    except ChildEnded as ended:
        raise _lost(batch, ended) from None
    return from_bytes(head, ids, supervised, lengths)


def _lost(batch: Sequence[Example], ended: ChildEnded) -> DataError:
    return DataError(
        f"a process that tokenises ended with {ended.how} at {batch[0].where} or in the {len(batch) - 1} rows after it",
        hint="was memory short? leave out rows of many megabytes, or start anew with more memory",
    )


def _plain(example: Example) -> tuple[str, str | list[tuple[str, str]]]:
    """Tuples of text go to another process in a tenth of the time that objects take."""
    if isinstance(example, Text):
        return example.where, example.text
    return example.where, [(message.role, message.content) for message in example.messages]


def _example(where: str, content: str | list[tuple[Any, str]]) -> Example:
    if isinstance(content, str):
        return Text(content, where)
    return Conversation(tuple(Message(role, text) for role, text in content), where)


def main() -> None:
    """In the other process: the job comes first, then batches."""
    from fitune.data.templates import ChatTemplate

    messages = requests(sys.argv)
    _, setup = next(messages)
    job: Job = pickle.loads(setup)
    template = ChatTemplate(job.tokenizer, job.template, name=job.template_name)
    tokenise = RowTokeniser(job.data, template, seq_len=job.seq_len)
    for connection, message in messages:
        for part in to_bytes(tokenise([_example(*plain) for plain in pickle.loads(message)])):
            connection.send_bytes(part)


if __name__ == "__main__":
    main()
