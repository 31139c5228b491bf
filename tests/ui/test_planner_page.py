"""The planner's page says what the command line says, to this machine alone, and runs nothing that it is given."""

import json
import re
import subprocess
from html import unescape
from urllib.parse import urlencode

import pytest
from markupsafe import escape

from fitune.errors import RecipeError
from fitune.report.local_pages import local_app
from fitune.session import planner_page
from fitune.session.clusters.fleet import FleetRequest, plan_on_fleet
from fitune.session.planning import plan_for, plan_on_data
from fitune.session.recipes.reading import recipe_of
from fitune.units import format_bytes, format_rate
from fitune.values.machines.hardware import Measured
from fitune.values.model.known_models import find_known_model

QUESTIONS = (
    {"model": "meta-llama/Llama-3.1-8B", "gpu": "rtx-4090"},
    {"model": "Qwen/Qwen2.5-14B", "gpu": "rtx-4090", "gpus": "2", "tuning": "lora"},
    {"model": "llama-3.1-70b", "gpu": "h100", "gpus": "8", "nodes": "2", "seq_len": "8192"},
    {"model": "llama-3.1-8b", "gpu": "rtx-4090", "tuning": "qlora", "mean_row_tokens": "300"},
)
HOSTILE = "<img src=x onerror=alert(1)>"
LARGEST = 60_000
"""Bytes of an answer."""


@pytest.fixture(scope="module")
def client():
    from starlette.testclient import TestClient

    names = {"": "page", "answer": "answer", "ways": "ways", "rent": "rent", "clusters": "clusters"}
    answers = {address: getattr(planner_page, name) for address, name in names.items()}
    return TestClient(local_app(answers, token="secret"), base_url="http://127.0.0.1:8000")


@pytest.fixture
def ask(client):
    """The answer to a question as HTML."""
    return lambda address, question: client.get(f"/secret/{address}", params=question).text


def text_of(html):
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", html)).split())


@pytest.mark.thinned(4)
@pytest.mark.parametrize("question", QUESTIONS, ids=str)
def test_the_page_says_what_the_plan_says(ask, question):
    report = plan_on_data(recipe_of(None, {key: int(v) if v.isdigit() else v for key, v in question.items()}))
    estimate = report.taken.estimate
    html = ask("answer", question)
    text = text_of(html)
    assert "✔ FITS" in text
    assert not re.search("[,·] [,·]", text)
    assert f"{format_bytes(estimate.peak_bytes)} of {format_bytes(estimate.usable_bytes)}" in text
    assert format_rate(estimate.tokens_per_second) in text
    for key, value in question.items():
        assert f"--{key.replace('_', '-')} {value}" in text
    ways = ask("ways", question)
    for one in (report.chosen, *report.runners_up):
        assert f'data-value="{one.estimate.peak_bytes}"' in ways
    assert max(len(html), len(ways)) < LARGEST


def test_rows_of_data_are_a_job_with_time_and_cost(ask):
    question = {**QUESTIONS[0], "tuning": "qlora", "rows": "50000"}
    said = re.search(
        r"your job about 50,000 rows, 102 M tokens: (.*?), (\$[\d.]+)",
        text_of(ask("answer", question)),
    )
    table = text_of(ask("ways", question))
    assert "Time and cost are of 50,000 rows" in table
    assert f"{said[1]} {said[2]}" in table
    short = text_of(ask("answer", {**question, "mean_row_tokens": "300"}))
    assert "your job about 50,000 rows, 15.0 M tokens:" in short


def test_another_method_stands_once(ask):
    html = ask("ways", {"model": "Qwen/Qwen2.5-7B", "gpu": "rtx-4090"})
    rows = [text_of(row) for row in re.findall("<tr>.*?</tr>", html, re.DOTALL)]
    assert sum(" lora 1 × rtx-4090" in row for row in rows) > 1, "placements of the plan's own"
    assert sum(" qlora 1 × rtx-4090" in row for row in rows) == 1


def test_a_card_to_rent_has_the_plan_that_is_taken_there(ask):
    recipe = {"model": "meta-llama/Llama-3.1-8B", "tuning": "lora"}
    question = {**recipe, "gpu": "rtx-4090", "gpus": "3", "rows": "50000"}
    rows = ask("rent", {**question, "card": "h100"})
    devices = [re.search("(?:[248] × )?h100", text_of(row))[0] for row in rows.split("</tr>")[:-1]]
    assert devices == ["h100", "2 × h100", "4 × h100", "8 × h100"]
    report = plan_on_data(recipe_of(None, {**recipe, "gpu": "h100", "gpus": 8}))
    assert f'data-value="{report.taken.estimate.peak_bytes}"' in rows


def test_a_card_without_a_price_or_a_plan_has_no_row(ask):
    assert ask("rent", {"model": "llama-3.1-405b", "tuning": "full", "card": "t4"}).strip() == ""
    for card in ("gtx-1080-ti", HOSTILE):
        assert ask("rent", {"model": "gpt2", "tuning": "lora", "card": card}).strip() == ""


FLEET = """clusters:
- {name: desk, gpu: t4, host_memory: 8GiB}
- {name: hopper, gpu: h100, gpus: 8, nodes: 2, free: 1, wait: 1h, price: 2.5, live: ray, job: {context: far-away}}
- {name: ada, gpu: rtx-4090, gpus: 2, price: 0.35, kind: slurm}
"""


def test_own_clusters_are_ranked_as_plan_fleet_ranks_them(ask, tmp_path, monkeypatch):
    """With what was measured of a kind of card, too."""
    (tmp_path / "fleet.yaml").write_text(FLEET)
    proved = Measured(cards=1, memory_error=0.01, speed_error=0.0)
    monkeypatch.setattr("fitune.measure.hardware.measured_on", lambda key: proved if key == "h100" else None)
    recipe = recipe_of(None, {"model": "meta-llama/Llama-3.1-8B", "tuning": "lora"})
    ranking = plan_on_fleet(recipe, FleetRequest(file=tmp_path / "fleet.yaml", rows=50_000))
    monkeypatch.setattr(subprocess, "Popen", None)  # nobody is asked
    question = {"model": recipe.model, "tuning": "lora", "gpu": "no-card", "fleet": FLEET}
    html = ask("clusters", {**question, "rows": "50000"})
    rows = [text_of(row) for row in re.findall("<tr>.*?</tr>", html, re.DOTALL)][1:]
    assert len(rows) == len(ranking.offers) + len(ranking.without) == 4
    for row, offer in zip(rows, ranking.offers, strict=False):
        for words in (offer.cluster.name, offer.way, *offer.row()[1:4], offer.cost_words):
            assert words in row
        assert f'data-value="{offer.priced.estimate.peak_bytes}"' in html
    assert "✘ desk" in rows[-1]
    assert text_of(ranking.text()) in text_of(html)
    assert "489 rows, 1.00 M tokens" in text_of(ask("clusters", question)), "without rows a million tokens"


@pytest.mark.parametrize(
    ("fleet", "said"),
    [
        ("clusters:\n- {name: a, gpu: h100}\n- {name: b gpu: h100}\n", "the pasted fleet file:3:"),
        ("clusters: [{name: a, gpu: h100, prise: 3}]", "unknown key 'prise'; did you mean 'price'"),
        ("/etc/passwd", "found str"),
        ("clusters: [{name: a, gpu: t4, host_memory: 8GiB}]", "nothing fits on any cluster: a: "),
        (f"clusters: [{{name: '{HOSTILE}', gpu: '{HOSTILE}'}}]", f"gpu = '{HOSTILE}'"),
    ],
)
def test_an_error_of_a_fleet_is_said_beside_the_answer(ask, fleet, said):
    alone = {**QUESTIONS[0], "tuning": "lora"}
    html = ask("clusters", {**alone, "fleet": fleet})
    assert 'class="reason"' in html
    assert said in text_of(html)
    assert "<img" not in html
    answer = ask("answer", {**alone, "fleet": fleet})
    assert "✔ FITS" in text_of(answer)
    assert answer == ask("answer", alone)


def test_an_error_of_the_rest_is_the_answers_alone(ask):
    for question in ({}, {"gpu": "h100", "fleet": FLEET}, {**QUESTIONS[0], "seq_len": "x", "fleet": FLEET}):
        assert ask("clusters", question) == ""


@pytest.mark.parametrize(
    ("question", "said"),
    [
        ({"model": "meta-llama/Lama-3.1-8B", "gpu": "h100"}, "did you mean 'meta-llama/Llama-3.1-8B'?"),
        ({"model": "llama-3.1-8b", "gpu": "rtx-4090", "seq_len": "many"}, "seq_len"),
        ({"model": "llama-3.1-8b", "output_dir": "runs"}, "the page knows no 'output_dir'"),
        ({"model": "llama-3.1-8b", "rows": "0"}, "rows = '0' is not a whole number from 1 to"),
        ({"model": "llama-3.1-8b", "rows": "9" * 5000}, f"rows = '{'9' * 40}' is not a whole number"),
        ({"config": "{", "gpu": "h100"}, "the pasted config.json is no JSON"),
        ({"config": "[1]", "gpu": "h100"}, "no JSON object"),
        ({"config": "{}", "gpu": "h100"}, "model_type is missing"),
    ],
)
def test_an_error_is_the_plain_message(client, question, said):
    reply = client.get("/secret/answer", params=question)
    assert reply.status_code == 200
    assert said in text_of(reply.text)
    assert client.get("/secret/ways", params=question).text == ""


def test_a_question_that_nothing_fits_is_planned_once(ask, monkeypatch):
    plans = []

    def counted(recipe, **settings):
        plans.append(recipe.model)
        return plan_for(recipe, **settings)

    monkeypatch.setattr(planner_page, "plan_for", counted)
    question = {"model": "qwen2.5-14b", "gpu": "t4", "tuning": "full"}
    assert "DOES NOT FIT" in text_of(ask("answer", question))
    assert ask("ways", question) == ""
    assert plans == ["qwen2.5-14b"]


def test_a_pasted_config_plans_as_the_model_of_that_config(ask):
    config = json.dumps(dict(find_known_model("meta-llama/Llama-3.1-8B").config))
    pasted = text_of(ask("answer", {"config": config, "gpu": "rtx-4090"}))
    named = text_of(ask("answer", QUESTIONS[0]))
    memory = re.compile(r"[\d.]+ GiB of [\d.]+ GiB, ")
    assert memory.search(pasted)[0] == memory.search(named)[0]
    assert "--model YOUR_MODEL_FOLDER" in pasted


def test_no_path_of_a_question_is_read(ask, tmp_path, monkeypatch):
    config = dict(find_known_model("meta-llama/Llama-3.1-8B").config) | {"num_hidden_layers": 2}
    folder = tmp_path / "llama-3.1-8b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    assert "8.03 B" in ask("answer", {"model": "llama-3.1-8b", "gpu": "rtx-4090"})
    for path in (str(folder), "./llama-3.1-8b", "~/model", str(folder / "config.json")):
        text = text_of(ask("answer", {"model": path, "gpu": "rtx-4090"}))
        assert "the page takes the names it lists" in text


def test_words_of_a_question_are_escaped(ask):
    for key in ("model", "gpu", "seq_len", "rows", "config", HOSTILE):
        for name in ("", "answer", "ways"):
            assert "<img" not in ask(name, {"model": "llama-3.1-8b", "gpu": "rtx-4090"} | {key: HOSTILE})
    config = json.dumps({"model_type": HOSTILE, "_name_or_path": HOSTILE, "architectures": [HOSTILE]})
    assert "<img" not in ask("answer", {"config": config})
    html = ask("clusters", {**QUESTIONS[0], "fleet": f"clusters: [{{name: '{HOSTILE}', gpu: h100}}]"})
    assert "<img" not in html
    assert HOSTILE in text_of(html)


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/secret/", {}, 200),
        ("/secret/", {"origin": "http://127.0.0.1:8000"}, 200),
        ("/secret/answer", {"origin": "http://evil.example"}, 403),
        ("/secret/answer", {"origin": "null"}, 403),
        ("/secret/answer", {"host": "evil.example:8000"}, 403),
        ("/secret/answer", {"host": "127.0.0.1.evil.example:8000"}, 403),
        ("/answer", {}, 403),
        ("/secret/other", {}, 404),
        ("/sécret/", {}, 403),
    ],
)
def test_only_this_machine_with_the_token_is_answered(client, path, headers, status):
    reply = client.get(path, headers=headers)
    assert reply.status_code == status
    assert status == 200 or "secret" not in reply.text


def test_an_old_link_is_answered_with_what_to_do_and_nothing_of_the_request(client):
    replies = {client.get(path, params={"model": HOSTILE}).text for path in ("/old/", f"/{HOSTILE}/", "/x/a")}
    assert len(replies) == 1
    assert "fitune ui 'THE LINK'" in replies.pop()


@pytest.mark.parametrize(
    ("link", "query"),
    [
        ("http://127.0.0.1:1/OLD/?model=Qwen%2FQwen2.5-14B&gpus=2", "?model=Qwen%2FQwen2.5-14B&gpus=2"),
        ("http://evil.example:99999999/OLD/?gpu=rtx-4090", "?gpu=rtx-4090"),
        (" model=a+b&rows=5\n", "?model=a+b&rows=5"),
        ("config=%7B%22%C3%A9%22%3A1%7D&fleet=x", "?config=%7B%22%C3%A9%22%3A1%7D&fleet=x"),
        ("?model=a%0D%0AHost:x", "?model=a%0D%0AHost%3Ax"),
    ],
)
def test_a_link_keeps_its_question_and_nothing_else(link, query):
    assert planner_page.query_of_link(link) == query


@pytest.mark.parametrize(
    "link",
    [
        "", "http://127.0.0.1:1/OLD/", "javascript:alert(1)", "http://[/?model=a", "?model=%ff", "?model", "?=a",
        "?password=a", "?model=a&x=1", "?model=\udcff", "x" * 100_000, "?config=" + "x" * 100_000,
        "?config=" + "{" * 20_000,  # three times as long in an address
    ],
)  # fmt: skip
def test_a_link_without_a_question_is_an_error_that_shows_one(link):
    with pytest.raises(RecipeError, match="is no link of a planner's page") as raised:
        planner_page.query_of_link(link)
    assert "?model=Qwen/Qwen2.5-14B&gpu=rtx-4090" in raised.value.hint
    assert len(raised.value.message) < 200


def test_other_verbs_and_long_questions_are_refused(client):
    assert client.post("/secret/answer").status_code == 405
    assert client.get("/secret/answer", params={"config": "x" * 50_000}).status_code == 414


def test_the_page_allows_its_own_script_alone(client):
    html = client.get("/secret/").text
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)[1]
    assert policy.startswith("default-src 'none'; ")
    assert "script-src 'sha256-" in policy
    assert "unsafe" not in policy.replace("style-src 'unsafe-inline'", "")
    assert html.count("<option value=") > 300


def test_a_link_holds_the_whole_question(client):
    config = json.dumps({"model_type": "llama", "a": 'ü & <b> "'})
    question = {"model": "a&b", "gpu": "rtx-4090", "gpus": "2", "nodes": "3", "tuning": "qlora", "seq_len": "77",
                "mean_row_tokens": "7", "rows": "5", "config": config, "fleet": f"{FLEET}# <b>"}  # fmt: skip
    html = client.get(f"/secret/?{urlencode(question)}").text
    for key in ("model", "gpu", "gpus", "nodes", "seq_len", "mean_row_tokens", "rows"):
        assert f'name="{key}" value="{question[key].replace("&", "&amp;")}"' in html
    assert "<option selected>qlora" in html
    assert config in unescape(html)
    assert f">{escape(FLEET)}# &lt;b&gt;</textarea>" in html


PLAN = ("plan", "--model", "gpt2", "--gpu", "rtx-4090", "--tuning", "lora")


@pytest.fixture
def file(call, tmp_path):
    """What a command writes as a page, and what it prints."""

    def written(*words, code=0):
        path = tmp_path / "plan.html"
        ended = call(*words, "--html", path)
        assert ended.code == code
        assert f"page: {path}" in ended.out
        return path.read_text(encoding="utf-8"), ended.out

    return written


def test_a_file_needs_no_network_and_no_server(file):
    html, _ = file(*PLAN)
    assert "✔ FITS" in html
    assert "Every way that fits" in html
    assert not re.search(r"""<form|connect-src|(src|href|action)=|@import|url\(|https?://""", html)
    assert len(html) < LARGEST


def test_a_file_has_no_secret_of_the_environment(file, monkeypatch):
    """Neither in the command nor in the first screen, which names it again."""
    monkeypatch.setenv("WANDB_API_KEY", "abcdefghijklmnop12")
    html, _ = file(*PLAN, "--run-name", "abcdefghijklmnop12")
    assert "abcdefghijklmnop12" not in html
    assert html.count("--run-name [hidden]") + html.count("--run-name &#39;[hidden]&#39;") == 2


def test_a_file_says_too_that_nothing_fits(file):
    html, _ = file("plan", "--model", "llama-3.1-70b", "--gpu", "rtx-4090", "--tuning", "full", code=2)
    assert "✘ DOES NOT FIT" in html
    assert "Changes that work" in html
    assert "Every way that fits" not in html


def test_a_file_of_a_plan_on_data_has_the_other_ways_of_the_terminal(file, tmp_path):
    """They are for the average row of the data: of full rows two cards were among them."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "What is 2 plus 3?", "completion": "5"}\n' * 200)
    html, out = file("plan", "--model", "gpt2", "--gpu", "t4", "--data", rows)
    screen = out.partition("\npage: ")[0]
    assert "Other ways" in screen
    assert text_of(screen) in text_of(html)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*PLAN, "--html", "."], "is a folder"),
        ([*PLAN, "--html", "none/x.html"], "cannot be written"),
        (["ui", "https://evil.example/?word=a"], "is no link of a planner's page"),
        (["ui", "--runs", "none"], "--runs none: no such folder"),
    ],
)
def test_a_wrong_place_is_one_plain_error(tmp_path, monkeypatch, call, words, said):
    monkeypatch.chdir(tmp_path)
    ended = call(*words)
    assert ended.code
    assert ended.err.startswith("error: ")
    assert said in ended.err
