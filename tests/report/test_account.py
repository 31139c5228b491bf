"""The token ledger as an account: it adds up, whatever was counted."""

import dataclasses

import pytest

from fitune.report.page import account, remarks


@pytest.fixture
def ledger(run_report):
    return run_report.train_data


def totals(entries):
    """What the lines above "Kept" add up to."""
    kept = next(place for place, entry in enumerate(entries) if entry.what == "Kept")
    return sum(e.rows or 0 for e in entries[:kept]), sum(e.tokens or 0 for e in entries[:kept])


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
    lines = {entry.what: entry for entry in account(ledger)}
    assert lines["Dropped: empty answer"].rows == -9
    assert lines["Dropped: no supervised token"].rows == -5
    assert lines["Cut off the end of 21 long rows"].tokens == -2_114
    assert lines["Tokens of dropped rows"].tokens == -558
    assert lines["of these supervised"].tokens == 53_208


def test_rows_that_vanished_without_a_reason_are_called_that(ledger):
    lines = {entry.what: entry for entry in account(dataclasses.replace(ledger, rows_kept=1980))}
    assert lines["Rows lost without a reason"].rows == -6


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
