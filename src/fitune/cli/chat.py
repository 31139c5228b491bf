"""A conversation on a terminal, or line by line through a pipe."""

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from typing import Any

from fitune.errors import ScoringFailed
from fitune.session.data_view import harmless
from fitune.session.score.chat import Chat, Reply, converse, side_by_side
from fitune.session.signals import keyboard_interrupts, typed_line

_WIDE = 100
"""Columns of a terminal from which two answers stand beside each other."""


class ChatScreen:
    """A ``Screen``. Answers go to standard output, notes to standard error; ``as_json``: one object for each turn."""

    def __init__(self, titles: Sequence[str], *, as_json: bool) -> None:
        from rich.console import Console

        self._titles, self._json, self._console = titles, as_json, Console(highlight=False)
        self._is_live = not as_json and self._console.is_terminal
        self._columns = self._is_live and len(titles) > 1 and self._console.width >= _WIDE
        self._texts: list[str] = []
        self._live: Any = None
        self._open = ExitStack()

    def note(self, text: str) -> None:
        """Prints the remark to standard error, without characters that steer a terminal."""
        print(harmless(text), file=sys.stderr)

    def piece(self, place: int, text: str) -> None:
        """Show the next text of the answer of model ``place``, its title before the first."""
        is_first = place >= len(self._texts)
        self._texts += [""] * (place + 1 - len(self._texts))
        self._texts[place] += text
        if self._columns:
            self._draw()
        elif not self._json:
            print(f"── {self._titles[place]}\n" if is_first and len(self._titles) > 1 else "", end="")
            print(harmless(text) if self._is_live else text, end="", flush=True)

    def answered(self, place: int, reply: Reply) -> None:
        """End the answer of model ``place``: how long it took, or why there is none or no more of it."""
        is_below = not (self._json or self._columns)
        if is_below and (not reply.error or place < len(self._texts)):
            print(flush=True)
        if reply.error and not self._json:
            self.note(f"{reply.model}: {reply.error}")
        elif is_below and self._is_live:
            self._console.print(f"[{reply.words}]", style="dim", markup=False)

    def turn(self, question: str, replies: Sequence[Reply]) -> None:
        """Ends the turn: prints its JSON object, or the whole columns with tokens and speed below each."""
        if self._json:
            answers = [asdict(reply) for reply in replies]
            print(json.dumps({"question": question, "answers": answers}, ensure_ascii=False), flush=True)
        self._open.close()  # what was drawn while it grew goes
        if self._columns and replies:
            print(self._beside([f"[{reply.words}]" for reply in replies]))
        self._texts, self._live = [], None

    def _draw(self) -> None:
        from rich.live import Live
        from rich.text import Text

        if self._live is None:
            live = Live(console=self._console, transient=True, refresh_per_second=8)
            self._live = self._open.enter_context(live)
        self._live.update(Text(self._beside([], most_lines=self._console.height - 3), no_wrap=True))

    def _beside(self, notes: Sequence[str], *, most_lines: int = 0) -> str:
        texts = [harmless(text) for text in self._texts]
        width = self._console.width
        return side_by_side(self._titles, texts, notes, width=width, most_lines=most_lines)


def talk(chat: Chat, *, as_json: bool) -> None:
    """Answer questions from standard input until it ends. Raises ScoringFailed for a pipe's that have no answer."""
    screen = ChatScreen(chat.titles, as_json=as_json)
    for note in chat.notes:
        screen.note(note)
    is_person = sys.stdin.isatty()
    with keyboard_interrupts() if is_person else nullcontext():
        unanswered = converse(chat, read=read_line, screen=screen)
    if unanswered and not is_person:
        raise ScoringFailed(f"questions without an answer: {unanswered}", hint="see what is said above")


def read_line() -> str | None:
    """The next line; None at the end."""
    try:
        return typed_line("> ") if sys.stdin.isatty() else next(sys.stdin)
    except StopIteration:
        return None
    except EOFError:  # Ctrl-D: what the shell prints begins a line
        print()
        return None
