"""The exact search inside one method: every placement, batch, loss and number of recomputed blocks.

Exact without trying everything. A plan's speed has a bound: the same plan with nothing recomputed and all logits at
once; what is offloaded in addition only slows it down. Plans are looked at in the order of that bound, and the search
ends when the next bound is below the best plan found. Bytes are monotone, so a placement whose smallest plan does not
fit is left as a whole, and the fewest recomputed blocks are found by bisection.
"""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import count

from fitune.estimate.division import accumulates_whole
from fitune.estimate.loss import loss_bytes
from fitune.estimate.memory import memory_of
from fitune.estimate.model_profile import ModelProfile, model_profile
from fitune.estimate.overhead import host_terms, room_bytes, usable_bytes
from fitune.estimate.predict import largest_batch
from fitune.estimate.step import StepStages, describe_step, resident_terms
from fitune.planner.candidates import (
    Method,
    Placement,
    Request,
    batches,
    block_counts,
    draft,
    every_placement,
    losses,
)
from fitune.planner.fit import (
    INDISTINGUISHABLE,
    cheapest_blocks,
    counts_for_host,
    fewest_blocks,
    fits,
    host_fits,
    last_true,
    least_speeds,
    peak_of,
    preferred,
    quickest_blocks,
    taken_first,
    tokens_per_second,
)
from fitune.values.plan import Batch, Loss, Plan, Sharding
from fitune.values.predictions import SLACK
from fitune.values.rules import keeps_rules

SHOWN = 0.8
"""Share of the best speed down to which other placements and batches are looked for: they are shown beside it."""


@dataclass(frozen=True)
class MethodSearch:
    """One method for one request; ``on_device``: weights and optimizer states do not leave the device."""

    request: Request
    method: Method
    on_device: bool = False

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        """Ways that keep the rules, the simplest first."""
        found = [
            placement
            for placement in every_placement(self.request)
            if (placement.states_stay or not self.on_device)
            and self.batches
            and self._keeps_rules(placement, self.batches[0])
        ]
        return tuple(sorted(found, key=lambda placement: placement.complexity))

    def _keeps_rules(self, placement: Placement, batch: Batch) -> bool:
        return keeps_rules(replace(self.draft(placement), batch=batch), *self.request.purposes)

    def fastest(self, *, taken_only: bool = False) -> tuple[StepStages, ...]:
        """The plan to take, then the best of every other placement and batch looked at; empty when none fits.

        ``taken_only``: nothing is looked for that would only be shown beside the plan to take.
        """
        found: list[StepStages] = []
        best = plain = 0.0
        for bound, placement, step in self._by_bound():
            # what offloads is neither taken nor named where it is no faster than what does not
            shown = SHOWN * best, max(SHOWN * best, plain)
            stays, offloads = least_speeds(best, plain) if taken_only else shown
            if bound < min(stays, offloads):
                break
            at_least = stays if placement.is_plain else offloads
            if bound < at_least:
                continue
            fitting = self._fastest_that_fits(step, at_least=at_least)
            if fitting is not None:
                found.append(fitting)
                speed = tokens_per_second(fitting)
                best, plain = max(best, speed), max(plain, speed if placement.is_plain else 0)
        return tuple(taken_first(found, packed=self.request.recipe.packing))

    def smallest(self) -> StepStages | None:
        """The plan that needs the least device memory, of those whose host part fits; None without any placement.

        The floor of each way spares the search of those that cannot win.
        """
        least_of: list[tuple[bool, int, StepStages]] = []
        for placement in self.placements:
            for batch in {self.batches[0], self.batches[-1]}:
                step = self._all_recomputed(self.describe(placement, batch))
                least_of.append((not host_fits(step), self._floor(step), step))
        best: tuple[bool, int, StepStages] | None = None
        for short, bound, step in sorted(least_of, key=lambda item: item[:2]):
            if best is not None and (short, bound) >= best[:2]:
                break
            least = self._least(step)
            size = (not host_fits(least), self._peak(least))
            if best is None or size < best[:2]:
                best = (*size, least)
        return None if best is None else best[2]

    def least_host(self) -> StepStages | None:
        """The plan that fits the devices and asks least of a host that is too small; None without any."""
        found = []
        for placement in self.placements:
            step = self._all_recomputed(self.describe(placement, self.batches[-1]))
            if self._peak(step) <= room_bytes(step.plan) and not host_fits(step):
                found.append(step)
        return min(found, key=lambda step: sum(host_terms(step).values()), default=None)

    def fits(self) -> bool:
        """True if any plan has room."""
        return any(self.has_room(placement) for placement in self.placements)

    def has_room(self, placement: Placement) -> bool:
        """True if any plan of this placement has."""
        return self.fits_at_all(placement) and any(
            self._has_room_for(placement, batch) for batch in reversed(self.batches)
        )

    def fits_at_all(self, placement: Placement) -> bool:
        """True if the placement's smallest batch has room with nothing accumulated: if not, none has. But FSDP2 at
        stage 1 may take less where it accumulates: then it holds no buffers of sums in backward."""
        smallest = self.batches[-1]
        batches = [replace(smallest, accumulation=1)]
        if accumulates_whole(replace(self.draft(placement), batch=smallest)):
            batches.append(smallest)
        return self._keeps_room(placement) and any(self._has_room_for(placement, each) for each in batches)

    def _has_room_for(self, placement: Placement, batch: Batch) -> bool:
        """True if it fits with any loss and number of blocks; the ends that decide most cases are looked at first."""
        step = self._all_recomputed(self.describe(placement, batch))
        if fits(step):
            return True
        if self._floor(step) > self._usable:
            return False
        return fits(self._least(step))

    @cached_property
    def draft(self) -> Callable[[Placement], Plan]:
        """One for each placement: what is estimated of equal plans is remembered by the objects that they hold."""
        return cache(partial(draft, self.request, self.method))

    @cached_property
    def batches(self) -> tuple[Batch, ...]:
        """Splits of the batch that some placement allows: blocks that carry a state take one row at a time."""
        every = batches(self.request.recipe, self.method, ranks=self.request.hardware.num_gpus)
        return tuple(
            batch
            for batch in every
            if any(self._keeps_rules(placement, batch) for placement in every_placement(self.request))
        )

    @cached_property
    def describe(self) -> Callable[[Placement, Batch], StepStages]:
        """The step of a placement with a batch, described once: its prices are remembered by the object.

        Profiles of the blocks depend on the rows of a micro-batch and on nothing else that is searched.
        """
        profiles: dict[int, ModelProfile] = {}

        @cache
        def described(placement: Placement, batch: Batch) -> StepStages:
            """The step, with the profile of its rows."""
            plan, rows = replace(self.draft(placement), batch=batch), batch.micro_batch_size
            if rows not in profiles:
                profiles[rows] = model_profile(plan, largest_batch(plan))
            return describe_step(plan, largest_batch(plan), profiles[rows])

        return described

    @cached_property
    def _usable(self) -> int:
        return usable_bytes(self.request.hardware)

    @cached_property
    def _losses(self) -> tuple[Loss, ...]:
        return losses(self.request.recipe)

    @cached_property
    def _counts(self) -> range:
        return block_counts(self.request.recipe, layers=self.request.model.num_layers)

    def _keeps_room(self, placement: Placement) -> bool:
        """True if what stays between two steps fits: if not, nothing else has to be priced."""
        return sum(resident_terms(self.draft(placement)).values()) <= self._usable

    def _by_bound(self) -> Iterator[tuple[float, Placement, StepStages]]:
        """Every placement that fits at all with every batch, by falling bound. What offloads more than another way of
        the same sharding enters with that one's bound and is described only when that is reached."""
        order = count()
        heap: list[tuple[float, int, int, Batch, StepStages | None]] = []
        ceilings: dict[tuple[Sharding, Batch], float] = {}
        fits = cache(lambda place: self.fits_at_all(self.placements[place]))
        roomy = {placement.sharding for placement in self.placements if self._keeps_room(placement)}
        for place, placement in enumerate(self.placements):
            if placement.sharding not in roomy:
                continue
            for batch in self.batches:
                step = None
                if (placement.sharding, batch) not in ceilings:
                    step = self.describe(placement, batch)
                    ceilings[placement.sharding, batch] = self._bound(step)
                heapq.heappush(heap, (-ceilings[placement.sharding, batch], next(order), place, batch, step))
        while heap:
            negative, number, place, batch, step = heapq.heappop(heap)
            placement = self.placements[place]
            if not fits(place):
                continue
            if step is None:
                step = self.describe(placement, batch)
                heapq.heappush(heap, (max(negative, -self._bound(step)), number, place, batch, step))
            else:
                yield -negative, placement, step

    def _bound(self, step: StepStages) -> float:
        return tokens_per_second(step.varied(self._quickest(step), self._losses[0]))

    def _quickest(self, step: StepStages) -> int:
        """As with the largest batch, or nearly: what runs again and what is sent both grow with the rows."""
        largest, loss = self.describe(Placement.of(step.plan), self.batches[0]), self._losses[-1]
        guess = quickest_blocks(largest, self._counts, loss, self._counts[0])
        return guess if step is largest else quickest_blocks(step, self._counts, loss, guess)

    def _fastest_that_fits(self, step: StepStages, *, at_least: float) -> StepStages | None:
        """The fastest way with this placement and batch that fits; None when there is none as fast as ``at_least``.

        The smallest loss leaves most room for activations, to within a block: a bound for all of them.
        """
        counts = counts_for_host(step, self._counts)
        if counts is None:
            return None
        fastest, smallest = self._losses[0], self._smallest_loss(step)
        blocks = self._fewest_blocks(step, smallest, counts)
        if blocks is None:
            return None
        quickest = self._quickest(step)
        if tokens_per_second(step.varied(max(blocks, quickest), fastest)) < at_least:
            return None
        fitting = []
        for loss in (self._losses[-1], *self._losses[:-1]):
            fewest = blocks if loss == smallest else self._fewest_blocks(step, loss, counts)
            if fewest is not None:
                fitting.append(self._towards(quickest, step.varied(fewest, loss)))
        return self._sparing_the_host(preferred(fitting, by=self._peak))

    @staticmethod
    def _towards(blocks: int, step: StepStages) -> StepStages:
        """The step with so many blocks recomputed, or as many of them as fit."""
        fewest, loss = step.plan.recompute.blocks, step.plan.loss
        if blocks <= fewest:
            return step
        most = last_true(lambda count: fits(step.varied(count, loss)), fewest, blocks + 1, guess=blocks)
        return step.varied(most, loss)

    def _sparing_the_host(self, step: StepStages) -> StepStages:
        """The step with the most recomputed blocks that cost no measurable speed: their activations need not leave."""
        if not step.activations_leave:
            return step
        enough = INDISTINGUISHABLE * tokens_per_second(step)

        def with_blocks(blocks: int) -> StepStages:
            """The step with so many blocks recomputed and the same loss."""
            return step.varied(blocks, step.plan.loss)

        def is_as_fast(blocks: int) -> bool:
            """True if the step with so many blocks recomputed fits and is not measurably slower."""
            other = with_blocks(blocks)
            return tokens_per_second(other) >= enough and fits(other)

        fewest = step.plan.recompute.blocks
        return with_blocks(last_true(is_as_fast, fewest, self._counts[-1] + 1, guess=fewest + 1))

    def _fewest_blocks(self, step: StepStages, loss: Loss, counts: range) -> int | None:
        peaks = cache(lambda blocks: peak_of(step, blocks=blocks, loss=loss))
        return fewest_blocks(peaks, counts, usable=room_bytes(step.plan))

    def _all_recomputed(self, step: StepStages) -> StepStages:
        return step.varied(self._counts[-1], self._smallest_loss(step))

    def _smallest_loss(self, step: StepStages) -> Loss:
        """The loss of the smallest chunks; but the whole gradient of a head waits beside all chunks after the first."""
        if not step.head_gradient or step.adds_in_place:
            return self._losses[-1]
        return min(reversed(self._losses), key=lambda loss: loss_bytes(step.varied(0, loss)))

    def _least(self, step: StepStages) -> StepStages:
        """The number of blocks with the smallest peak, of those whose activations the host can hold, if any."""
        loss = self._smallest_loss(step)
        counts = counts_for_host(step, self._counts) or self._counts
        blocks = cheapest_blocks(lambda count: peak_of(step, blocks=count, loss=loss), counts)
        return step.varied(blocks, loss)

    @staticmethod
    def _floor(step: StepStages) -> int:
        """Bytes below which no number of blocks goes, from the step that recomputes all: that one holds at most the
        blocks' inputs more, and the allocator's slack, which is smaller where nothing runs again."""
        memory = memory_of(step)
        return memory.peak_bytes - memory.outside.get(SLACK, 0) - step.inputs_before(step.num_layers)

    @staticmethod
    def _peak(step: StepStages) -> int:
        return memory_of(step).peak_bytes
