"""The data of a recipe as the model will see it: rows in the template, what of them is learned, what is left out."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

import numpy as np

from fitune.data.conversations.answers import thought_of
from fitune.data.conversations.messages import Conversation, Example
from fitune.data.conversations.templates import ChatTemplate, load_template
from fitune.data.dataset import TokenDataset
from fitune.data.examples import examples_of
from fitune.data.ledger import describe_ledger
from fitune.data.making import PreparedData
from fitune.data.packing import pack_rows
from fitune.data.preparing import prepare_data
from fitune.data.reading.rows import BadRow
from fitune.data.tokenising import RowTokeniser
from fitune.errors import DataError, RecipeError
from fitune.models.tokens import tokenizer_with
from fitune.planner.defaults import data_of, with_added_rows, with_usual_row
from fitune.recipe.recipe import Recipe
from fitune.session.events import Emit, Note, emit_notes
from fitune.units import counted
from fitune.values.model.model_config import load_model_spec
from fitune.values.plan import DataPlan
from fitune.values.reports import Ledger

LOOKED_AT = 2_000
"""Rows among which those that are cut or dropped are looked for."""
_BARS = 12
"""Bars of the histogram."""
_SHOWN_TEXT = 300
"""Characters of a row that is left out."""
_HEAD, _TAIL = 1_600, 400
"""Characters of the beginning and the end of each stretch of a row on a terminal; a page and JSON have all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A stretch of a row as text, decoded from its tokens."""

    text: str
    is_learned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRow:
    """One row of the file."""

    where: str
    parts: tuple[Part, ...]
    """The kept stretches; the beginning of its text when nothing is kept."""
    tokens: int
    kept: int
    learned: int
    why_not: str = ""
    """Why nothing is kept."""
    thoughts_left_out: int = 0
    """Answers whose reasoning the template does not write."""
    empty_thoughts: int = 0
    """Answers in front of which it writes an empty thinking block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Rows with ``shortest`` to ``longest`` tokens."""

    shortest: int
    longest: int
    rows: int

    def __str__(self) -> str:
        more = f"–{self.longest:,}" if self.longest > self.shortest else ""
        return f"{self.shortest:,}{more}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownData:
    """The first rows, some that are cut or dropped, the account of all, and how long they are."""

    sources: tuple[str, ...]
    template: str
    seq_len: int
    rows: tuple[ShownRow, ...]
    cut_or_dropped: tuple[ShownRow, ...]
    looked_at: int
    train: Ledger
    held_out: Ledger | None
    lengths: tuple[Bar, ...]
    packs: int
    """0 without packing."""
    notes: tuple[str, ...] = ()
    """Sentences on what the template does to the reasoning of answers."""
    would_stop: str = ""
    """The error that training would stop with; the rows are shown without those that it is about."""


def view_data(recipe: Recipe, *, rows: int, emit: Emit) -> ShownData:
    """Tokenise the data of ``recipe`` as training would, into the same cache, and show ``rows`` rows of it.

    No plan is made: it does not matter whether the model fits anything here. Raises DataError, ModelError, RecipeError.
    """
    if not recipe.data:
        raise RecipeError("no data is named", hint="data: train.jsonl, or --data on the command line")
    model = load_model_spec(recipe.model)
    recipe, spec = with_usual_row(recipe, model), with_added_rows(recipe, model)
    data = data_of(recipe)
    tokenizer = tokenizer_with(recipe.model, tuple(recipe.added_tokens), rows=spec.vocab_size)
    template = load_template(tokenizer, data.chat_template, date=data.chat_template_date)

    def prepared_by(data: DataPlan) -> PreparedData:
        """The tokenised datasets of ``data``, from the cache where it has them. Raises DataError."""
        return prepare_data(
            data,
            tokenizer=tokenizer,
            tokenizer_path=recipe.model,
            seq_len=recipe.seq_len,
            seed=recipe.seed,
            watch=emit,
            on_note=emit_notes(emit),
        )

    # without the policies that stop at a row
    on_long_row = "truncate" if data.on_long_row == "error" else data.on_long_row
    lenient, would_stop = replace(data, on_bad_row="skip", on_long_row=on_long_row), ""
    try:
        prepared = prepared_by(data)
    except DataError as error:  # the view goes on, to show all such rows
        if lenient == data:
            raise
        try:
            prepared = prepared_by(lenient)
        except DataError:
            raise error from None  # no row is left to show, and this one is named
        would_stop = str(error)
        emit(Note(f"training would stop: {would_stop}\n"))
    tokenise = RowTokeniser(lenient, template, seq_len=recipe.seq_len)
    looked_at = list(islice(_looked_at(data, tokenise, template, tokenizer), LOOKED_AT))
    odd = [row for row in looked_at if row.why_not or row.kept < row.tokens]
    return ShownData(
        sources=tuple(source.path for source in data.sources),
        template=template.name,
        seq_len=recipe.seq_len,
        rows=tuple([row for row in looked_at if not row.why_not][:rows]),
        cut_or_dropped=tuple(odd[:rows]),
        looked_at=len(looked_at),
        train=prepared.train_ledger,
        held_out=prepared.eval_ledger,
        lengths=_histogram(prepared.train),
        packs=len(pack_rows(prepared.train.lengths, recipe.seq_len)) if recipe.packing else 0,
        notes=tuple(_notes_on_thinking(looked_at, data)),
        would_stop=would_stop,
    )


def _notes_on_thinking(rows: Sequence[ShownRow], data: DataPlan) -> Iterator[str]:
    among = f"of the first {counted(len(rows), 'row')}"
    if left_out := sum(row.thoughts_left_out for row in rows):
        yield (
            f"{counted(left_out, 'answer')} {among}: the template leaves out the reasoning, as many do in all turns "
            "but the last; it is neither seen nor learned"
        )
    empty = sum(row.empty_thoughts for row in rows)
    if empty and not data.train_on_prompt:  # which learns all there is
        learned = "not learned; train_on_empty_thinking: true teaches the model to answer without thinking"
        if data.train_on_empty_thinking:
            learned = "learned, as train_on_empty_thinking says"
        yield f"{counted(empty, 'answer')} {among}: the template puts an empty thinking block there; it is {learned}"


def _looked_at(
    data: DataPlan, tokenise: RowTokeniser, template: ChatTemplate, tokenizer: Any
) -> Iterator[ShownRow]:
    """The rows of all sources in turn; of those that a reader cannot take apart the place and the reason."""
    for row, example, _ in chain.from_iterable(map(examples_of, data.sources)):
        if isinstance(row, BadRow):
            where, _, why = row.message.partition(": ")
            yield _left_out(where, "", why)
        elif isinstance(example, BadRow):
            yield _left_out(row.where, str(row.fields), example.message.removeprefix(f"{row.where}: "))
        else:
            yield _shown(example, tokenise, template, tokenizer)


def _shown(example: Example, tokenise: RowTokeniser, template: ChatTemplate, tokenizer: Any) -> ShownRow:
    made = tokenise([example])
    (fate,), (laid_out,) = made.fates, template.lay_out_rows([example])
    if not fate.rows or isinstance(laid_out, BadRow):
        return _left_out(example.where, example.text, fate.reason, tokens=fate.tokens)
    whole = "".join(piece.text for piece in laid_out)
    messages = example.messages if isinstance(example, Conversation) else ()
    tokens = zip(made.ids.tolist(), made.supervised.tolist(), strict=True)
    parts = tuple(  # runs of tokens that are all learned or all not
        Part(text=tokenizer.decode([token for token, _ in run]), is_learned=learned)
        for learned, run in groupby(tokens, key=lambda pair: pair[1])
    )
    return ShownRow(
        where=example.where,
        parts=parts,
        tokens=fate.tokens,
        kept=fate.kept,
        learned=fate.supervised,
        thoughts_left_out=sum(m.role == "assistant" and thought_of(m) not in whole for m in messages),
        empty_thoughts=sum(piece.empty_thought for piece in laid_out),
    )


def _left_out(where: str, text: str, why: str, *, tokens: int = 0) -> ShownRow:
    short = text if len(text) <= _SHOWN_TEXT else f"{text[:_SHOWN_TEXT]}…"
    part = Part(text=short, is_learned=False)
    return ShownRow(where=where, parts=(part,), tokens=tokens, kept=0, learned=0, why_not=why)


def _histogram(dataset: TokenDataset) -> tuple[Bar, ...]:
    """At most _BARS bars of equal width, from the shortest row to the longest."""
    lengths = dataset.lengths
    low, high = int(lengths.min()), int(lengths.max())
    width = -(-(high - low + 1) // _BARS)
    edges = np.arange(low, high + 1, width)
    counts = np.bincount((lengths - low) // width, minlength=len(edges))
    return tuple(
        Bar(shortest=int(edge), longest=min(int(edge) + width - 1, high), rows=int(count))
        for edge, count in zip(edges, counts, strict=True)
    )


def explain_data(shown: ShownData) -> str:
    """Text for a terminal: learned text is green, or stands between » and « where standard output is no terminal."""
    colours = sys.stdout.isatty()
    learned = "green" if colours else "between » and «"
    lines = [f"{', '.join(shown.sources)} in {shown.template}; what is learned is {learned}", ""]
    for row in shown.rows:
        lines += [_headline(row), *_body(row, colours), ""]
    if shown.cut_or_dropped:
        lines += [f"Cut or dropped, of the first {counted(shown.looked_at, 'row')}", ""]
        for row in shown.cut_or_dropped:
            lines += [_headline(row), *(_body(row, colours) if row.why_not else []), ""]
    lines += [line for note in shown.notes for line in (note, "")]
    most, wide = max(bar.rows for bar in shown.lengths), max(len(str(bar)) for bar in shown.lengths)
    bars = (f"  {bar!s:>{wide}}  {'█' * -(-40 * bar.rows // most)} {bar.rows:,}" for bar in shown.lengths)
    lines += ["Tokens of a row", *bars, "", describe_ledger(shown.train)]
    if shown.packs:
        lines.append(f"{counted(shown.packs, 'pack')} of at most {shown.seq_len:,} tokens")
    if shown.held_out is not None:
        lines += ["", "held out", describe_ledger(shown.held_out)]
    return "\n".join(lines)


def _headline(row: ShownRow) -> str:
    if row.why_not:
        tokens = f"{row.tokens:,} tokens, " if row.tokens else ""
        return f"{row.where}: {tokens}dropped: {row.why_not}"
    cut = f", {row.kept:,} of {row.tokens:,} kept" if row.kept < row.tokens else ""
    return f"{row.where}: {row.tokens:,} tokens{cut}, {row.learned:,} learned"


def _body(row: ShownRow, colours: bool) -> list[str]:
    on, off = ("\033[32m", "\033[0m") if colours else ("»", "«")
    texts = ((harmless(_shortened(part.text)), part.is_learned) for part in row.parts)
    text = "".join(f"{on}{text}{off}" if is_learned else text for text, is_learned in texts)
    return [f"  {line}" for line in text.splitlines()]


def _shortened(text: str) -> str:
    """The first _HEAD and the last _TAIL characters, and how many are left out between them."""
    left_out = len(text) - _HEAD - _TAIL
    if left_out <= 0:
        return text
    more = f"\n… {left_out:,} characters more; --html FILE or --json shows all …\n"
    return f"{text[:_HEAD]}{more}{text[-_TAIL:]}"


def harmless(text: str) -> str:
    """``text`` without the characters that steer a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def write_data_page(shown: ShownData, path: Path) -> Path:
    """Write the same as a page. Raises RunDirectoryError when the file cannot be written."""
    from fitune.report.page import ledger_table, render, write_page

    most = max(bar.rows for bar in shown.lengths)
    ledgers = [("Training", shown.train), ("Held out", shown.held_out)]
    page = render(
        "data.html",
        title=f"{', '.join(shown.sources)}: fitune data",
        shown=shown,
        rows=[(_headline(row), row.parts) for row in shown.rows],
        odd=[(_headline(row), row.parts if row.why_not else ()) for row in shown.cut_or_dropped],
        bars=[(str(b), b.rows, 100 * b.rows / most) for b in shown.lengths],
        ledgers=[ledger_table(name, one, shown.seq_len) for name, one in ledgers if one is not None],
    )
    return write_page(path, page)
