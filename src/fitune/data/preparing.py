"""From the sources of a plan to the datasets that training reads: tokenised once, then taken from the cache.

In a store the cache is one of several machines: an entry is fetched into the cache of this one, or sent from there. Its
manifest is sent last, so one that is half there does not count, and what a kill interrupted is sent without the files
that are there already. What is fetched is compared with its hashes like every entry.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fitune.data import cache
from fitune.data.conversations.messages import Conversation
from fitune.data.conversations.templates import load_template
from fitune.data.dataset import Facts, TokenDataset
from fitune.data.ledger import Progress, Watch, ignore_reading
from fitune.data.making import Making, PreparedData
from fitune.data.reading.files import sample_size
from fitune.data.reading.sources import content_key
from fitune.data.tokenising import RowTokeniser
from fitune.errors import DataError, FituneError, StoreError
from fitune.stores.opening import is_url
from fitune.stores.writing import Store
from fitune.units import format_bytes
from fitune.values.plan import DataPlan, DataSource
from fitune.values.reports import Ledger
from fitune.values.serial import from_data, to_data


class Contents(NamedTuple):
    """A hash of every source's content, those for evaluation last, and the bytes that they have."""

    keys: tuple[str, ...]
    size: int


def contents_of(data: DataPlan, *, watch: Watch = ignore_reading) -> Contents:
    """Reads every source once. ``watch`` may raise to stop. Raises DataError for a source that is not there."""
    find = Progress(watch, doing="checking")
    keys = [content_key(source, on_bytes=find) for source in (*data.sources, *data.eval_sources)]
    return Contents(tuple(keys), find.so_far.bytes_read)


def prepare_data(
    data: DataPlan,
    *,
    tokenizer: Any,
    tokenizer_path: str,
    seq_len: int,
    seed: int,
    contents: Contents | None = None,
    watch: Watch = ignore_reading,
    on_note: Callable[[str], None] = lambda _note: None,
    sends: bool = True,
) -> PreparedData:
    """Read, check, split, tokenise and cut the data, or take it from the cache when nothing changed.

    ``val_fraction`` holds rows out by a hash of their content and ``seed``: of a share a row stays on its side when
    others are added, and equal rows are on the same side: a number of rows is exceeded by those that equal the last of
    them. A source's ``weight`` w gives its n-th row ⌊(n+1)·w⌋ − ⌊n·w⌋ places
    in the training set: 2 repeats every row, 0.5 takes every other one. Held-out rows have one place each.

    ``contents``: as ``contents_of`` found them, for callers that know them already.
    ``sends`` False leaves it to another process to send what it made to a ``cache_dir`` that is a URL.
    ``watch`` is called several times a second and may raise to stop: nothing half-made is left then.
    Raises DataError when nothing is left to train on or to evaluate, with the counts of why.
    """
    if data.val_fraction and data.eval_sources:
        raise DataError(
            f"both eval_data and val_fraction {data.val_fraction} are set", hint="keep one of them"
        )
    if not data.sources:
        raise DataError("data: no source is named", hint="data: path/to/train.jsonl")
    template = load_template(tokenizer, data.chat_template, date=data.chat_template_date)
    for source in data.eval_sources:
        if source.weight != 1:  # every held-out row counts once: a weight there would have to be ignored
            raise DataError(
                f"eval_data {source.path}: weight {source.weight:g} is not used, every row is evaluated once",
                hint=f"leave the weight out; {source.path}#500 evaluates 500 rows",
            )
    contents = contents or contents_of(data, watch=watch)
    progress = Progress(watch, in_all=contents.size)
    count = len(data.sources)
    trained, evaluated = contents.keys[:count], contents.keys[count:]
    also_trained = tuple(
        source.path for source, key in zip(data.eval_sources, evaluated, strict=True) if key in trained
    )
    entry = cache.folder_of(data.cache_dir) / cache.key_of(
        _settings(data, contents, seq_len=seq_len, seed=seed), tokenizer=tokenizer, template=template.source
    )
    with shared_cache(data.cache_dir, beat=progress, on_note=on_note) as shared:
        if shared is not None and sends:
            shared.require_ready(entry)
        prepared = _from_cache(entry, progress, on_note)
        if prepared is None and shared is not None and shared.fetch(entry):
            prepared = _from_cache(entry, progress, on_note)
        if prepared is None:
            tokenise = RowTokeniser(data, template, seq_len=seq_len)
            with cache.making(entry) as folder:
                prepared = Making(data, folder, tokenise, progress).run(seed)
                _publish(prepared, folder, entry, tokenizer_path, progress)
        if shared is not None and sends:
            shared.send(entry)
    progress(doing="done")
    return replace(prepared, also_trained=also_trained, contents=contents.keys)


def _settings(data: DataPlan, contents: Contents, *, seq_len: int, seed: int) -> dict[str, Any]:
    """All that tokens depend on beside tokenizer and template: every setting but paths and ways of download."""

    def read_alike(sources: tuple[DataSource, ...]) -> tuple[DataSource, ...]:
        """The sources without path, split and ways of download; ``sample`` and ``columns`` in one form."""
        return tuple(
            replace(
                each, path="", split="", sample=sample_size(each)[1], columns=tuple(sorted(each.columns)),
                allow_https=False, allow_private_addresses=False, streaming=False,
            )
            for each in sources
        )  # fmt: skip

    alike = replace(
        data, sources=read_alike(data.sources), eval_sources=read_alike(data.eval_sources), cache_dir="",
        chat_template="",
    )  # fmt: skip
    return {
        "data": to_data(alike), "contents": contents.keys, "seq_len": seq_len,
        "seed": seed if data.val_fraction else None,
    }  # fmt: skip


def _publish(
    prepared: PreparedData, folder: Path, entry: Path, tokenizer_path: str, progress: Progress
) -> None:
    content = {
        "tokenizer": tokenizer_path,
        "train_ledger": to_data(prepared.train_ledger),
        "train_facts": to_data(prepared.train.facts),
        "eval_ledger": to_data(prepared.eval_ledger),
        "eval_facts": prepared.eval and to_data(prepared.eval.facts),
        "eval_examples": to_data(prepared.eval_examples),
    }
    with cache.writing(entry.parent):
        cache.publish(folder, entry, content, beat=progress)


def _from_cache(entry: Path, progress: Progress, on_note: Callable[[str], None]) -> PreparedData | None:
    """Read what ``_publish`` wrote and compare it with its hashes; None when it is not there, or damaged."""
    try:
        content = cache.read_entry(entry, beat=progress)
        if content is None:
            return None
        found: dict[str, Any] = {}
        for part in ("train", "eval"):
            ledger, facts = content[f"{part}_ledger"], content[f"{part}_facts"]
            found[part] = ledger and TokenDataset.load(entry / part, from_data(Facts, facts))
            found[f"{part}_ledger"] = ledger and from_data(Ledger, ledger)
        examples = [from_data(Conversation, item) for item in content["eval_examples"]]
        return PreparedData(**found, eval_examples=examples)
    except (OSError, ValueError, KeyError):  # removed by another process since it was compared
        return None
    except cache.Damaged as damaged:
        on_note(f"the tokenised data in {entry} is damaged ({damaged}): it is made again")
        return None


T = TypeVar("T")

_BEAT_S = 0.2


class SharedCache:
    """The entries in ``tokens`` below a URL. ``beat`` is called several times a second and may raise to stop."""

    def __init__(self, store: Store, *, beat: Callable[[], None], on_note: Callable[[str], None]) -> None:
        self._store, self._beat, self._on_note = store, beat, on_note
        self._stopped, self._is_damaged = threading.Event(), False

    def require_ready(self, entry: Path) -> None:
        """Raises StoreError where the store has no such entry and does not take one: known before it is made here."""
        if not self._has(entry):
            self._ask(self._store.require_writable)

    def fetch(self, entry: Path) -> bool:
        """Bring the entry into the cache of this machine; False where the store has none that is whole.

        Raises StoreError where the store cannot be asked, DataError when the cache here cannot be written.
        """
        if not self._has(entry):
            return False
        with cache.making(entry) as folder, cache.writing(entry.parent):
            try:
                self._beside(lambda: self._store.get_folder(_name(entry), folder, stop=self._stopped.is_set))
                content = cache.read_entry(folder)
                cache.publish(folder, entry, content or {}, beat=self._beat)
            except cache.Damaged as damaged:
                self._is_damaged, why = True, f"is damaged ({damaged})"
            except FituneError as error:
                why = f"cannot be fetched: {error.message}"
            else:
                self._on_note(f"the tokenised data is fetched from {self._store.below(_name(entry))}")
                return True
        self._on_note(f"the tokenised data in {self._store.below(_name(entry))} {why}: it is made here")
        return False

    def send(self, entry: Path) -> None:
        """Let the store hold the entry. One that fails on the way costs other machines their time: it is noted."""
        url = self._store.below(_name(entry))
        try:
            if self._has(entry) and not self._is_damaged:
                return
            files = [str(file.relative_to(entry)) for file in sorted(entry.rglob("*")) if file.is_file()]
            sent = self._beside(
                lambda: self._store.put_folder(
                    entry, _name(entry), files, last=cache.MANIFEST, stop=self._stopped.is_set
                )
            )
            self._on_note(f"the tokenised data is in {url} now ({format_bytes(sent)} sent)")
        except FituneError as error:
            self._on_note(
                f"the tokenised data is not in {url}: {error.message}; the run goes on with that of this machine"
            )
        except OSError as error:  # another process has just made the entry anew
            self._on_note(f"the tokenised data is not in {url}: {error.strerror or error}")

    def _has(self, entry: Path) -> bool:
        return cache.MANIFEST in self._ask(partial(self._store.infos, _name(entry)))

    @staticmethod
    def _ask(question: Callable[[], T]) -> T:
        try:
            return question()
        except StoreError as error:
            raise StoreError(f"cache_dir: {error.message}", hint=error.hint) from error

    def _beside(self, action: Callable[[], T]) -> T:
        """The result of ``action``, which runs in a thread while this one beats; it is stopped when a beat raises."""
        with ThreadPoolExecutor(1) as one:
            work = one.submit(action)
            try:
                while not wait([work], timeout=_BEAT_S).done:
                    self._beat()
            except BaseException:
                self._stopped.set()
                raise
            return work.result()


@contextmanager
def shared_cache(
    cache_dir: str, *, beat: Callable[[], None], on_note: Callable[[str], None]
) -> Iterator[SharedCache | None]:
    """The cache at the URL ``cache_dir``; None where it is a folder. Raises StoreError for a URL that is not opened."""
    if not is_url(cache_dir):
        yield None
        return
    store = Store(cache_dir)
    try:
        yield SharedCache(store, beat=beat, on_note=on_note)
    finally:
        store.close()


def _name(entry: Path) -> str:
    return f"{cache.TOKENS}/{entry.name}"
