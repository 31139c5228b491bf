"""Compressed files, text, folders, patterns, separators: what is read, and what is refused with the file and why."""

import gzip
import json
import subprocess

import pyarrow
import pytest

from fitune.data.reading.sources import content_key, read_rows, rows_of
from fitune.errors import DataError, RecipeError
from fitune.planner.defaults import data_of
from fitune.values.plan import DataSource
from plans import recipe_of

ROWS = [{"prompt": f"question {i} é", "completion": f"answer {i}, and more"} for i in range(200)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
PACK = {".gz": gzip.compress, ".zst": lambda plain: pyarrow.compress(plain, codec="zstd", asbytes=True)}
PACKED = {suffix: pack(LINES) for suffix, pack in PACK.items()}
TABLE = "prompt,completion\n" + "".join(f'{r["prompt"]},"{r["completion"]}"\n' for r in ROWS)
PLAIN = {"jsonl": LINES, "json": json.dumps(ROWS).encode(), "csv": TABLE.encode(), "txt": LINES}


def read(path, **settings):
    return [row.fields for row in read_rows(DataSource(path=str(path), **settings))]


@pytest.mark.parametrize("content", [LINES.decode().encode("utf-16"), gzip.compress(LINES)])
def test_the_command_that_helps_can_be_pasted(tmp_path, content):
    """Its file has a space in its path."""
    folder = tmp_path / "my rows"
    folder.mkdir()
    (folder / "a b.jsonl").write_bytes(content)
    with pytest.raises(DataError) as caught:
        read(folder / "a b.jsonl")
    subprocess.run(["bash", "-c", caught.value.hint], check=True, cwd=folder)
    assert any(len(read(path)) == len(ROWS) for path in folder.glob("*.jsonl*") if path.name != "a b.jsonl")


@pytest.mark.parametrize("suffix", PACKED)
@pytest.mark.parametrize("layout", PLAIN)
def test_a_packed_file_gives_the_rows_of_the_plain_one(tmp_path, suffix, layout):
    plain, packed = tmp_path / f"rows.{layout}", tmp_path / f"packed.{layout}{suffix}"
    plain.write_bytes(PLAIN[layout])
    packed.write_bytes(PACK[suffix](PLAIN[layout]))
    told = []
    rows = list(rows_of(DataSource(path=str(packed)), on_bytes=told.append))
    assert [row.fields for row in rows] == read(plain)
    assert sum(told) == packed.stat().st_size, "progress counts the bytes of the file, not of what is inside"
    if layout == "jsonl":
        assert rows[3].where == f"{packed}:4"


def test_several_frames_one_after_another_are_one_file(tmp_path):
    """`cat a.gz b.gz`, pigz and zstd -T0 write such files."""
    for suffix, packed in PACKED.items():
        (tmp_path / f"rows.jsonl{suffix}").write_bytes(packed + packed)
        assert read(tmp_path / f"rows.jsonl{suffix}") == ROWS + ROWS


@pytest.mark.parametrize("suffix", PACKED)
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda packed: packed[:-6], "cut off in the middle"),
        (lambda packed: packed[:40] + bytes([packed[40] ^ 0xFF] * 30) + packed[70:], "damaged|cut off"),
        (lambda packed: LINES, "the name says (gzip|zstd), but the file begins with"),
    ],
)
def test_a_packed_file_that_is_not_whole_is_named(tmp_path, suffix, damage, said):
    file = tmp_path / f"rows.jsonl{suffix}"
    file.write_bytes(damage(PACKED[suffix]))
    with pytest.raises(DataError, match=f"rows.jsonl{suffix}: .*({said})") as caught:
        read(file)
    assert caught.value.hint


def test_a_file_of_the_other_codec_is_named_with_the_name_it_should_have(tmp_path):
    (tmp_path / "rows.jsonl.gz").write_bytes(PACKED[".zst"])
    with pytest.raises(DataError, match="the name says gzip, but the file is compressed with zstd") as caught:
        read(tmp_path / "rows.jsonl.gz")
    assert caught.value.hint.endswith("rows.jsonl.zst")
    (tmp_path / "rows.jsonl").write_bytes(PACKED[".zst"])
    with pytest.raises(DataError, match="compressed with zstd, and its name does not say so"):
        read(tmp_path / "rows.jsonl")


@pytest.mark.parametrize("name", ["rows.parquet.gz", "rows.jsonl.bz2", "rows.gz"])
def test_names_that_are_not_read_say_what_is(tmp_path, name):
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(DataError, match=rf"{name}: ") as caught:
        read(tmp_path / name)
    assert caught.value.hint


SEPARATED = [
    *(
        (
            f'prompt{mark}"completion"\n"one{mark} two\nthree"{mark}yes\nfour{mark}no\n',
            [(":2", f"one{mark} two\nthree", "yes"), (":4", "four", "no")],
        )
        for mark in ",;\t"
    ),
    ("prompt; long,completion\na;b,c\n", [(":2", "a;b", "c")]),
    ('"long\nprompt";completion\na;b\n', [(":3", "a", "b")]),
    ('"prompt";"completion"\n"a";"b"\n', [(":2", "a", "b")]),
]


@pytest.mark.parametrize(("text", "expected"), SEPARATED)
def test_columns_are_separated_by_what_the_header_says_outside_of_its_names(tmp_path, text, expected):
    (file := tmp_path / ("rows.tsv" if "\t" in text else "rows.csv")).write_text(text)
    rows = list(read_rows(DataSource(path=str(file))))
    assert [(row.where[-2:], *row.fields.values()) for row in rows] == expected
    assert all("completion" in row.fields for row in rows)


def test_a_folder_of_text_is_a_document_each(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "b.txt").write_text("second\n\nstill second")
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbffirst")
    (tmp_path / "deep" / "c.txt").write_text("third")
    assert [row["text"] for row in read(tmp_path)] == ["first", "second\n\nstill second", "third"]
    (tmp_path / "rows.jsonl").write_bytes(LINES)
    assert read(tmp_path) == ROWS, "text beside data is a README or a licence"


def test_shards_and_patterns_are_read_in_order(tmp_path):
    for number in (2, 0, 1):
        (tmp_path / f"part-{number}.jsonl.gz").write_bytes(gzip.compress(b'{"text": "%d"}\n' % number))
    (tmp_path / "notes.md").write_text("no data")
    assert [row["text"] for row in read(tmp_path)] == ["0", "1", "2"]
    assert [row["text"] for row in read(tmp_path / "part-[01].jsonl.gz")] == ["0", "1"]
    assert [row["text"] for row in read(f"{tmp_path}/**/*.gz#2")] != []
    assert content_key(DataSource(path=f"{tmp_path}/*.gz")) == content_key(DataSource(path=str(tmp_path)))
    with pytest.raises(DataError, match=r"\*.parquet: the pattern names no file"):
        read(tmp_path / "*.parquet")
    with pytest.raises(DataError, match=r"\*.md: none of the 1 files it names is data"):
        read(tmp_path / "*.md")


def test_a_folder_of_several_kinds_is_refused_with_the_counts(tmp_path):
    for name in ("a.jsonl", "b.jsonl", "a.csv"):
        (tmp_path / name).write_bytes(LINES)
    with pytest.raises(DataError, match="files of several kinds: 1 csv, 2 jsonl") as caught:
        read(tmp_path)
    assert caught.value.hint.endswith("/*.jsonl")
    (tmp_path / "a.csv").unlink()
    (tmp_path / "a.jsonl.zst").write_bytes(PACKED[".zst"])
    with pytest.raises(DataError, match=r"a.jsonl.zst: .*a.jsonl is there, too: the same rows"):
        read(tmp_path)


def test_weights_beside_the_sources_are_theirs():
    wanted = recipe_of("m", data=["a.jsonl", "b.jsonl"], data_weights="2, 0.5")
    assert [source.weight for source in data_of(wanted).sources] == [2.0, 0.5]


WEIGHED = [
    ("has 1 numbers .*names 2 sources: a.jsonl, b.jsonl", ["a.jsonl", "b.jsonl"], [1]),
    ("has 2 numbers .*names 0 sources: none", None, [1, 2]),
    ("a.jsonl has weight 2 of its own", [{"path": "a.jsonl", "weight": 2}], [1]),
]


@pytest.mark.parametrize(("said", "data", "weights"), WEIGHED)
def test_weights_that_do_not_match_are_refused(said, data, weights):
    with pytest.raises(RecipeError, match=said) as caught:
        data_of(recipe_of("m", data=data, data_weights=weights))
    assert caught.value.hint
