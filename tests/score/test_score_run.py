"""Scoring from start to end: what is written, and that a stopped run goes on with every id exactly once."""

import errno
import gc
import hashlib
import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from fitune.demo.text import training_exercises
from fitune.errors import DataError, FituneError, RecipeError, RunDirectoryError
from fitune.score.engines.engine import Completion, Request, Sampling
from fitune.score.engines.engine_transformers import TransformersEngine
from fitune.score.engines.opening import rows_of_a_shard
from fitune.score.plan import ScorePlan
from fitune.score.run import score
from fitune.score.shards import Shards
from fitune.session.results import text_of
from fitune.session.score.scoring import score_dataset, why_not_all
from fitune.spec.plan import DataSource
from fitune.spec.reports import ScoreReport
from fitune.spec.serial import from_json
from fitune.units import counted

ROWS = 20


def write_data(path: Path, *, count: int = ROWS, changed: str = "") -> Path:
    rows = [
        {"id": r.id, "prompt": r.prompt, "completion": r.completion}
        for r in training_exercises(count, seed=2)
    ]
    if changed:
        rows[3]["prompt"] = changed
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def plan_for(model: Path, data: DataSource, out: Path) -> ScorePlan:
    """Answers are written eight rows at a time."""
    sampling = Sampling(max_new_tokens=8)
    return ScorePlan(
        model=str(model), sources=(data,), output_dir=str(out), sampling=sampling, batch_size=1, shard_rows=8
    )


@pytest.fixture
def plan(tiny, tmp_path: Path) -> ScorePlan:
    data = DataSource(path=str(write_data(tmp_path / "rows.jsonl")))
    return plan_for(tiny.folder, data, tmp_path / "out")


@pytest.fixture(scope="module")
def finished_once(tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of the plan below."""
    folder = tmp_path_factory.mktemp("finished")
    data = DataSource(path=str(write_data(folder / "rows.jsonl")))
    quietly(plan_for(tiny.folder, data, folder / "out"))
    return folder / "out"


@pytest.fixture
def finished(plan: ScorePlan, finished_once: Path) -> ScorePlan:
    """The plan, with its directory as a run left it."""
    shutil.copytree(finished_once, plan.output_dir)
    return plan


def quietly(plan: ScorePlan, progress: Callable[[int, int], None] = lambda done, total: None) -> ScoreReport:
    return score(plan, say=lambda line: None, progress=progress)


def answers(plan: ScorePlan) -> Path:
    return Path(plan.output_dir) / "answers.jsonl"


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_are_openai_batch_lines_in_the_order_of_the_data(plan: ScorePlan) -> None:
    quietly(replace(plan, batch_size=3))
    written = lines(answers(plan))
    assert [line["custom_id"] for line in written] == [f"train-{number:04d}" for number in range(1, ROWS + 1)]
    for line in written:
        assert set(line) == {"id", "custom_id", "response", "error"}
        assert line["error"] is None
        assert line["response"]["status_code"] == 200
        body = line["response"]["body"]
        assert (body["object"], body["model"]) == ("chat.completion", plan.model)
        (choice,) = body["choices"]
        assert choice["index"] == 0
        assert choice["message"]["role"] == "assistant"
        assert choice["finish_reason"] in ("stop", "length")
        usage = body["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert 1 <= usage["completion_tokens"] <= 8


def test_the_report_is_the_mean_of_the_grades(plan: ScorePlan) -> None:
    said: list[str] = []
    report = score(plan, say=said.append)
    assert said == ["graders: exact_match, contains (no reference is longer than 11 words)"]
    graded = lines(Path(plan.output_dir) / "grades.jsonl")
    assert [row["id"] for row in graded] == [line["custom_id"] for line in lines(answers(plan))]
    for name, mean in report.grades.items():
        assert mean == pytest.approx(sum(row["grades"][name] for row in graded) / ROWS)
    assert (report.rows, report.answered, report.failed) == (ROWS, ROWS, 0)
    usage = [line["response"]["body"]["usage"]["completion_tokens"] for line in lines(answers(plan))]
    assert report.generated_tokens == sum(usage)
    ends = [line["response"]["body"]["choices"][0]["finish_reason"] for line in lines(answers(plan))]
    assert report.cut_off == ends.count("length") > 0
    assert f"cut off at max_new_tokens: {counted(report.cut_off, 'answer')} (" in text_of(report)
    assert from_json(ScoreReport, (Path(plan.output_dir) / "report.json").read_text()) == report


def test_right_answers_score_one_and_wrong_ones_nothing(finished: ScorePlan, tmp_path: Path) -> None:
    said = [line["response"]["body"]["choices"][0]["message"]["content"] for line in lines(answers(finished))]
    rows = [json.loads(line) for line in Path(finished.sources[0].path).read_text().splitlines()]
    right = [
        row | {"completion": text if text.strip() else "blank"} for row, text in zip(rows, said, strict=True)
    ]
    spoken = [place for place, text in enumerate(said) if text.strip()]
    right[spoken[0]]["completion"] += " and more"
    share = (len(spoken) - 1) / ROWS
    path = tmp_path / "right.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in right))
    again = replace(finished, sources=(DataSource(path=str(path)),), output_dir=str(tmp_path / "again"))
    report = quietly(replace(again, graders=("exact_match", "contains")))
    assert report.grades["exact_match"] == pytest.approx(share) == report.grades["contains"]
    assert 0.3 < share < 1


def everything(plan: ScorePlan) -> dict[str, bytes]:
    """All that a run leaves but its report, which tells the time it took."""
    folder = Path(plan.output_dir)
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("report.json", "run.lock")
    }


@pytest.mark.parametrize("lost", [("00002.json",), ("00001.json", "00002.json"), ("00000.json",)])
def test_a_shard_without_its_manifest_is_answered_again(finished: ScorePlan, lost: tuple[str, ...]) -> None:
    whole = answers(finished).read_bytes()
    for name in lost:
        (Path(finished.output_dir) / "shards" / name).unlink()
    (Path(finished.output_dir) / "report.json").unlink()
    seen: list[int] = []
    report = quietly(finished, progress=lambda done, total: seen.append(done))
    assert answers(finished).read_bytes() == whole
    assert seen[0] == ROWS - sum(4 if name == "00002.json" else 8 for name in lost)
    assert seen[-1] == report.answered == ROWS


class Killed(BaseException):
    """As abrupt as a signal."""


@pytest.mark.parametrize("after", [1, 8, 9, 19])
def test_a_run_killed_between_batches_loses_nothing_written(plan: ScorePlan, after: int) -> None:
    def kill(done: int, total: int) -> None:
        if done == after:
            raise Killed

    with pytest.raises(Killed):
        quietly(plan, progress=kill)
    assert Shards(Path(plan.output_dir)).numbers() == list(range((after - 1) // 8))
    assert not answers(plan).exists()
    quietly(plan)
    ids = [line["custom_id"] for line in lines(answers(plan))]
    assert ids == [f"train-{number:04d}" for number in range(1, ROWS + 1)]


def killed_at_sync(plan: ScorePlan, count: int) -> bool:
    """Score in a child process that SIGKILLs itself when it syncs for the ``count``-th time; False: it finished."""
    child = os.fork()
    if not child:
        left, sync = count, os.fsync

        def fsync(handle: int) -> None:
            nonlocal left
            left -= 1
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
            sync(handle)

        os.fsync = fsync
        try:
            quietly(plan)
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_wherever_it_writes_the_bytes_are_those_of_an_undisturbed_run(
    plan: ScorePlan, finished_once: Path, step: int
) -> None:
    """SIGKILL at every ``step``-th sync, in a new start in the same directory each time, until one comes through."""
    expected = everything(replace(plan, output_dir=str(finished_once)))
    kills, count = 0, 1
    while killed_at_sync(plan, count):
        kills, count = kills + 1, count + step
        assert kills < 100
    assert kills >= 2
    assert everything(plan) == expected


def test_a_disk_that_fills_up_wherever_it_is_written_loses_nothing(
    plan: ScorePlan, finished_once: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full at one sync of each start, four later every time, until no start gets that far."""
    expected = everything(replace(plan, output_dir=str(finished_once)))
    sync, left, count = os.fsync, 0, 0

    def fsync(handle: int) -> None:
        nonlocal left
        left -= os.readlink(f"/proc/self/fd/{handle}").startswith(plan.output_dir)  # not of a cache
        if not left:
            left = -1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    named = set()
    while left <= 0:
        left = count = count + 4
        named.add(named_by_a_full_disk(plan))
        assert not list(Path(plan.output_dir).rglob(".tmp-*"))
    assert len(named - {""}) >= 4
    assert everything(plan) == expected


def named_by_a_full_disk(plan: ScorePlan) -> str:
    """The file that the error names beside the free bytes; empty where the scoring came through."""
    try:
        quietly(plan)
        return ""
    except OSError as error:
        told = error
    said = r"No space left on device: ([\d.]+ \w*B to write, )?[\d.]+ \w*B free"
    assert re.fullmatch(said, str(told.strerror))
    return Path(str(told.filename)).name


def test_a_finished_run_changes_nothing_when_started_again(plan: ScorePlan) -> None:
    first = quietly(plan)
    before = answers(plan).read_bytes()
    seen: list[int] = []
    again = quietly(plan, progress=lambda done, total: seen.append(done))
    assert seen == [ROWS]
    assert answers(plan).read_bytes() == before
    assert (first.rows_asked, again.rows_asked) == (ROWS, 0)
    assert replace(again, seconds=first.seconds, rows_asked=ROWS) == first


def test_data_that_grew_is_answered_where_it_grew(finished: ScorePlan) -> None:
    before = answers(finished).read_bytes()
    write_data(Path(finished.sources[0].path), count=ROWS + 3)
    seen: list[int] = []
    assert quietly(finished, progress=lambda done, total: seen.append(done)).answered == ROWS + 3
    assert seen == [ROWS, ROWS + 1, ROWS + 2, ROWS + 3]
    assert answers(finished).read_bytes().startswith(before)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sampling": Sampling(max_new_tokens=9)}, "sampling"),
        ({"sampling": Sampling(max_new_tokens=8, temperature=0.5)}, "sampling"),
        ({"data": "other.jsonl"}, "data"),
    ],
)
def test_other_settings_are_refused_in_the_same_directory(
    finished: ScorePlan, tmp_path: Path, change: dict, named: str
) -> None:
    before = answers(finished).read_bytes()
    if "data" in change:
        change = {"sources": (DataSource(path=str(write_data(tmp_path / change["data"]))),)}
    with pytest.raises(RunDirectoryError, match=f"other settings:\n  {named}: ") as caught:
        quietly(replace(finished, **change))
    assert "8" in caught.value.message or "rows.jsonl" in caught.value.message
    assert answers(finished).read_bytes() == before


def test_a_mistake_before_the_first_answer_does_not_claim_the_directory(plan: ScorePlan) -> None:
    with pytest.raises(FituneError):
        quietly(replace(plan, adapter="not/there"))
    assert quietly(plan).answered == ROWS


def test_another_model_of_the_same_name_is_refused(finished: ScorePlan, tiny, tmp_path: Path) -> None:
    other = Path(shutil.copytree(tiny.folder, tmp_path / "elsewhere" / tiny.folder.name))
    assert quietly(replace(finished, model=str(other))).answered == ROWS, (
        "the same files in another place are the same"
    )
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RunDirectoryError, match="model: 'tiny, files"):
        quietly(replace(finished, model=str(other)))


def test_a_changed_or_missing_row_is_refused_by_its_id(finished: ScorePlan) -> None:
    write_data(Path(finished.sources[0].path), changed="Tell me something else.")
    with pytest.raises(
        RunDirectoryError, match="1 rows answered there have another prompt or reference now: train-0004"
    ):
        quietly(finished)
    write_data(Path(finished.sources[0].path), count=ROWS - 1)
    with pytest.raises(
        RunDirectoryError, match="1 rows answered there are no longer in the data: train-0020"
    ):
        quietly(finished)


def test_a_damaged_shard_is_an_error_with_its_file(finished: ScorePlan) -> None:
    shard = Path(finished.output_dir) / "shards" / "00001.answers.jsonl"
    shard.write_bytes(shard.read_bytes().replace(b"assistant", b"assisted!"))
    with pytest.raises(RunDirectoryError, match=r"00001.answers.jsonl: the shard is damaged: its bytes"):
        quietly(finished)


def test_an_engine_that_fails_on_a_row_fails_for_it_alone_and_the_next_run_asks_it_again(
    plan: ScorePlan, finished_once: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = TransformersEngine.answer

    def broken(engine: TransformersEngine, requests: list[Request]) -> Iterator[Completion]:
        if any(request.id == "train-0004" for request in requests):
            raise RuntimeError("this row breaks it")
        return answer(engine, requests)

    with monkeypatch.context() as patched:
        patched.setattr(TransformersEngine, "answer", broken)
        report = quietly(plan)
    assert (report.answered, report.failed) == (ROWS - 1, 1)
    error = lines(answers(plan))[3]["error"]
    assert (error["code"], error["message"]) == ("engine_failed", "RuntimeError: this row breaks it")
    asked: list[int] = []
    assert quietly(plan, progress=lambda done, total: asked.append(done)).failed == 0
    assert asked == [ROWS - 1, ROWS]
    assert answers(plan).read_bytes() == (finished_once / "answers.jsonl").read_bytes()


def test_rows_that_cannot_be_asked_carry_an_error_and_the_others_an_answer(plan: ScorePlan) -> None:
    good = {"prompt": "Where?", "completion": "Oslo"}
    rows = [good, good | {"prompt": ""}, good | {"prompt": "half \ud800"}, good]
    Path(plan.sources[0].path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = quietly(plan)
    assert (report.answered, report.failed) == (2, 2)
    written = [line["error"] and line["error"]["message"] for line in lines(answers(plan))]
    assert written[0] is None is written[3]
    assert "rows.jsonl:2: field 'prompt' is empty" in written[1]
    assert "unpaired surrogate (U+D800" in written[2]


def test_lines_of_openais_batch_input_are_answered_with_their_own_sampling(plan: ScorePlan) -> None:
    def line(number: int, **body: object) -> dict:
        messages = [{"role": "user", "content": "Where?"}]
        return {
            "custom_id": f"r-{number}", "method": "POST", "url": "/v1/chat/completions",
            "body": {"model": "any", "messages": messages, **body},
        }  # fmt: skip

    rows = [line(1), line(2, max_tokens=3), line(3, max_tokens=10**9), line(4, logit_bias={"1": 2})]
    Path(plan.sources[0].path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = quietly(plan)
    assert (report.answered, report.failed, report.grades) == (2, 2, {})
    found = lines(answers(plan))
    assert [row["custom_id"] for row in found] == ["r-1", "r-2", "r-3", "r-4"]
    tokens = [row["response"]["body"]["choices"][0]["token_ids"] for row in found[:2]]
    assert tokens[1] == tokens[0][:3]
    assert (
        "max_new_tokens = 1000000000: must be a whole number from 1 to 1,000,000"
        in found[2]["error"]["message"]
    )
    assert "body.logit_bias is not supported" in found[3]["error"]["message"]


def test_the_parquet_file_holds_what_the_lines_say(finished: ScorePlan) -> None:
    import pyarrow.parquet as pq

    rows = pq.read_table(Path(finished.output_dir) / "answers.parquet").to_pylist()
    for row, line in zip(rows, lines(answers(finished)), strict=True):
        choice = line["response"]["body"]["choices"][0]
        assert (row["custom_id"], row["answer"]) == (line["custom_id"], choice["message"]["content"])
        assert (row["logprob"], row["error"]) == (choice["logprob"], None)
    given = [json.loads(line)["grades"] for line in (Path(finished.output_dir) / "grades.jsonl").open()]
    assert [{name: row[f"grade_{name}"] for name in ("exact_match", "contains")} for row in rows] == given


def test_a_prompt_that_is_too_long_fails_alone(plan: ScorePlan) -> None:
    write_data(Path(plan.sources[0].path), changed="very " * 300 + "long")
    report = quietly(plan)
    assert (report.answered, report.failed) == (ROWS - 1, 1)
    line = lines(answers(plan))[3]
    assert line["response"] is None
    assert line["error"]["code"] == "prompt_too_long"
    assert "the model has room for 192" in line["error"]["message"]
    failed = why_not_all(report, Path(plan.output_dir))
    assert f"the first is train-0004: {line['error']['message']}" in str(failed)
    before = answers(plan).read_bytes()
    assert quietly(plan).failed == 1
    assert answers(plan).read_bytes() == before


def test_a_grader_that_fails_for_every_row_is_an_error_of_the_scoring(
    finished: ScorePlan, tmp_path: Path
) -> None:
    rules = tmp_path / "rules.py"
    rules.write_text("def half(*, answer, expected, prompt): return 1 / 0")
    report = quietly(replace(finished, graders=(f"python:{rules}:half",)))
    assert report.answered == ROWS
    failed = why_not_all(report, Path(finished.output_dir))
    assert failed is not None
    assert failed.exit_code == 1
    assert "failed for every row" in failed.message
    assert failed.message.endswith("the first is train-0001: ZeroDivisionError: division by zero")
    rules.write_text(
        "calls = []\ndef half(**_):\n    calls.append(1)\n    return 1 / (len(calls) - 1)"  # the first row alone
    )
    report = quietly(replace(finished, graders=(f"python:{rules}:half",)))
    assert list(report.grader_errors.values()) == [1]
    assert why_not_all(report, Path(finished.output_dir)) is None


def test_bad_ids_and_bad_graders_stop_everything_before_the_weights_are_read(plan: ScorePlan, tiny) -> None:
    rows = [{"id": "a", "prompt": "p", "completion": "c"}] * 2
    Path(plan.sources[0].path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    weights = tiny.folder / "model.safetensors"
    hidden = weights.rename(weights.with_suffix(".hidden"))
    try:
        with pytest.raises(DataError, match="repeat an id"):
            quietly(plan)
        with pytest.raises(RecipeError, match="meteor"):
            quietly(replace(plan, graders=("meteor",)))
    finally:
        hidden.rename(weights)
    assert not Path(plan.output_dir).exists()


@pytest.mark.parametrize("kind", ["file", "foreign", "answers without a manifest"])
def test_a_directory_that_is_not_ours_is_left_alone(plan: ScorePlan, kind: str) -> None:
    out = Path(plan.output_dir)
    if kind == "file":
        out.write_text("mine")
    else:
        out.mkdir()
        (out / ("thesis.tex" if kind == "foreign" else "answers.jsonl")).write_text("mine")
    with pytest.raises(RunDirectoryError):
        quietly(plan)
    assert [p.read_text() for p in (out.iterdir() if out.is_dir() else [out]) if p.name != "run.lock"] == [
        "mine"
    ]


def test_two_scorings_do_not_write_into_one_directory(plan: ScorePlan) -> None:
    refusals: list[FituneError] = []

    def start_a_second(done: int, total: int) -> None:
        if done == 0:
            with pytest.raises(RunDirectoryError, match="another run of this process") as caught:
                quietly(plan)
            refusals.append(caught.value)

    quietly(plan, progress=start_a_second)
    assert len(refusals) == 1


def test_libraries_are_not_searched_for_garbage_while_rows_are_answered(
    plan: ScorePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was there before the first row, then the model, too, and after the last row nothing."""
    frozen: list[int] = []
    answer = TransformersEngine.answer

    def counted(engine: TransformersEngine, requests: Sequence[Request]) -> Iterator[Completion]:
        frozen.append(gc.get_freeze_count())
        yield from answer(engine, requests)

    monkeypatch.setattr(TransformersEngine, "answer", counted)
    gc.unfreeze()
    try:
        score_dataset(
            model=plan.model, data=plan.sources[0].path, out=Path(plan.output_dir), tell=lambda event: None,
            sampling={"max_new_tokens": 2}, batch_size=1,
        )  # fmt: skip
        first, second = frozen
        assert 0 < first < second
        assert gc.get_freeze_count() == 0
    finally:
        gc.freeze()  # as the tests' own start leaves it


def test_a_line_is_read_once_for_all_graders_that_compare_texts(
    finished: ScorePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    rows = Shards.rows

    def counted(shards: Shards, number: int, kind: str = "answers") -> list[dict]:
        read.append(f"{number} {kind}")
        return rows(shards, number, kind)

    monkeypatch.setattr(Shards, "rows", counted)
    quietly(replace(finished, graders=("f1", "number", "exact_match")))
    assert sorted(read) == sorted(f"{number} {kind}" for number in range(3) for kind in ("answers", "tasks"))


@pytest.mark.parametrize("damage", ["{\n" * 8, "", "null\n" * 8, '{"other": 1}\n' * 8, "[" * 100_000 + "\n"])
def test_grades_that_were_damaged_are_an_error_with_their_file_and_without_it_they_are_made_again(
    finished: ScorePlan, damage: str
) -> None:
    """Grades have no hash of their own."""
    before = everything(finished)
    (path, *_) = (Path(finished.output_dir) / "shards").glob("00001.grades-*.jsonl")
    path.write_text(damage)
    with pytest.raises(RunDirectoryError, match="00001.grades-.*: damaged: ") as caught:
        quietly(finished)
    assert str(caught.value.hint).startswith("remove this file")
    path.unlink()
    quietly(finished)
    assert everything(finished) == before


@pytest.mark.parametrize("sizes", [(8, 3), (3, 8), (8, 2048)])
def test_a_scoring_goes_on_with_shards_of_another_size(plan: ScorePlan, sizes: tuple[int, int]) -> None:
    """Stopped after eleven rows, ended in other shards: the answers are those of one size, each row asked once more at
    most."""
    seen: list[int] = []

    def kill(done: int, total: int) -> None:
        if done == 11:
            raise Killed

    quietly(whole := replace(plan, output_dir=f"{plan.output_dir} whole"))
    with pytest.raises(Killed):
        quietly(replace(plan, shard_rows=sizes[0]), progress=kill)
    written = sum(len(Shards(Path(plan.output_dir)).rows(n)) for n in Shards(Path(plan.output_dir)).numbers())
    quietly(replace(plan, shard_rows=sizes[1]), progress=lambda done, total: seen.append(done))
    assert seen[0] == written == 11 // sizes[0] * sizes[0]
    for name in ("answers.jsonl", "grades.jsonl", "answers.parquet"):
        assert (Path(plan.output_dir) / name).read_bytes() == (Path(whole.output_dir) / name).read_bytes()


def test_an_engine_is_told_the_rows_of_the_next_shard_before_this_one_is_answered(
    plan: ScorePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those that cannot be asked; and data that grew goes on in shards of its own."""
    told: list[str] = []
    answer = TransformersEngine.answer

    def answered(engine: TransformersEngine, requests: Sequence[Request]) -> Iterator[Completion]:
        for completion in answer(engine, requests):
            told.append(completion.id)
            yield completion

    def prepare(_engine: TransformersEngine, requests: Sequence[Request]) -> None:
        told.extend(f"next {request.id}" for request in requests)

    monkeypatch.setattr(TransformersEngine, "answer", answered)
    monkeypatch.setattr(TransformersEngine, "prepare", prepare)
    rows = Path(plan.sources[0].path)
    bad = [json.dumps({"id": "bad", "prompt": "", "completion": "1"})]
    rows.write_text("\n".join([*rows.read_text().splitlines()[:11], *bad]) + "\n")
    quietly(plan)
    ids = [f"train-{number:04d}" for number in range(1, 12)]
    assert told[1:4] == [f"next {id_}" for id_ in ids[8:]]
    assert sorted(one for one in told if not one.startswith("next")) == ids
    del told[:]
    write_data(rows.with_name("more"), count=14)
    rows.write_text(rows.read_text() + "".join(rows.with_name("more").read_text().splitlines(True)[11:]))
    quietly(plan)
    assert sorted(told) == [f"train-{number:04d}" for number in (12, 13, 14)]


@pytest.mark.parametrize(
    ("engine", "dtype", "rows"),
    [
        ("transformers", "", 64),
        ("server", "", 64),
        ("vllm", "torch.float32", 64),
        ("vllm", "torch.bfloat16", 2048),
    ],
)
def test_shards_are_as_large_as_suits_the_engine(plan: ScorePlan, engine: Any, dtype: str, rows: int) -> None:
    assert rows_of_a_shard(replace(plan, engine=engine, dtype=dtype, batch_size=4)) == rows


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"ids": ["train-0001"]}, "differ in number"),
        ({"states": ["x"] * 8}, "0, 1 or 2"),
        ({"contents": [1] * 8}, "ids and contents are texts"),
        ({"states": [[]] * 8}, "0, 1 or 2"),
        ({"ids": 8}, "ids is not a list"),
        ({"sha256": "abc"}, "sha256 is not an object"),
        ({"sha256": {}}, "sha256 says nothing of its answers"),
    ],
)
def test_a_manifest_that_does_not_hold_together_is_an_error_with_its_file(
    finished: ScorePlan, change: dict, why: str
) -> None:
    path = shard_manifest(finished)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(RunDirectoryError, match=f"00000.json: the shard is damaged: .*{why}") as refused:
        quietly(finished)
    assert f"remove {path} to answer its rows again" in str(refused.value.hint)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "not JSON: line 1"),
        (b"[1, 2]", "it is not an object"),
        (b"{}", "it has no ids"),
        (b'{"ids": [], "contents": [], "states": []}', "it has no sha256"),
        (b"\x00\xff\xfe", "not UTF-8 at byte 1"),
    ],
)
def test_a_manifest_that_is_none_is_an_error_with_its_file(
    finished: ScorePlan, content: bytes, why: str
) -> None:
    shard_manifest(finished).write_bytes(content)
    with pytest.raises(RunDirectoryError, match=f"00000.json: the shard is damaged: {why}"):
        quietly(finished)


@pytest.mark.parametrize("kind", ["answers", "tasks"])
@pytest.mark.parametrize("lines", [5, 9])
def test_a_manifest_of_fewer_or_more_lines_than_its_files_is_an_error(
    finished: ScorePlan, kind: str, lines: int
) -> None:
    """Also where the hash was forged to be right."""
    path = shard_manifest(finished)
    file = path.with_suffix(f".{kind}.jsonl")
    written = (file.read_bytes().splitlines(keepends=True) * 2)[:lines]
    file.write_bytes(b"".join(written))
    found = json.loads(path.read_text())
    found["sha256"][kind] = hashlib.sha256(file.read_bytes()).hexdigest()
    path.write_text(json.dumps(found))
    with pytest.raises(RunDirectoryError, match=f"{kind}.jsonl: .* it has {lines} lines, its manifest 8"):
        quietly(finished)


def test_a_manifest_that_names_other_rows_than_its_answers_is_an_error(finished: ScorePlan) -> None:
    path = shard_manifest(finished)
    found = json.loads(path.read_text())
    for name in ("ids", "contents"):
        found[name] = found[name][::-1]
    path.write_text(json.dumps(found))
    with pytest.raises(
        RunDirectoryError,
        match="00000.answers.jsonl: .* line 8 answers 'train-0008', its manifest says 'train-0001'",
    ):
        quietly(finished)


@pytest.mark.parametrize("line", [b"{}", b"[]", b'{"custom_id": "train-0001"}', b"\xff", b'{"custom_id": 7'])
def test_an_answer_that_is_none_is_an_error_with_its_file(finished: ScorePlan, line: bytes) -> None:
    path = shard_manifest(finished)
    file = path.with_suffix(".answers.jsonl")
    file.write_bytes(b"\n".join([line, *file.read_bytes().splitlines()[1:]]) + b"\n")
    found = json.loads(path.read_text())
    found["sha256"]["answers"] = hashlib.sha256(file.read_bytes()).hexdigest()
    path.write_text(json.dumps(found))
    with pytest.raises(RunDirectoryError, match="00000.answers.jsonl: the shard is damaged"):
        quietly(finished)


def test_a_shard_of_another_run_is_an_error_with_its_file(finished: ScorePlan, finished_once: Path) -> None:
    path = shard_manifest(finished)
    shutil.copy(path.with_name("00001.json"), path)
    with pytest.raises(RunDirectoryError, match=r"00000.answers.jsonl: .* its bytes are not those"):
        quietly(finished)


def shard_manifest(plan: ScorePlan) -> Path:
    return Path(plan.output_dir) / "shards" / "00000.json"


@pytest.mark.parametrize("own", [{"max_tokens": 2.5}, {"seed": 0.5, "temperature": 1}])
def test_parts_of_a_token_are_an_error_of_their_row(plan: ScorePlan, own: dict) -> None:
    body = {"messages": [{"role": "user", "content": "Where?"}]}
    rows = [{"custom_id": "part", "body": body | own}, {"custom_id": "whole", "body": body}]
    Path(plan.sources[0].path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = quietly(plan)
    assert report.answered == 1
    assert text_of(report).startswith("1 of 2 rows answered, 1 failed")
    assert "must be a whole number from" in lines(answers(plan))[0]["error"]["message"]
