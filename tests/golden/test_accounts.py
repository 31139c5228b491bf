"""No number of a plan moves unseen: 200 accounts are as they were when accounts.jsonl was written."""

import json

import pytest

from fitune.errors import NothingFits
from fitune.planner import nothing_fits
from fitune.recipe.recipe import parse_recipe
from fitune.session.planning import plan_for
from fitune.values.model.tracer import trace_with
from golden.accounts import FILE, account, recipes

GOLDEN = [json.loads(line) for line in FILE.read_text().splitlines()]


def differences(was, now, where=""):
    """Places where two accounts differ: bytes by more than 0.2 %, seconds by more than 1 %, anything else at all."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in sorted(was.keys() | now.keys()):
            yield from differences(was.get(key), now.get(key), f"{where}/{key}")
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for index, (before, after) in enumerate(zip(was, now, strict=True)):
            yield from differences(before, after, f"{where}/{index}")
    elif isinstance(was, int | float) and isinstance(now, int | float) and not where.startswith("/plan"):
        if abs(now - was) > (0.01 if where.startswith("/seconds") else 0.002) * abs(was):
            yield f"{where}: {was} -> {now}"
    elif was != now:
        yield f"{where}: {was} -> {now}"


def test_the_file_is_of_these_recipes():
    assert [each["recipe"] for each in GOLDEN] == list(recipes())


@pytest.mark.parametrize(
    "golden",
    [
        pytest.param(each, id=str(number), marks=[pytest.mark.slow] if number % 4 else [])
        for number, each in enumerate(GOLDEN)
    ],
)
def test_the_account_is_as_it_was(golden, monkeypatch):
    """Advice is no part of it, and takes longer than the search."""
    if golden.get("refused") == "NothingFits":
        monkeypatch.setattr(nothing_fits, "nothing_fits", lambda *_: NothingFits(""))
    now = json.loads(json.dumps(account(golden["recipe"])))
    assert not list(differences(golden, now))


REFUSED = {
    str(number): each["recipe"] for number, each in enumerate(GOLDEN) if each.get("refused") == "NothingFits"
}


@pytest.mark.parametrize(
    "number",
    [pytest.param(number, marks=[pytest.mark.slow] if number != "144" else []) for number in REFUSED],
)
def test_no_change_is_advised_twice(number):
    """Neither in its words nor as the beginning of another, which then asks for more than is needed."""
    trace_with(None)
    with pytest.raises(NothingFits) as caught:
        plan_for(parse_recipe(REFUSED[number]))
    hints = caught.value.hint.replace("; ", ", or ").split(", or ")
    changes = [each["change"] for each in caught.value.facts["changes"]]
    for words in (hints, changes):
        twice = [
            (one, other)
            for place, one in enumerate(words)
            for other in words[place + 1 :]
            if other.startswith(one)
        ]
        assert not twice
