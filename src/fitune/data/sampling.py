"""The first rows of the data, to guess an epoch from before anything is tokenised. Neither torch nor transformers."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from fitune.data.conversations.messages import Example, Text
from fitune.data.examples import examples_of, kept_parts
from fitune.data.reading.files import HubDataset, locate, sample_size
from fitune.data.reading.rows import BadRow
from fitune.errors import DataError, is_failure
from fitune.files import is_template
from fitune.values.model.block_profile import BatchShape
from fitune.values.named_templates import NAMED_TEMPLATES
from fitune.values.plan import Batch, DataPlan, DataSource
from fitune.values.predictions import Epoch

MOST_ROWS = 4_000
"""Rows of a source that are read."""
MOST_TEXT = 2**22
"""Bytes of text of a source that are read."""
_SHOWN_TO_TOKENIZER = 2**19
"""Bytes of text that the tokenizer counts; it does some MB a second."""
BYTES_PER_TOKEN = 4.0
"""Bytes of a token of English text in UTF-8, where no tokenizer is at hand: 3.5 to 4.5 for those in use."""
TOKENS_PER_MESSAGE = 5
"""Marks of a chat template around a message, as Llama 3 and ChatML have them."""


_Length = tuple[int, int, int]
"""Bytes of text of one example, those of them that are learned, and tokens of the template around them."""


@dataclass(frozen=True, slots=True)
class _Sample:
    """The first rows of one source. ``places``: how many rows of an epoch all of its rows make."""

    lengths: list[_Length]
    texts: list[str]
    places: float
    is_whole: bool
    bad: Counter[str]
    """Reason -> rows that cannot be trained on."""


@dataclass(frozen=True, slots=True)
class RowSample:
    """The first rows of each source of ``data``; ``counted``: in words, where the bytes of a token are from."""

    data: DataPlan
    samples: list[_Sample]
    bytes_per_token: float
    counted: str

    def epoch(self, batch: Batch) -> Epoch:
        """Returns an epoch as these rows let it look. Raises DataError when no row is left."""
        lengths: list[int] = []
        rows = tokens = squares = learned = 0.0
        held_out = self._held_out_share
        for one in self.samples:
            cut = _cut(one.lengths, self.bytes_per_token, self.data, seq_len=batch.seq_len)
            # what each of them stands for: the rows of an example are about equally long
            times = one.places * batch.example_rows * (1 - held_out) / len(one.lengths)
            rows += times * len(cut)
            tokens += times * sum(n for n, _ in cut)
            squares += times * sum(n * n for n, _ in cut)
            learned += times * sum(s for _, s in cut)
            lengths += [n for n, _ in cut]
        if rows < 0.5 or not tokens:
            why = "no row is left to train on"
            if held_out * self._rows > self._rows - 0.5:
                why += f": val_fraction {self.data.val_fraction:g} holds out all {self._rows:,.0f} rows"
            raise DataError(why, hint="check val_fraction, on_long_row and the weights")
        units = rows / batch.example_rows
        if batch.packing:
            from fitune.data.packing import pack_rows  # numpy, which plans without packing do not wait for

            units = rows * (len(pack_rows(lengths, batch.seq_len)) / len(lengths))
        units = max(1.0, units)
        usual = BatchShape.of_average(
            rows=rows,
            tokens=round(tokens),
            squares=squares,
            supervised_tokens=round(learned),
            share=min(1.0, batch.micro_batch_size / units),
        )
        read = sum(len(one.lengths) for one in self.samples)
        how = "" if all(one.is_whole for one in self.samples) else f"from the first {read:,} rows "
        return Epoch(
            rows=round(rows),
            tokens=round(tokens),
            longest_row=max(lengths),
            units=round(units),
            usual=usual,
            guess=f"{how}at {self.counted}",
            bad_rows=dict(sum((one.bad for one in self.samples), Counter[str]()).most_common()),
        )

    @property
    def _rows(self) -> float:
        """Rows of all sources, whatever their weights; a guess where not all were read."""
        weights = (source.weight for source in self.data.sources)
        return sum(one.places / weight for one, weight in zip(self.samples, weights, strict=True))

    @property
    def _held_out_share(self) -> float:
        wanted = self.data.val_fraction
        return wanted if wanted < 1 else min(1.0, wanted / self._rows)

    def mean_row_tokens(self, seq_len: int) -> int:
        """Returns the tokens of an average row, of which none keeps more than ``seq_len``. Raises DataError."""
        one_row = Batch(micro_batch_size=1, accumulation=1, seq_len=seq_len, packing=False)
        return self.epoch(one_row).usual.tokens


def sample_rows(data: DataPlan, *, tokenizer_folder: Path) -> RowSample | None:
    """Returns the first rows of each source; None where a source is not on this machine, or there is none.

    The tokens of a row are bytes of text by the bytes of a token, which the model's tokenizer says where
    ``tokenizer_folder`` has one. Raises DataError when a file is missing, or has no row that can be read.
    """
    require_files(data)
    if not data.sources:
        return None
    samples = []
    for source in data.sources:
        sample = _read(source, train_on_prompt=data.train_on_prompt)
        if sample is None:
            return None
        samples.append(sample)
    return RowSample(
        data, samples, *bytes_per_token([text for one in samples for text in one.texts], tokenizer_folder)
    )


def require_files(data: DataPlan) -> None:
    """Raises DataError for a file or folder of the data, or a chat template, that is not there; what lies elsewhere is
    not looked at."""
    template = data.chat_template
    is_file = template and template not in NAMED_TEMPLATES and not is_template(template)
    if is_file and not Path(template).expanduser().exists():
        raise DataError(
            f"chat_template {template!r}: no such file",
            hint=f"a Jinja file, its text or {', '.join(NAMED_TEMPLATES)}; without it the tokenizer's own is taken",
        )
    for source in (*data.sources, *data.eval_sources):
        _files_of(source)


def _read(source: DataSource, *, train_on_prompt: bool) -> _Sample | None:
    path, wanted = sample_size(source)
    files = _files_of(source)
    if files is None:
        return None
    lengths: list[_Length] = []
    texts: list[str] = []
    bad: Counter[str] = Counter()
    told = rows_when_told = size = 0
    first: BadRow | None = None

    def on_bytes(count: int) -> None:
        """Adds ``count`` to the bytes read, and notes the number of rows so far."""
        nonlocal told, rows_when_told
        told, rows_when_told = told + count, len(lengths)

    read, is_whole = examples_of(replace(source, path=path, sample=0), on_bytes=on_bytes), True
    for _, example, _ in read:
        if isinstance(example, BadRow):
            bad[example.reason] += 1
            first = first or example
            continue
        lengths.append(_length(example, train_on_prompt=train_on_prompt))
        texts.append(example.text)
        size += lengths[-1][0]
        if len(lengths) == MOST_ROWS or size > MOST_TEXT:
            is_whole = next(read, None) is None
            break
    if not lengths:
        cause = f", from the first: {first.message}" if first else ""
        hint = first.hint if first else "is it the right file and split?"
        raise DataError(f"{path}: no row that can be trained on{cause}", hint=hint)
    rows = float(len(lengths))
    if not is_whole and rows_when_told:
        rows = max(rows, rows_when_told * sum(Path(name).stat().st_size for name in files) / told)
    return _Sample(lengths, texts, (min(wanted, rows) if wanted else rows) * source.weight, is_whole, bad)


def _files_of(source: DataSource) -> tuple[str, ...] | None:
    """Files on this machine; None for what lies elsewhere. Raises DataError when nothing is there."""
    path, _ = sample_size(source)
    if "://" in path:
        return None
    place = locate(source)
    return None if isinstance(place, HubDataset) else place


def _length(example: Example, *, train_on_prompt: bool) -> _Length:
    if isinstance(example, Text):
        size = len(example.text.encode())
        return size, size, 1
    sizes = [(m.role, len(f"{m.thought}{m.text}".encode())) for m in example.messages]
    text = len(example.tools.encode()) + sum(size for _, size in sizes)
    learned = sum(size for role, size in sizes if train_on_prompt or role == "assistant")
    return text, learned, 1 + TOKENS_PER_MESSAGE * len(sizes)


def _cut(
    lengths: Sequence[_Length], per_token: float, data: DataPlan, *, seq_len: int
) -> list[tuple[int, int]]:
    """(tokens, learned tokens) of each row after ``on_long_row``."""
    rows = []
    for text, learned, marks in lengths:
        tokens = max(2, round(text / per_token) + marks)
        share = learned / text if text else 0.0
        kept = [end - begin for begin, end in kept_parts(tokens, data, seq_len=seq_len)]
        rows += [(n, round(n * share)) for n in kept]
    return rows


def bytes_per_token(all_texts: Sequence[str], folder: Path) -> tuple[float, str]:
    """Bytes of a token, and in words where that is from."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return BYTES_PER_TOKEN, f"{BYTES_PER_TOKEN:g} bytes a token (the tokenizer is not on this machine)"
    from tokenizers import Tokenizer

    shown, size = [], 0
    for text in islice(all_texts, 0, None, max(1, len(all_texts) // 500)):  # from all over them
        shown.append(text[:_SHOWN_TO_TOKENIZER])
        size += len(shown[-1])
        if size > _SHOWN_TO_TOKENIZER:
            break
    try:
        tokenizer = Tokenizer.from_file(str(file))
        tokenizer.no_truncation()  # as rows are encoded, whatever the file was saved with
        tokenizer.no_padding()
        encoded = tokenizer.encode_batch(shown, add_special_tokens=False)
    except BaseException as error:
        if not is_failure(error):
            raise
        return BYTES_PER_TOKEN, f"{BYTES_PER_TOKEN:g} bytes a token (tokenizer.json cannot be read)"
    tokens, size = sum(len(each) for each in encoded), sum(len(text.encode()) for text in shown)
    return size / max(1, tokens), f"{size / max(1, tokens):.1f} bytes a token"
