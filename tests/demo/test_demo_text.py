"""The demo's task can only be done by reading: no held-out answer stands in anything that was trained on."""

from fitune.demo.files import (
    CITIES,
    COLOURS,
    GOODS,
    HELD_OUT,
    NUMBERS,
    held_out_exercises,
    pretraining_texts,
    training_exercises,
)

TEXTS = list(pretraining_texts(2000, seed=1))
TRAIN = training_exercises(600, seed=1)
TEST = held_out_exercises(200, seed=1)


def fields(completion):
    return dict(part.split(": ") for part in completion.split(" | "))


def test_a_seed_gives_the_same_text_and_another_seed_another():
    assert list(pretraining_texts(2000, seed=1)) == TEXTS
    assert (training_exercises(600, seed=1), held_out_exercises(200, seed=1)) == (TRAIN, TEST)
    assert list(pretraining_texts(2000, seed=2)) != TEXTS
    assert training_exercises(600, seed=2) != TRAIN
    assert training_exercises(100, seed=1) == TRAIN[:100], "more rows are the same rows and more"


def test_rows_have_ids_and_prompts_of_their_own():
    rows = TRAIN + TEST
    assert len({row["id"] for row in rows}) == len({row["prompt"] for row in rows}) == len(rows)


def test_no_held_out_row_shares_goods_or_city_with_a_training_row():
    for name in ("goods", "city"):
        trained = {fields(row["completion"])[name] for row in TRAIN}
        asked = {fields(row["completion"])[name] for row in TEST}
        assert trained.isdisjoint(asked)
        assert len(asked) == HELD_OUT
        assert not any(value in row["prompt"] for row in TRAIN for value in asked)


def test_the_pretraining_text_knows_every_word_and_not_the_form():
    whole = "\n".join(TEXTS)
    for word in (*GOODS, *CITIES, *COLOURS, *NUMBERS):
        assert word in whole.lower() or word in whole
    assert " | " not in whole
    assert "List the order" not in whole
    assert "count" not in whole


def test_every_answer_can_be_read_in_its_prompt():
    for row in TRAIN + TEST:
        answer, prompt = fields(row["completion"]), row["prompt"].lower()
        assert list(answer) == ["goods", "colour", "count", "city"]
        for name in ("goods", "colour", "city"):
            assert answer[name].lower() in prompt
        words = [word for word in NUMBERS if f"{word} " in prompt]
        assert NUMBERS.index(words[0]) + 2 == int(answer["count"])


def test_a_text_says_everything_again():
    sentence, again = TEXTS[0].split(". ", 1)
    for words in (GOODS, CITIES):
        assert [word for word in words if word in sentence] == [word for word in words if word in again]
