"""Peak bytes of a scoring's first batch as they are measured, and as they were predicted for the same passes."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from fitune.estimate.answering import memory_of_answering
from fitune.files import write_atomically
from fitune.measure.memory import memory_meter
from fitune.score.engines.continuous import Moment
from fitune.score.engines.room import answering_of
from fitune.score.plan import ScorePlan
from fitune.spec.answering import Answering, Questions
from fitune.spec.reports import ScoreReport
from fitune.spec.serial import to_json


class ScoreMemory:
    """Measures the passes that it is opened for, and predicts each of them by its rows and widths alone."""

    def __init__(self, plan: ScorePlan) -> None:
        self._plan = plan
        self._measured = 0
        self._moments: list[Moment] = []

    @contextmanager
    def watch(self, moment: Moment, alive: Callable[[], Iterable[Tensor]]) -> Iterator[None]:
        """Measure one pass, if it may need more than those before it: the counter makes it several times as long."""
        if any(_is_within(moment, measured) for measured in self._moments):
            yield
            return
        device = next(iter(alive())).device
        meter = memory_meter(device)
        with meter.measuring(alive):
            yield
        self._measured = max(self._measured, *meter.take_peaks().values())
        self._moments.append(moment)

    def added_to(self, report: ScoreReport, out: Path) -> ScoreReport:
        """The report with both figures, written anew; as it is where nothing was watched, or nothing can be
        predicted."""
        if not self._moments:
            return report
        answering = answering_of(self._plan)
        if answering is None:
            return report
        predicted = max(_bytes_at(moment, answering) for moment in self._moments)
        report = replace(report, measured_bytes=self._measured, predicted_bytes=predicted)
        write_atomically(out / "report.json", to_json(report))
        return report


def _is_within(moment: Moment, other: Moment) -> bool:
    """True for a pass of the same kind that is no larger in any way."""
    return (
        _reads(moment) == _reads(other)
        and moment.rows <= other.rows
        and moment.prompt_tokens <= other.prompt_tokens
        and moment.width <= other.width
    )


def _reads(moment: Moment) -> bool:
    return moment.width == moment.prompt_tokens


def _bytes_at(moment: Moment, answering: Answering) -> int:
    """Predicted bytes of reading prompts, or of writing the token that makes the cache so wide."""
    asked = Questions(
        rows=moment.rows, prompt_tokens=moment.rows * moment.prompt_tokens, longest_prompt=moment.prompt_tokens,
        new_tokens=moment.width - moment.prompt_tokens + 1,
    )  # fmt: skip
    memory = memory_of_answering(replace(answering, batch_size=moment.rows), asked)
    return sum((memory.reading if _reads(moment) else memory.writing).values())
