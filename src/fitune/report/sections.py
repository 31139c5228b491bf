"""The parts of the page below its head, in the order of reading."""

from collections.abc import Sequence

from fitune.report import plan_words
from fitune.report.account import account, remarks
from fitune.report.compare import PEAK, PHASE_NAMES, Row, row_texts
from fitune.report.headline import loss_sentence
from fitune.report.pictures import Pictures
from fitune.report.pieces import Content, Html, code, details, element, figure, items, join, section, table
from fitune.report.run_files import RunFiles
from fitune.spec.reports import Ledger, Sample
from fitune.units import format_bytes, format_number, format_rate, format_seconds


def prediction(rows: Sequence[Row], run: RunFiles, pictures: Pictures | None, advice: str) -> Html:
    """``advice`` stands in for the pictures: how to get them."""
    bars = figure("Memory of one step by phase", pictures.memory) if pictures and pictures.memory else None
    numbers = table(("", "predicted", "measured", "error"), map(_row_cells, rows), numbers=3)
    return section(
        "Predicted and measured",
        element("p", advice, class_="note") if advice else None,
        element("div", element("div", numbers, _phase_times(run)), bars, class_="pair"),
        note=_how_it_was_measured(run),
    )


def curves(run: RunFiles, pictures: Pictures | None) -> Html:
    if not run.steps:
        return section("Training", element("p", "No step was recorded."))
    skipped = sum(step.skipped for step in run.steps)
    return section(
        "Training",
        _curve_ends(run) if pictures is None else _curve_figures(pictures),
        element("p", f"Steps skipped because fp16 gradients overflowed: {skipped:,}.") if skipped else None,
        note=loss_sentence(run),
    )


def samples(run: RunFiles) -> Html:
    answered = run.run.samples if run.run else ()
    note = "Held-out prompts, answered by the model before and after training."
    return section("Before and after", *map(_sample, answered), note=note)


def plan(run: RunFiles) -> Html:
    settings = plan_words.settings(run.plan)
    lines = [element("div", element("dt", name), element("dd", value)) for name, value in settings]
    decisions = run.prediction.decisions if run.prediction else ()
    return section(
        "The plan",
        items(plan_words.sentences(run.plan)),
        join([element("h3", "What fitune decided"), items(decisions)]) if decisions else None,
        details("Every setting", element("dl", *lines, class_="settings")),
    )


def alternatives(run: RunFiles) -> Html:
    said = run.prediction
    if said is None or not (said.runners_up or said.rejected):
        return Html("")
    taken = _alternative(
        "This plan", said.estimate.peak_bytes, said.estimate.step_seconds, said.estimate.fits
    )
    others = [_alternative(it.summary, it.peak_bytes, it.step_seconds, it.fits) for it in said.runners_up]
    rejected = [(item.what, item.why) for item in said.rejected]
    head = ("", "peak", "time of a step", "fits")
    return section(
        "What else was possible",
        table(head, [[element("strong", cell) for cell in taken], *others], numbers=3),
        join([element("h3", "Rejected"), table(("", ""), rejected, class_="reasons")]) if rejected else None,
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
    exported = f"The trained weights are in {run.run.exported}." if run.run and run.run.exported else ""
    recipe = element("div", element("h3", "recipe.yaml"), code(run.recipe)) if run.recipe else None
    used = element("div", element("h3", "Versions"), table(("", ""), list(versions.items()), numbers=1))
    return section(
        "Do it again",
        element("p", exported) if exported else None,
        *(element("p", line) for line in _merged_loss(run)),
        code(commands),
        element("div", recipe, used if versions else None, class_="pair"),
        note=f"The seed is {run.plan.run.seed}; plan.json holds every setting as it was run.",
    )


def _merged_loss(run: RunFiles) -> Sequence[str]:
    found = None if run.run is None else run.run.merged_loss
    return () if found is None else found.lines()


def _how_it_was_measured(run: RunFiles) -> str:
    parts = ["The error says how far the prediction lies above the measurement."]
    if run.run and run.run.memory:
        what = {"live tensors": "the bytes of live tensors", "cuda allocated": "the bytes CUDA had allocated"}
        parts.append(f"Measured are {what[run.run.memory.kind]}, at the peak within each phase.")
    if run.estimate:
        parts.append(f"The plan may fill {format_bytes(run.estimate.usable_bytes)}.")
    return " ".join(parts)


def _row_cells(row: Row) -> Sequence[Content]:
    """The peak decides whether a plan fits: it stands out."""
    texts = row_texts(row)
    return [element("strong", text) for text in texts] if row.what == PEAK else texts


def _phase_times(run: RunFiles) -> Html:
    """Where the step was expected to spend its time. Phases are not timed: nothing to hold against it."""
    if run.estimate is None:
        return Html("")
    time = run.estimate.time
    rows = [
        (PHASE_NAMES[phase], time.limits.get(phase, ""), format_seconds(seconds))
        for phase, seconds in time.phases.items()
    ]
    title = element("h3", "Where a step should spend its time")
    return join([title, table(("", "limited by", "predicted"), rows, numbers=1)])


def _curve_figures(pictures: Pictures) -> Html:
    return element(
        "div",
        figure("Loss", pictures.loss),
        figure("Throughput", pictures.throughput),
        figure("Learning rate", pictures.learning_rate),
        figure("Gradient norm", pictures.grad_norm),
        class_="pair",
    )


def _curve_ends(run: RunFiles) -> Html:
    """Without pictures: the first and the last step."""
    ends = [run.steps[0], run.steps[-1]] if len(run.steps) > 1 else [run.steps[0]]
    rows = [
        (
            f"{it.step:,}",
            format_number(it.loss),
            format_number(it.grad_norm),
            format_rate(it.tokens_per_second),
        )
        for it in ends
    ]
    return table(("step", "loss", "gradient norm", "throughput"), rows, numbers=3)


def _sample(sample: Sample) -> Html:
    as_expected = sample.after.strip() == sample.expected.strip()
    answers = element(
        "div",
        _answer("Before", sample.before),
        _answer("After, as expected" if as_expected else "After", sample.after, class_=" after"),
        _answer("Expected", sample.expected),
        class_="answers",
    )
    return element("div", element("p", sample.prompt, class_="said prompt"), answers, class_="sample")


def _answer(title: str, text: str, class_: str = "") -> Html:
    said = element("p", text if text.strip() else "(nothing)", class_="said")
    return element("div", element("h3", title), said, class_="answer" + class_)


def _alternative(summary: str, peak_bytes: int, step_seconds: float, fits: bool) -> Sequence[str]:
    return summary, format_bytes(peak_bytes), format_seconds(step_seconds), "yes" if fits else "no"


def _account(title: str, ledger: Ledger, seq_len: int) -> Html:
    rows = [(entry.what, _amount(entry.rows), _amount(entry.tokens)) for entry in account(ledger)]
    sums = [entry.is_sum for entry in account(ledger)]
    strong = [
        tuple(element("strong", cell) for cell in row) if is_sum else row
        for row, is_sum in zip(rows, sums, strict=True)
    ]
    numbers = table(("", "rows", "tokens"), strong, numbers=2)
    note = element("p", remarks(ledger, seq_len=seq_len), class_="lead")
    return element("div", element("h3", title), numbers, note)


def _amount(value: int | None) -> str:
    return "" if value is None else f"{value:,}".replace("-", "−")
