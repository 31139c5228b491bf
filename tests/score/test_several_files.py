"""Several files are scored as one list of rows, in the order in which they are named."""

import pytest

import fitune
from fitune.errors import DataError, RunDirectoryError
from fitune.recipe.score_recipe import score_recipe
from fitune.session.score.score_plan import plan_of, read_lengths
from jsonl import read_lines, write_lines

CHOICE = {"question": "Which?", "choices": ["a", "b"], "answer": 0}
BATCH_LINE = {"custom_id": "x", "body": {"messages": [{"role": "user", "content": "Where?"}]}}


def asked(*names):
    return [{"id": name, "prompt": f"Where is {name}?", "completion": "Oslo"} for name in names]


@pytest.fixture
def files(tmp_path):
    """B is first in the alphabet's order of names, and second on the command line."""
    return [
        write_lines(tmp_path / "b.jsonl", asked("one", "two")),
        write_lines(tmp_path / "a.jsonl", asked("three")),
    ]


def scored(tiny, files, out, **more):
    return fitune.score(tiny.folder, files, out, max_new_tokens=2, batch_size=2, **more)


def ids(out):
    return [line["custom_id"] for line in read_lines(out / "answers.jsonl")]


def test_every_data_option_of_the_command_is_scored(tiny, files, tmp_path, call):
    words = ["--max-new-tokens", "2", "--model", tiny.folder, "--out", tmp_path / "out"]
    call("score", *words, *(f"--data={file}" for file in files)).ends(0)
    assert ids(tmp_path / "out") == ["one", "two", "three"]


def test_rows_are_answered_in_the_order_of_the_files_and_not_again(tiny, files, tmp_path):
    out = tmp_path / "out"
    report = scored(tiny, files, out)
    assert (report.rows, report.answered, report.rows_asked) == (3, 3, 3)
    assert report.data == f"{files[0]}, {files[1]}"
    assert ids(out) == ["one", "two", "three"]
    write_lines(files[0], asked("one", "two", "four"))
    grown = scored(tiny, files, out)
    assert (grown.rows, grown.rows_asked) == (4, 1)
    assert ids(out) == ["one", "two", "four", "three"]


def test_one_of_the_files_alone_is_another_scoring(tiny, files, tmp_path):
    scored(tiny, files, tmp_path / "out")
    with pytest.raises(RunDirectoryError, match=r"data: 'b\.jsonl, split train.*; a\.jsonl, split"):
        scored(tiny, files[:1], tmp_path / "out")


def test_rows_without_ids_are_numbered_over_all_files(tiny, tmp_path):
    nameless = [{"prompt": "Where?", "completion": "Oslo"}]
    files = [write_lines(tmp_path / name, nameless * 2) for name in ("b.jsonl", "a.jsonl")]
    scored(tiny, files, tmp_path / "out")
    assert ids(tmp_path / "out") == ["1", "2", "3", "4"]


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (asked("two", "one"), r"1 of 3 rows repeat an id of column 'id': 'one' at .*a\.jsonl:2, already"),
        ([CHOICE | {"id": "two"}], r"b\.jsonl has rows with references, .*a\.jsonl rows with choices"),
        ([BATCH_LINE], r"b\.jsonl has rows with references, .*a\.jsonl lines of OpenAI's batch input"),
        ([{"custom_id": "two", "prompt": "p", "completion": "c"}],
         r"b\.jsonl are named by column 'id', those of .*a\.jsonl named by column 'custom_id'"),
        ([{"prompt": "p", "completion": "c"}], r"those of .*a\.jsonl without ids"),
        ([], r"a\.jsonl"),
    ],
)  # fmt: skip
def test_files_that_are_no_one_list_of_rows_are_refused_by_name(tiny, tmp_path, second, words):
    files = [write_lines(tmp_path / "b.jsonl", asked("one")), write_lines(tmp_path / "a.jsonl", second)]
    with pytest.raises(DataError, match=words):
        scored(tiny, files, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_one_id_column_may_be_named_for_files_that_differ(tiny, tmp_path):
    rows = [
        {"id": "x", "key": "one", "prompt": "p", "completion": "c"},
        {"key": "two", "prompt": "p", "completion": "c"},
    ]
    files = [write_lines(tmp_path / f"{number}.jsonl", [row]) for number, row in enumerate(rows)]
    scored(tiny, files, tmp_path / "out", id_column="key")
    assert ids(tmp_path / "out") == ["one", "two"]


def test_a_plan_counts_the_rows_of_all_files(tiny, files):
    plan = plan_of(score_recipe(model=tiny.folder, data=files, max_new_tokens=2))
    assert read_lengths(plan).rows == 3
