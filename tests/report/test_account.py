"""The token ledger as an account: it adds up, whatever was counted."""

import dataclasses

import pytest

from fitune.report.page import account, remarks


@pytest.fixture
def ledger(run_report):
    return run_report.train_data


def totals(lines):
    """What the lines above "Kept" add up to."""
    kept = next(place for place, (what, _, _) in enumerate(lines) if what == "Kept")
    return sum(rows or 0 for _, rows, _ in lines[:kept]), sum(tokens or 0 for _, _, tokens in lines[:kept])


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"rows_kept": 2100},
        {"rows_kept": 1900},
        {"dropped": {}},
        {"rows_cut": 0, "tokens_cut": 0},
        {"tokens_kept": 170_000},
    ],
)
def test_what_was_read_less_what_was_taken_off_is_what_was_kept(ledger, change):
    changed = dataclasses.replace(ledger, **change)
    assert totals(account(changed)) == (changed.rows_kept, changed.tokens_kept)


def test_every_reason_has_its_line(ledger):
    lines = account(ledger)
    assert ("Dropped: empty answer", -9, None) in lines
    assert ("Dropped: no supervised token", -5, None) in lines
    assert ("Cut off the end of 21 long rows", None, -2_114) in lines
    assert ("Tokens of dropped rows", None, -558) in lines
    assert ("of these supervised", None, 53_208) in lines


def test_rows_that_vanished_without_a_reason_are_called_that(ledger):
    assert ("Rows lost without a reason", -6, None) in account(dataclasses.replace(ledger, rows_kept=1980))


def test_the_remarks_say_how_full_the_packs_are(ledger):
    text = remarks(ledger, seq_len=512)
    assert text.startswith("Read as alpaca; the longest row has 742 tokens; 33.1 % of the kept tokens")
    assert f"321 packs of up to 512 tokens, {160_730 / (321 * 512) * 100:.1f} % full." in text


def test_an_empty_data_set_has_an_account_too(ledger):
    nothing = dataclasses.replace(
        ledger, rows_read=0, rows_kept=0, dropped={}, rows_cut=0, tokens_read=0, tokens_cut=0, tokens_kept=0,
        tokens_supervised=0, longest_row=0, formats=(), packs=0,
    )  # fmt: skip
    assert totals(account(nothing)) == (0, 0)
    assert remarks(nothing, seq_len=512) == "The longest row has 0 tokens."
