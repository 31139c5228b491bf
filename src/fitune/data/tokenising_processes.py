"""Batches are tokenised in this process, and those of a large dataset in one process for each core.

The rows are the same, and in the same order, whatever the number of processes.
"""

import os
import pickle
import sys
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from fitune.child import Beat, Child, ChildEnded, requests
from fitune.data.conversations.messages import Example
from fitune.data.conversations.templates import ChatTemplate
from fitune.data.tokenising import MOST_TEXT_AT_ONCE, RowTokeniser, TokenRows, text_size
from fitune.errors import DataError
from fitune.spec.plan import DataPlan

_WORTH_A_START = 2**21
"""Characters that are tokenised here before other processes are started: about as long as a start takes."""
_AHEAD = 3
"""Batches that are on their way to each process: none waits for work, and memory stays bounded."""
_MOST_PROCESSES = 16


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
    batches: Iterator[list[Example]], job: Job, local: RowTokeniser, *, beat: Beat
) -> Generator[TokenRows, None, None]:
    """The rows of every batch, in order. A small dataset is tokenised here, the rest of a large one in one
    process for each core. ``beat`` is called several times a second, and may raise to stop.

    An error of ``batches`` is raised after the rows before it: the first bad row is named, however many processes.
    """
    here = 0
    for batch in batches:
        size = sum(map(text_size, batch))
        if here + size > _WORTH_A_START or size > MOST_TEXT_AT_ONCE:
            yield from _by_processes(batch, batches, job, beat=beat, count=_cores())
            return
        beat()
        here += size
        yield local(batch)


def _cores() -> int:
    return min(len(os.sched_getaffinity(0)), _MOST_PROCESSES)


def _by_processes(
    first: list[Example], rest: Iterator[list[Example]], job: Job, *, beat: Beat, count: int
) -> Iterator[TokenRows]:
    started = [Child("fitune.data.tokenising_processes", beat=beat) for _ in range(count)]
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
            waiting.append((child, batch))
            try:
                child.send(pickle.dumps(batch))  # whole examples: what a row has beside text is not lost
            except ChildEnded as ended:
                unanswered = next(each for owner, each in waiting if owner is child)
                raise _lost(unanswered, ended) from None
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


def _answer(child: Child, batch: list[Example]) -> TokenRows:
    try:
        rows: TokenRows = pickle.loads(child.receive())
        return rows
    except ChildEnded as ended:
        raise _lost(batch, ended) from None


def _lost(batch: Sequence[Example], ended: ChildEnded) -> DataError:
    return DataError(
        f"a process that tokenises ended with {ended.how} at {batch[0].where} or in the {len(batch) - 1} rows after it",
        hint="was memory short? leave out rows of many megabytes, or start anew with more memory",
    )


def main() -> None:
    """Main function of the other process: receives the job, then batches."""
    messages = requests(sys.argv)
    _, setup = next(messages)
    job: Job = pickle.loads(setup)
    template = ChatTemplate(job.tokenizer, job.template, name=job.template_name)
    tokenise = RowTokeniser(job.data, template, seq_len=job.seq_len)
    for connection, message in messages:
        connection.send_bytes(pickle.dumps(tokenise(pickle.loads(message))))


if __name__ == "__main__":
    main()
