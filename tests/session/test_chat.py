"""A conversation: the ids of training, answers of the scoring engine, one load for a base and its adapter."""

import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

import fitune
from conftest import settings_of
from fitune.data.conversations.messages import Conversation, Message
from fitune.data.conversations.templates import PLAIN_TEMPLATE, load_template
from fitune.errors import ModelError, RecipeError, RunDirectoryError
from fitune.models.tokens import load_tokenizer
from fitune.score.engines import engine_transformers
from fitune.score.engines.engine_transformers import TransformersEngine
from fitune.session.named_models import find_model
from fitune.session.score.chat import Reply, converse, open_chat, side_by_side
from fitune.session.score.score_plan import weights_and_adapter

TEMPLATE = PLAIN_TEMPLATE.replace("### User", "### Customer").replace("### Assistant", "### Shop")
SAMPLING = {"max_new_tokens": 12, "temperature": 0.7, "top_p": 0.9, "seed": 5}


@dataclass
class Heard:
    """A screen that remembers; ``stop_after`` pieces somebody presses Ctrl-C."""

    stop_after: int = -1
    notes: list[str] = field(default_factory=list)
    pieces: dict[int, list[str]] = field(default_factory=dict)
    turns: list[list[Reply]] = field(default_factory=list)
    questions: list[str] = field(default_factory=list)

    def note(self, text):
        self.notes.append(text)

    def piece(self, place, text):
        self.pieces.setdefault(place, []).append(text)
        self.stop_after -= 1
        if self.stop_after == 0:
            raise KeyboardInterrupt

    def answered(self, place, reply):
        if not reply.error:
            assert "".join(self.pieces.pop(place)) == reply.text

    def turn(self, question, replies):
        self.questions.append(question)
        self.turns.append(list(replies))


@pytest.fixture(scope="module")
def run(model_folder, data_file, tmp_path_factory):
    """A LoRA run whose template is its own, and whose adapter changes what is answered."""
    folder = tmp_path_factory.mktemp("chat")
    (folder / "shop.jinja").write_text(TEMPLATE)
    own = {"learning_rate": 0.05, "max_steps": 3, "gradient_accumulation_steps": 1}
    own["chat_template"] = str(folder / "shop.jinja")
    fitune.train(**settings_of(model_folder, data_file, folder / "run", **own))
    (folder / "shop.jinja").unlink()  # the run has it
    return folder / "run"


def opened(*names, system="", **changed):
    return open_chat(
        [str(name) for name in names], system=system, sampling={**SAMPLING, **changed}, chat_template=""
    )


def answers(chat, *questions):
    heard = Heard()
    for question in questions:
        chat.ask(question, heard)
    return [[replace(reply, seconds=0.0) for reply in turn] for turn in heard.turns]


def test_the_ids_of_a_chat_are_those_of_training(run, model_folder, monkeypatch):
    tokenizer = load_tokenizer(str(model_folder))
    training = load_template(tokenizer)
    training = type(training)(tokenizer, TEMPLATE, name="the run's")
    asked, answer = [], TransformersEngine.answer

    def noting(engine, requests):
        asked.extend(request.prompt_ids for request in requests)
        return answer(engine, requests)

    monkeypatch.setattr(TransformersEngine, "answer", noting)
    chat = opened(run, system="You sell </s> hats.")
    answers(chat, "What is 2 plus 3?", "And 4\nplus 5?")
    messages = (Message("system", "You sell </s> hats."), *chat.sides[0].history)
    first = training.encode(Conversation(messages[:3], "here"))
    whole = training.encode(Conversation(messages, "here"))
    for ids, encoded in zip(asked, (first, whole), strict=True):
        assert list(ids) == encoded.ids[: len(ids)]
        assert encoded.supervised[len(ids)], "the answer begins there"
    assert not any(first.supervised[: len(asked[0])])


def test_a_base_and_its_adapter_are_loaded_once_and_answer_as_each_alone(run, model_folder):
    questions = ("What is 2 plus 3?", "What is 7 plus 8?")
    both = opened(model_folder, run)
    assert both.sides[0].engine.model is both.sides[1].engine.model
    assert sum("has no chat template" in note for note in both.notes) == 1  # of the base: the run has its own
    together = answers(both, *questions)
    base, tuned = answers(opened(model_folder), *questions), answers(opened(run), *questions)
    assert together == [[*one, *other] for one, other in zip(base, tuned, strict=True)]
    assert [turn[0].text for turn in together] != [turn[1].text for turn in together]
    both.reset()
    assert answers(both, *questions) == together
    assert answers(opened(run, model_folder), *questions) == [turn[::-1] for turn in together]


def test_an_adapter_with_tables_of_its_own_does_not_share_its_base(run, tmp_path, monkeypatch):
    monkeypatch.setattr("fitune.session.score.chat.saved_rows", lambda folder: 384)
    chat = opened(run / "adapter", find_model(str(run)).model)
    assert chat.sides[0].engine.model is not chat.sides[1].engine.model


def test_models_that_cannot_be_entered_one_by_one_are_streamed_too(run, monkeypatch):
    expected = answers(opened(run), "What is 2 plus 3?")
    monkeypatch.setattr(engine_transformers, "can_join", lambda model: False)
    assert answers(opened(run), "What is 2 plus 3?") == expected


def test_a_full_context_drops_the_oldest_turns_and_a_question_beyond_it_is_not_asked(run):
    chat, heard = opened(run, max_new_tokens=60, temperature=0.0), Heard()
    for number in range(6):
        chat.ask(f"What is {number} plus 3?", heard)
    assert any(
        "the context of 256 tokens is full: its oldest turns are dropped, 1 now" in note
        for note in heard.notes
    )
    (side,) = chat.sides
    assert side.history[-2] == Message("user", "What is 5 plus 3?")
    assert len(side.prompt_ids(side.history)) <= 256
    before = list(side.history)
    (reply,) = chat.ask("plus " * 400, heard)
    assert "the model has room for 256: not asked" in reply.error
    assert side.history == before
    unanswered = converse(chat, read=iter(["plus " * 400, "What is 2 plus 2?", None]).__next__, screen=heard)
    assert unanswered == 1
    chat.ask("plus " * 200, heard)
    assert "leaves room for" in heard.notes[-1]


def test_ctrl_c_stops_the_answer_and_the_conversation_goes_on(run, model_folder):
    chat, heard = opened(run, model_folder, temperature=0.0), Heard(stop_after=3)
    (only,) = chat.ask("What is 2 plus 3?", heard)
    assert (only.ended, only.tokens) == ("interrupted", 3)
    assert chat.sides[0].history[1:] == [Message("assistant", only.text)]
    assert [reply.ended == "interrupted" for reply in chat.ask("And 4 plus 5?", Heard())] == [False, False]


def test_lines_are_questions_and_commands_and_ctrl_c_gives_up_what_was_typed(run):
    chat, heard = opened(run), Heard()
    lines = iter(
        [
            "",
            "given up\\",
            KeyboardInterrupt(),
            "What is\\",
            "2 plus 3?",
            "/rest",
            "/reset",
            "What is\n",
            "/exit",
        ]
    )

    def read():
        line = next(lines)
        if isinstance(line, KeyboardInterrupt):
            raise line
        return line

    assert converse(chat, read=read, screen=heard) == 0
    assert [turn[0].error for turn in heard.turns] == ["", ""]
    assert heard.questions == ["What is\n2 plus 3?", "What is"]
    assert len(chat.sides[0].history) == 2
    assert heard.notes == [
        "\n(/exit or Ctrl-D ends)", "/rest is unknown; /reset begins anew, /exit ends", "the conversation begins anew",
    ]  # fmt: skip


def test_names_of_models(run, model_folder, tmp_path):
    named = find_model(str(run))
    assert (named.model, named.adapter, named.title) == (str(model_folder), str(run / "adapter"), "run")
    assert find_model(str(run / "adapter")).base == named.base == str(model_folder.resolve())
    assert find_model("owner/name").model == "owner/name"
    with pytest.raises(ModelError, match="neither a model .* nor a run"):
        find_model(str(tmp_path))
    with pytest.raises(ModelError, match="no such folder"):
        find_model("./absent")
    (tmp_path / "plan.json").write_text((run / "plan.json").read_text())
    with pytest.raises(RunDirectoryError, match="has exported nothing yet"):
        find_model(str(tmp_path))


def test_columns_keep_within_their_width():
    text = side_by_side(
        ["a", "b"], ["word " * 30, "漢" * 70 + "\n\nend"], ["[1]", "[2]"], width=83, most_lines=4
    )
    lines = text.splitlines()
    assert lines[0].split() == ["──", "a", "──", "b"]
    assert lines[-1].split() == ["[1]", "[2]"]
    assert len(lines) == 1 + 4 + 1
    assert lines[-2].endswith("end")
    from rich.cells import cell_len

    assert max(map(cell_len, lines)) <= 83


def test_a_scoring_takes_a_run_or_its_adapter_by_name_too(run, model_folder, tmp_path):
    base, adapter = str(model_folder), str(run / "adapter")
    for named in ((str(run), ""), (adapter, ""), (base, str(run)), (base, adapter)):
        found = weights_and_adapter(*named)
        assert (Path(found[0]).resolve(), found[1]) == (model_folder.resolve(), adapter)
    assert weights_and_adapter("owner/name", "") == ("owner/name", "")
    with pytest.raises(RecipeError, match="has the adapter .*adapter, and --adapter names other"):
        weights_and_adapter(str(run), "other")
    full = Path(shutil.copytree(run, tmp_path / "full"))
    shutil.rmtree(full / "adapter")
    shutil.copytree(model_folder, full / "model")
    assert weights_and_adapter(str(full), str(run)) == (str(full / "model"), adapter)
