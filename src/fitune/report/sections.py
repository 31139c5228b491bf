"""The parts of the page, in the order of reading."""

from collections.abc import Sequence

from fitune.report import plan_words
from fitune.report.account import account, remarks
from fitune.report.compare import Measured, Row, row_texts
from fitune.report.pictures import Pictures
from fitune.report.pieces import Html, code, details, element, figure, items, join, section, table
from fitune.report.run_files import RunFiles
from fitune.spec.reports import Ledger, Sample
from fitune.units import (
    format_bytes,
    format_count,
    format_number,
    format_percent,
    format_rate,
    format_seconds,
)


def header(run: RunFiles, measured: Measured) -> Html:
    status = run.run.status if run.run else "unfinished"
    badge = element("span", status, class_=f"badge {status}")
    reason = run.run.reason if run.run else _without_report(run)
    return element(
        "header",
        element("p", "fitune run report", badge, class_="eyebrow"),
        element("h1", run.plan.model.name),
        element("p", plan_words.headline(run.plan), class_="subtitle"),
        element("p", verdict(run, measured), class_="verdict"),
        element("p", reason, class_="reason") if reason else None,
        element("dl", *_tiles(run, measured), class_="tiles"),
    )


def verdict(run: RunFiles, measured: Measured) -> str:
    """The one sentence the page is about."""
    predicted = None if run.estimate is None else run.estimate.memory.tensor_peak_bytes
    peak = measured.peak_bytes
    if predicted is None and peak is None:
        return "Memory was neither predicted nor measured."
    if predicted is None:
        return f"Measured {format_bytes(peak or 0)} at the peak; there was no prediction."
    if not peak:
        return f"Predicted {format_bytes(predicted)} at the peak; nothing was measured."
    error = format_percent(predicted / peak - 1, signed=True)
    return f"Predicted {format_bytes(predicted)}, measured {format_bytes(peak)} ({error})"


def prediction(rows: Sequence[Row], run: RunFiles, pictures: Pictures | None, advice: str) -> Html:
    bars = figure("Memory of one step by phase", pictures.memory) if pictures and pictures.memory else None
    note = "The error says how far the prediction lies above the measurement. "
    if run.run and run.run.memory:
        note += f"Measured were {run.run.memory.kind}, the peak within each phase. "
    if run.estimate:
        note += f"{format_bytes(run.estimate.usable_bytes)} may be filled."
    numbers = table(("", "predicted", "measured", "error"), [row_texts(row) for row in rows], numbers=3)
    return section(
        "Predicted and measured",
        element("p", advice, class_="note") if advice else None,
        element("div", element("div", numbers, _phase_times(run)), bars, class_="pair"),
        note=note,
    )


def curves(run: RunFiles, pictures: Pictures | None) -> Html:
    if not run.steps:
        return section("Training", element("p", "No step was recorded."))
    if pictures is None:
        return section("Training", _curve_ends(run))
    skipped = sum(step.skipped for step in run.steps)
    return section(
        "Training",
        element(
            "div",
            figure("Loss", pictures.loss),
            figure("Throughput", pictures.throughput),
            figure("Learning rate", pictures.learning_rate),
            figure("Gradient norm", pictures.grad_norm),
            class_="pair",
        ),
        element("p", f"{skipped:,} steps were skipped because fp16 gradients overflowed.")
        if skipped
        else None,
    )


def samples(run: RunFiles) -> Html:
    answered = run.run.samples if run.run else ()
    return section(
        "Before and after",
        *map(_sample, answered),
        note="Held-out prompts, answered by the model before and after training.",
    )


def plan(run: RunFiles) -> Html:
    lines = [
        element("div", element("dt", name), element("dd", value))
        for name, value in plan_words.settings(run.plan)
    ]
    decisions = run.prediction.decisions if run.prediction else ()
    return section(
        "The plan",
        items(plan_words.sentences(run.plan)),
        join([element("h3", "What fitune decided"), items(decisions)]) if decisions else None,
        details("Every setting", element("dl", *lines, class_="settings")),
    )


def alternatives(run: RunFiles) -> Html:
    prediction = run.prediction
    if prediction is None or not (prediction.runners_up or prediction.rejected):
        return Html("")
    estimate = prediction.estimate
    taken = (
        "This plan",
        format_bytes(estimate.peak_bytes),
        format_seconds(estimate.step_seconds),
        _yes(estimate.fits),
    )
    others = [
        (other.summary, format_bytes(other.peak_bytes), format_seconds(other.step_seconds), _yes(other.fits))
        for other in prediction.runners_up
    ]
    rejected = [(item.what, item.why) for item in prediction.rejected]
    head = ("", "peak", "time of a step", "fits")
    return section(
        "What else was possible",
        table(head, [taken, *others], numbers=3),
        join([element("h3", "Rejected"), table(("", ""), rejected)]) if rejected else None,
        note="All figures are predictions.",
    )


def data(run: RunFiles) -> Html:
    ledgers = [("Training", run.run.train_data), ("Held out", run.run.eval_data)] if run.run else []
    seq_len = run.plan.batch.seq_len
    accounts = [_account(title, ledger, seq_len) for title, ledger in ledgers if ledger is not None]
    pair = element("div", *accounts, class_="pair") if accounts else None
    return section("What happened to the data", pair, note="Every row and every token is accounted for.")


def reproduce(run: RunFiles) -> Html:
    versions = run.run.versions if run.run else {}
    version = versions.get("fitune", "")
    commands = f"pip install fitune{f'=={version}' if version else ''}\nfitune train recipe.yaml"
    exported = f"The trained weights are in {run.run.exported}." if run.run and run.run.exported else None
    return section(
        "Do it again",
        element("p", exported) if exported else None,
        code(commands),
        join([element("h3", "recipe.yaml"), code(run.recipe)]) if run.recipe else None,
        join([element("h3", "Versions"), table(("", ""), list(versions.items()))]) if versions else None,
        note=f"The seed is {run.plan.run.seed}; plan.json holds every setting as it was run.",
    )


def _tiles(run: RunFiles, measured: Measured) -> list[Html]:
    report = run.run
    tiles = [
        _tile("Peak memory", format_bytes(measured.peak_bytes), _predicted(run))
        if measured.peak_bytes
        else None
    ]
    if losses := _first_and_last_loss(run):
        tiles.append(_tile("Loss", " → ".join(map(format_number, losses)), _held_out(run)))
    if measured.tokens_per_second:
        tiles.append(_tile("Throughput", format_rate(measured.tokens_per_second), _mfu(run)))
    if report:
        tiles.append(
            _tile("Time", format_seconds(report.seconds), f"{report.steps:,} of {report.total_steps:,} steps")
        )
        tiles.append(
            _tile(
                "Tokens",
                format_count(report.tokens),
                _share(report.supervised_tokens, report.tokens, "supervised"),
            )
        )
        share = _share(report.trainable_parameters, report.total_parameters, "of all parameters")
        tiles.append(_tile("Trained", format_count(report.trainable_parameters), share))
    elif run.steps:
        last = run.steps[-1]
        tiles.append(_tile("Progress", f"{last.step:,} steps", f"of {last.total_steps:,}"))
    return [tile for tile in tiles if tile]


def _tile(name: str, value: str, below: str) -> Html:
    return element(
        "div", element("dt", name), element("dd", value, class_="value"), element("dd", below), class_="tile"
    )


def _predicted(run: RunFiles) -> str:
    return (
        f"predicted {format_bytes(run.estimate.memory.tensor_peak_bytes)}"
        if run.estimate
        else "not predicted"
    )


def _first_and_last_loss(run: RunFiles) -> tuple[float, float] | None:
    if run.run and run.run.steps:
        return run.run.first_loss, run.run.final_loss
    return (run.steps[0].loss, run.steps[-1].loss) if run.steps else None


def _held_out(run: RunFiles) -> str:
    best = (
        run.run.best_eval_loss
        if run.run
        else min((s.eval_loss for s in run.steps if s.eval_loss is not None), default=None)
    )
    return "not evaluated" if best is None else f"held out {format_number(best)} at best"


def _mfu(run: RunFiles) -> str:
    mfu = run.run.mfu if run.run else run.steps[-1].mfu
    return f"MFU {format_percent(mfu)}" if mfu else "MFU unknown: no peak of the device"


def _share(part: int, whole: int, what: str) -> str:
    return f"{format_percent(part / whole)} {what}" if whole else ""


def _without_report(run: RunFiles) -> str:
    return (
        "There is no report.json: the run is still going, or it was stopped before it could write one. "
        f"The page shows the {len(run.steps):,} steps recorded so far."
    )


def _phase_times(run: RunFiles) -> Html:
    """Where the step was expected to spend its time. Phases are not timed, so there is nothing to hold against it."""
    if run.estimate is None:
        return Html("")
    time = run.estimate.time
    rows = [
        (phase.value, time.limits.get(phase, ""), format_seconds(seconds))
        for phase, seconds in time.phases.items()
    ]
    return join(
        [
            element("h3", "Where a step should spend its time"),
            table(("phase", "limited by", "predicted"), rows, numbers=1),
        ]
    )


def _curve_ends(run: RunFiles) -> Html:
    """Without pictures: the first and the last step."""
    ends = [run.steps[0], run.steps[-1]] if len(run.steps) > 1 else [run.steps[0]]
    rows = [
        (
            f"{step.step:,}",
            format_number(step.loss),
            format_number(step.grad_norm),
            format_rate(step.tokens_per_second),
        )
        for step in ends
    ]
    return table(("step", "loss", "gradient norm", "throughput"), rows, numbers=3)


def _sample(sample: Sample) -> Html:
    as_expected = sample.after.strip() == sample.expected.strip()
    return element(
        "div",
        element("p", sample.prompt, class_="said prompt"),
        element(
            "div",
            _answer("Before", sample.before),
            _answer("After, as expected" if as_expected else "After", sample.after, class_=" after"),
            _answer("Expected", sample.expected),
            class_="answers",
        ),
        class_="sample",
    )


def _answer(title: str, text: str, class_: str = "") -> Html:
    return element(
        "div",
        element("h3", title),
        element("p", text or "(nothing)", class_="said"),
        class_="answer" + class_,
    )


def _account(title: str, ledger: Ledger, seq_len: int) -> Html:
    lines = [
        element(
            "tr",
            element("th", entry.what),
            element("td", _amount(entry.rows), class_="number"),
            element("td", _amount(entry.tokens), class_="number"),
            class_="sum" if entry.is_sum else "",
        )
        for entry in account(ledger)
    ]
    head = element(
        "tr", *(element("th", name, class_="number" if name else "") for name in ("", "rows", "tokens"))
    )
    numbers = element("table", element("thead", head), element("tbody", *lines))
    return element(
        "div", element("h3", title), numbers, element("p", remarks(ledger, seq_len=seq_len), class_="lead")
    )


def _amount(value: int | None) -> str:
    return "" if value is None else f"{value:,}".replace("-", "−")


def _yes(fits: bool) -> str:
    return "yes" if fits else "no"
