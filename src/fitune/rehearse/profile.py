"""A traced profile: the blocks of any architecture, traced as training builds them and fitted as polynomials in tokens.

One step of a model with one block of each kind is recorded on fake tensors at three lengths of rows. The same storages
begin and end in the same order at each length, so every storage's size is fitted by itself, and any moment's bytes are
a sum of polynomials. Where the order depends on the length (loops over chunks), whole moments are fitted instead.

Bytes are those of micro-batches after the first too: gradients exist then, and fresh ones are added to them.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from transformers import PretrainedConfig

from fitune.errors import FituneError, ModelError, first_line, is_failure
from fitune.models.readers import model_config, text_config
from fitune.rehearse.block_accounts import Account, Numbers, Work, account_of
from fitune.rehearse.shapes import read_shapes
from fitune.values.counts import untouched_blocks
from fitune.values.model.block_profile import Moment, Size, TracedBlock, TracedPass, TracedStep
from fitune.values.model.model_spec import ModelSpec
from fitune.values.model.tracing import LENGTHS, Way
from fitune.values.plan import Plan, Recompute, trains_embeddings
from fitune.values.predictions import Phase

_LONGEST = len(LENGTHS) - 1
"""Place of the longest row among those that are traced."""
_NO_SQUARE = 1e-6
"""Share of a size below which a square term is rounding."""


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Fit:
    """The accounts of three lengths of rows, and what turns three values into a polynomial."""

    accounts: Sequence[Account]
    tokens: Sequence[int]
    rows: int
    chunk: int
    """Tokens to whose multiples mixers lengthen rows; 0 where they do not."""
    copies: bool
    """Rows that are lengthened are copied whole."""

    def size(self, of: Callable[[Account], float]) -> Size:
        """Polynomial in the tokens of a row for one number of each account."""
        return self._fit([of(account) for account in self.accounts])

    def sizes(self, of: Callable[[Account], Sequence[int]]) -> tuple[Size, ...]:
        """The sizes of which the largest decides; one where the order of events depends on the length."""
        found = self._aligned([of(account) or [0] for account in self.accounts], lambda value: value)
        return _largest([self._fit(values) for values in zip(*found, strict=True)], lambda size: size)

    def moments(self, of: Callable[[Account], Sequence[Numbers]]) -> tuple[Moment, ...]:
        """Largest moments, each number of which is a polynomial in the tokens of a row."""
        found = self._aligned([of(account) or [(0, 0, 0)] for account in self.accounts], sum)
        return _largest([self._moment(values) for values in zip(*found, strict=True)], lambda m: m.total)

    def _aligned(self, found: list[Sequence[T]], size: Callable[[T], float]) -> list[Sequence[T]]:
        """As many values for each length. Where they differ in number: the largest, and where mixers loop over tokens
        those before and behind too, which come in one order at every length; gradients of weights outweigh a short
        row's loop."""
        if len(set(map(len, found))) == 1:
            return found
        ends = min(map(len, found)) // 8 if self.chunk == 1 else 0
        return [[*v[:ends], max(v[ends : len(v) - ends], key=size), *v[len(v) - ends :]] for v in found]

    def passed(self, direction: Phase, block: int) -> TracedPass:
        """FLOPs, bytes and kernels of one block in one direction; kernels are those of the longest row."""

        def every(account: Account) -> list[Work]:
            """Operations of the block in this direction; empty where it has none."""
            return account.work.get((direction.value, block), [])

        longest = every(self.accounts[_LONGEST])
        return TracedPass(
            flops=self.size(lambda a: sum(w.flops for w in every(a))),
            bytes=self.size(lambda a: sum(w.bytes for w in every(a))),
            products=sum(w.is_product for w in longest),
            operations=sum(not w.is_product and w.heads is None for w in longest),
        )

    def heads(self, block: int) -> list[tuple[int, int]]:
        """Number and size of heads of each fused attention of one row (or of all rows at once)."""
        works = self.accounts[_LONGEST].work.get((Phase.FORWARD.value, block), [])
        found = [w.heads for w in works if w.heads is not None]
        return found[:: self.rows] if len(found) % self.rows == 0 else found

    def _fit(self, values: Sequence[float]) -> Size:
        """The polynomial through three values, whose tokens are as 1 : 2 : 4; squares are of rows.

        With chunks, two more values are of rows that are no whole number of them.
        """
        one, two, four, *cut = values
        first = self.tokens[0]
        square = ((four - two) - 2 * (two - one)) / (6 * first * first)
        if abs(square) * (LENGTHS[-1] * first) ** 2 < _NO_SQUARE * max(1.0, abs(four)):
            square = 0.0
        token = (four - two) / (2 * first) - 6 * square * first
        size = Size(
            constant=one - token * first - square * first * first,
            per_token=token,
            per_square=square * self.rows,
        )
        return self._with_padding(size, cut) if cut else size

    def _with_padding(self, size: Size, cut: Sequence[float]) -> Size:
        """``size`` with what grows by whole chunks, from two rows that are no whole number of them."""
        tokens = self.tokens[-len(cut) :]
        padding = [-n % self.chunk for n in tokens]
        squares = [(n + more) ** 2 - n * n for n, more in zip(tokens, padding, strict=True)]
        beyond = [
            value - (size.constant + size.per_token * n + size.per_square * n * n)
            for value, n in zip(cut, tokens, strict=True)
        ]
        nothing = _NO_SQUARE * max(1.0, *map(abs, cut))
        if max(map(abs, beyond)) < nothing:
            return size
        if self.copies:
            token = (beyond[1] - beyond[0]) / (tokens[1] - tokens[0])  # their paddings are equal
            left = (beyond[0] - token * tokens[0]) / padding[0]
            return replace(size, per_padding=round(left, 6), per_padded_token=round(token, 6))
        square = (beyond[1] - beyond[0]) / (squares[1] - squares[0])
        if abs(square) * squares[1] < nothing:
            square = 0.0
        per_padding = (beyond[0] - square * squares[0]) / padding[0]
        return replace(size, per_padding=round(per_padding, 6), per_padding_square=round(square, 9))

    def _moment(self, values: Sequence[Numbers]) -> Moment:
        """Gradients of weights do not grow with tokens; where moments are aligned, a short row's may be another's."""
        gradients = values[_LONGEST][1]
        kept = self._fit([v[0] for v in values])
        return Moment(
            kept=kept, gradients=gradients, temporaries=self._fit([v[1] + v[2] - gradients for v in values])
        )


def _largest(items: Sequence[T], size: Callable[[T], Size]) -> tuple[T, ...]:
    """The items that no other exceeds for every micro-batch."""
    kept: list[T] = []
    for item in items:
        if any(size(other).exceeds(size(item)) for other in kept):
            continue
        kept = [other for other in kept if not size(item).exceeds(size(other))]
        kept.append(item)
    return tuple(kept)


def trace_profile(plan: Plan, config: PretrainedConfig, *, first: int, rows: int) -> TracedStep:
    """The profile of one way of training; ``first`` is the shortest of three lengths of ``rows`` rows."""
    model = plan.model
    # The block at which backward ends comes first: a gradient enters all others, those without adapters too.
    end = untouched_blocks(model, plan.tuning)
    chosen = list(dict.fromkeys([end, *(_example(model, kind, end) for kind in range(len(model.kinds)))]))
    places = [chosen.index(_example(model, kind, end)) for kind in range(len(model.kinds))]
    keeping, again = (
        _fit_of(replace(plan, recompute=Recompute(blocks=blocks)), config, chosen, first=first, rows=rows)
        for blocks in (0, len(chosen))
    )
    blocks = tuple(_block(keeping, again, place) for place in places)
    enters = trains_embeddings(plan.tuning)
    around, around_recomputed = (fit.size(lambda a: a.around) for fit in (keeping, again))
    return TracedStep(
        blocks=blocks,
        first=None if enters else _block(keeping, again, 0),
        around=around,
        around_forward=keeping.size(lambda a: a.around_forward),
        final_norm_kept=keeping.size(lambda a: a.final_kept),
        final_norm_forward=_one(keeping.sizes(lambda a: a.final_forward)),
        final_norm_backward=_one(keeping.sizes(lambda a: a.final_backward)),
        squares_stream=model.masks_whole_stream,
        around_recomputed=None if around_recomputed == around else around_recomputed,
        chunk=_chunk(model, first),
    )


def _example(model: ModelSpec, kind: int, end: int) -> int:
    """A block of that kind, another than the one at which backward ends where there is one."""
    numbers = [index for index, its in enumerate(model.kind_of) if its == kind]
    return next((index for index in numbers if index != end), end)


def _one(sizes: Sequence[Size]) -> Size:
    """The largest per token: that of a norm has no other term that matters."""
    return max(sizes, key=lambda size: size.per_token)


def _fit_of(plan: Plan, config: PretrainedConfig, chosen: Sequence[int], *, first: int, rows: int) -> _Fit:
    chunk = _chunk(plan.model, first)
    lengths = [first * times for times in LENGTHS]
    if chunk > 1:
        lengths += [first + chunk // 2, 2 * first + chunk // 2]
    shallow = replace(plan, model=replace(plan.model, num_layers=len(chosen)))
    accounts = [account_of(shallow, config, chosen, (n,) * rows) for n in lengths]
    return _Fit(
        accounts,
        [n * rows for n in lengths],
        1 if plan.model.masks_whole_stream else rows,
        chunk,
        copies=plan.model.has_delta_rule,
    )


def _chunk(model: ModelSpec, first: int) -> int:
    """Tokens of a chunk to which rows are padded; 0 where none is longer: the padded length is the same then."""
    return 0 if model.chunk > 1 and first * LENGTHS[-1] <= model.chunk else model.chunk


def _block(keeping: _Fit, again: _Fit, block: int) -> TracedBlock:
    turns = {turn for turn, _ in keeping.accounts[0].backward}
    adding = max(turns)
    heads, longest = keeping.heads(block), again.accounts[_LONGEST]
    is_small = longest.kept[block] - longest.hidden < longest.hidden / 1000  # a few numbers beside its input
    return TracedBlock(
        kept=keeping.size(lambda a: a.kept[block]),
        forward=again.sizes(lambda a: a.forward.get(block, [])),
        building=keeping.sizes(lambda a: [x + a.stream for x in a.forward.get(block, [])]),
        backward=keeping.moments(lambda a: a.backward.get((0, block), [])),
        adding=keeping.moments(lambda a: a.backward.get((adding, block), [])),
        recomputed=again.moments(lambda a: a.backward.get((0, block), [])),
        recomputed_adding=again.moments(lambda a: a.backward.get((adding, block), [])),
        there=keeping.passed(Phase.FORWARD, block),
        back=keeping.passed(Phase.BACKWARD, block),
        heads=max((n for n, _ in heads), default=0),
        head_size=max((size for _, size in heads), default=0),
        flops_per_pair=12.0 * sum(n * size for n, size in heads),
        leaves=None if is_small else again.size(lambda a: a.kept[block] - a.hidden),
    )


class TransformersTracer:
    """Builds models of transformers without memory: values/model/tracer.py's Tracer."""

    def shapes(self, config: Mapping[str, Any], *, name: str, digest: str, dtype: str) -> ModelSpec:
        """Raises ModelError for an architecture that transformers does not have, or that has no decoder blocks."""
        with reading_blocks(name):
            return read_shapes(text_config(config), name=name, digest=digest, dtype=dtype)

    def profile(self, way: Way) -> TracedStep:
        """Trace it. Raises ModelError for blocks that do not run on fake tensors."""
        config = model_config(way.plan.model_path)
        with reading_blocks(way.plan.model.name):
            return trace_profile(way.plan, config, first=way.first, rows=way.rows)


@contextmanager
def reading_blocks(name: str) -> Iterator[None]:
    """Turns errors of transformers while blocks are read, or run on fake tensors, into a ModelError."""
    talk = logging.getLogger("torch._subclasses.fake_tensor")  # it logs a traceback of what is raised as well
    was_off, talk.disabled = talk.disabled, True
    try:
        yield
    except Exception as error:  # code of any architecture runs here, on tensors that it was not written for
        if isinstance(error, FituneError) or not is_failure(error):
            raise
        raise ModelError(
            f"{name}: its blocks cannot be traced: {first_line(error)}",
            hint="a model of another architecture",
        ) from error
    finally:
        talk.disabled = was_off
