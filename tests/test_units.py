"""Numbers as text: what is printed can be read back, and no unit is ever printed as a thousand of itself."""

import math
import random

import pytest

from fitune import units
from fitune.errors import (
    FituneError,
    MissingExtra,
    RecipeError,
    ScoringFailed,
    TrainingFailed,
    did_you_mean,
    joined_hints,
)
from fitune.units import GIB, MIB
from fitune.values.words import describe_grade


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (1023.7, "1.0 KiB"),
        (512 * MIB, "512.0 MiB"),
        (GIB - 1, "1.00 GiB"),
        (round(9.08 * GIB), "9.08 GiB"),
        (1280 * GIB, "1,280.00 GiB"),
        (-3 * MIB, "-3.0 MiB"),
        (math.nan, "nan"),
    ],
)
def test_bytes_print_in_the_unit_a_person_would_take(value, text):
    assert units.format_bytes(value) == text


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("007", 7),
        ("101", None),
        ("9" * 5000, None),
        ("", None),
        ("²", None),
    ],
    ids=lambda value: str(value)[:9],
)
def test_whole_numbers_are_digits_up_to_a_limit(text, number):
    assert units.whole_number(text, most=100) == number


def test_printed_bytes_read_back_within_the_printed_digits():
    draw = random.Random(7)
    for _ in range(2000):
        value = int(2 ** draw.uniform(0, 50))
        text = units.format_bytes(value)
        number, unit = text.split()
        last_digit = units.parse_bytes(f"1 {unit}") / 10 ** len(number.partition(".")[2])
        assert abs(units.parse_bytes(text) - value) <= last_digit / 2 + 1


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("128GiB", 128 * GIB),
        ("24 GB", 24 * 10**9),
        ("512m", 512 * MIB),
        ("1.5 TiB", 1536 * GIB),
        (80, 80),
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_sizes_are_exact(text, value):
    assert units.parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "GiB", "-1 GiB", "nan", "1e9", "24 GHz", "1,5 GB", "١ GB"])
def test_no_size_is_guessed(text):
    with pytest.raises(ValueError, match="is not a size; write it like"):
        units.parse_bytes(text)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (999_499, "999 K"),
        (999_999, "1.00 M"),
        (8_190_735_360, "8.19 B"),
        (1.4e12, "1.40 T"),
    ],
)
def test_counts_keep_three_digits(value, text):
    assert units.format_count(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 ms"),
        (0.84, "840 ms"),
        (0.99996, "1.00 s"),
        (1.925, "1.93 s"),
        (59.96, "1 min 0 s"),
        (3599.6, "1 h 0 min"),
        (12_300, "3 h 25 min"),
        (200 * 3600, "8 d 8 h"),
        (math.inf, "inf"),
    ],
)
def test_durations_carry_into_the_next_unit(value, text):
    assert units.format_seconds(value) == text


def test_no_duration_prints_a_full_unit_of_its_own():
    for tenths in range(0, 40_000, 3):
        text = units.format_seconds(tenths / 10)
        assert not text.startswith(("1000 ms", "60.0 s"))
        assert " 60 s" not in text
        assert " 60 min" not in text


def test_rates_and_percentages():
    assert [units.format_rate(rate) for rate in (12_473.2, 99.96, 3.14)] == [
        "12,473 tokens/s", "100 tokens/s", "3.1 tokens/s",
    ]  # fmt: skip
    assert [units.format_percent(share) for share in (0.0243, -1e-6)] == ["2.4 %", "0.0 %"]
    assert [units.format_percent(share, signed=True) for share in (0.008, -1e-6)] == ["+0.8 %", "+0.0 %"]


def test_losses_keep_their_digits_and_never_hide():
    shown = [units.format_number(value) for value in (2.3, 0.00041237, 1234.4, 0, math.nan)]
    assert shown == ["2.300", "0.0004124", "1234", "0.000", "nan"]
    assert units.format_number(math.inf, digits=3) == "inf"
    assert [units.format_learning_rate(rate) for rate in (1.9e-4, 0.0)] == ["1.9e-04", "0"]


def test_an_error_says_what_and_what_to_try():
    error = RecipeError("lora_r = 0: must be positive", hint="lora_r: 16")
    assert str(error) == "lora_r = 0: must be positive\n  try: lora_r: 16"
    assert str(RecipeError("no hint")) == "no hint"
    assert MissingExtra("plots", extra="plots").hint == "pip install 'fitune[plots]'"
    assert joined_hints("did you mean 'a'?", None, "b", "c") == "did you mean 'a'? b; c"


def test_a_refusal_exits_with_2_and_failed_work_with_1():
    assert {kind.exit_code for kind in (RecipeError, MissingExtra, FituneError)} == {2}
    assert {kind.exit_code for kind in (TrainingFailed, ScoringFailed)} == {1}


def test_did_you_mean_offers_only_what_is_close():
    known = ("learning_rate", "Lora_R")
    assert did_you_mean("learning_rat", known) == "did you mean 'learning_rate'?"
    assert did_you_mean("lora_r", known) == "did you mean 'Lora_R'?"
    assert did_you_mean("zzz", known) is None


@pytest.mark.parametrize(("columns", "width"), [("80", 80), ("200", 100), ("20", 60)])
def test_a_narrow_terminal_has_lines_of_its_width(columns, width, monkeypatch):
    text = " ".join(["abcd"] * 99)
    assert max(map(len, units.wrapped(text).splitlines())) in range(96, 101)
    monkeypatch.setattr("os.isatty", lambda handle: True)
    monkeypatch.setenv("COLUMNS", columns)
    assert max(map(len, units.wrapped(text).splitlines())) in range(width - 4, width + 1)


def test_one_is_singular_and_ranges_are_short():
    assert [units.counted(number, "row") for number in (0, 1, 1200)] == ["0 rows", "1 row", "1,200 rows"]
    assert units.as_ranges((0, 1, 2, 7, 9, 10)) == "0–2, 7, 9–10"


@pytest.mark.parametrize(
    ("dollars", "text"), [(0, "$0.00"), (0.004, "under $0.01"), (0.01, "$0.01"), (1234.5, "$1,234.50")]
)
def test_a_cost_below_a_cent_is_not_nothing(dollars, text):
    assert units.format_dollars(dollars) == text


def test_a_grade_is_written_by_its_scale():
    grades = {"share": 0.45, "points": 7.314, "nats": -12.4}
    shown = [describe_grade(grade, scale) for scale, grade in grades.items()]
    assert shown == ["45.0 %", "7.31", "-12.40 nats"]
