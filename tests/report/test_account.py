"""The token ledger as an account: it adds up, whatever was counted."""

import dataclasses

import pytest

from fitune.report.page import account, remarks
from fitune.values.reports import Ledger


def totals(lines):
    """What the lines above "Kept" add up to."""
    kept = next(place for place, (what, _, _) in enumerate(lines) if what == "Kept")
    return sum(rows or 0 for _, rows, _ in lines[:kept]), sum(tokens or 0 for _, _, tokens in lines[:kept])


@pytest.mark.parametrize(
    "change",
    [
        {}, {"rows_kept": 2100}, {"rows_kept": 1900}, {"dropped": {}}, {"rows_cut": 0, "tokens_cut": 0},
        {"tokens_kept": 170_000},
    ],
)  # fmt: skip
def test_what_was_read_less_what_was_taken_off_is_what_was_kept(run_report, change):
    changed = dataclasses.replace(run_report.train_data, **change)
    assert totals(account(changed)) == (changed.rows_kept, changed.tokens_kept)


def test_every_reason_has_its_line_and_rows_that_vanished_without_one_are_called_that(run_report):
    assert {
        ("Dropped: empty answer", -9, None), ("Dropped: no supervised token", -5, None),
        ("Cut off the end of 21 long rows", None, -2_114), ("Tokens of dropped rows", None, -558),
        ("Rows lost without a reason", -6, None), ("of these supervised", None, 53_208),
    } <= {*account(dataclasses.replace(run_report.train_data, rows_kept=1980))}  # fmt: skip


@pytest.mark.parametrize(
    "change", [{"tokens_kept": 170_000}, {"dropped": {}}], ids=["gained", "nothing dropped"]
)
def test_tokens_that_no_dropped_row_explains_are_not_called_a_dropped_rows(run_report, change):
    lines = {what for what, _, _ in account(dataclasses.replace(run_report.train_data, **change))}
    assert "Tokens gained or lost otherwise" in lines
    assert "Tokens of dropped rows" not in lines


def test_the_remarks_say_how_full_the_packs_are(run_report):
    text = remarks(run_report.train_data, seq_len=512)
    assert text.startswith("Read as alpaca; the longest row has 742 tokens; 33.1 % of the kept tokens")
    assert "321 packs of up to 512 tokens, 97.8 % full." in text  # 160,730 / (321 · 512)


def test_an_empty_data_set_has_an_account_too():
    counts = (
        "rows_read", "rows_kept", "rows_cut", "tokens_read", "tokens_cut", "tokens_kept", "tokens_supervised",
        "longest_row",
    )  # fmt: skip
    nothing = Ledger(**dict.fromkeys(counts, 0), dropped={}, formats=())
    assert totals(account(nothing)) == (0, 0)
    assert remarks(nothing, seq_len=512) == "The longest row has 0 tokens."
