"""Several processes train the model of one: equal losses and weights, checkpoints that any number goes on from."""

import json
import shutil
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from conftest import QUESTIONS, plan_of
from fitune.estimate.predict import predict_memory
from fitune.session.exporting import export_run
from fitune.values.plan import Ddp, Offload, Precision, Single, Zero
from jsonl import write_lines
from models.tiny_models import beside_tokenizer
from optional_libraries import NEEDS_DEEPSPEED
from runs import (
    assert_close,
    losses,
    report_of,
    steps_of,
    trained,
    written_plan,
)
from several import Job, train_on

pytestmark = pytest.mark.first


LOSS, WEIGHT, FP16_LOSS = 1e-5, 1e-6, 1e-4
COMMON = {"max_steps": 3, "val_fraction": 0.2, "eval_steps": 2}
"""The third step is the last of an epoch, and has what is left of 21 rows."""
FULL = {"tuning": "full", "learning_rate": 1e-3}
LORA = {"tuning": "lora"}
QLORA = {"tuning": "qlora", "packing": True, "micro_batch_size": 1}
MOMENTUM = {"optimizer": "momentum", "momentum": 0.9}
TIED = {**FULL, **MOMENTUM, "model": "tied"}
CASES = {
    "full, stage 3": (FULL, 3),
    # the last step has one row, and the second rank none
    "full, stage 2": ({**FULL, "micro_batch_size": 5, "gradient_checkpointing": 1}, 2),
    "full, stage 1": ({**FULL, **MOMENTUM}, 1),
    # the last step of an epoch has five rows, so the second rank has a micro-batch without any
    "tied, DDP": ({**TIED, "micro_batch_size": 1, "gradient_accumulation_steps": 16}, 0),
    "lora, DDP": ({**LORA, "gradient_checkpointing": True}, 0),
    "qlora, stage 3": (QLORA, 3),
}
AT_ONCE = {"micro_batch_size": 8, "gradient_accumulation_steps": 1}
LOMO = {**AT_ONCE, "tuning": "lomo", "learning_rate": 0.3}
ADALOMO = {**AT_ONCE, "tuning": "adalomo", "learning_rate": 0.1, "max_grad_norm": 0.5}
IN_BACKWARD = {**FULL, **AT_ONCE, "optimizer_in_backward": True, "max_grad_norm": 1.0}
CASES |= {
    "lomo by value, stage 3": ({**LOMO, "max_grad_value": 0.05}, 3),
    "tied lomo by norm, stage 3": (
        {**LOMO, "model": "tied", "micro_batch_size": 10, "max_grad_norm": 0.5, "gradient_checkpointing": 1},
        3,
    ),
    "adalomo, stage 3": (ADALOMO, 3),
    "adamw in backward, stage 2": ({**IN_BACKWARD, "optimizer": "adamw"}, 2),
}
ON_HOST = Offload(parameters="cpu", optimizer="cpu")
CASES |= {
    "full on the host, stage 3": (FULL, 3),
    "qlora on the host, stage 3": ({"tuning": "qlora", "gradient_checkpointing": True, **MOMENTUM}, 3),
    "lora with activations on the host, stage 2": (LORA, 2),
}
OFFLOADED = {
    "full on the host, stage 3": ON_HOST,
    "qlora on the host, stage 3": ON_HOST,
    "lora with activations on the host, stage 2": Offload(activations="cpu"),
}
"""A CPU has no other memory, so no recipe says this there; the plans are made by hand."""
GOES_ON = {
    "full": (FULL, "full, stage 3"),
    "adalomo": (ADALOMO, "adalomo, stage 3"),
    "qlora": (QLORA, "qlora, stage 3"),
}
"""Runs that are stopped after two steps, and the case that goes straight to the end."""
MOVED = {"stage 3 to stage 3": 3, "stage 3 to DDP": 0, "DDP to stage 2": 2, "one process to stage 3": 3}
"""A full run, of two processes where it says no other, that goes on by two with DDP (0), or at this stage."""
CASES |= {
    "full, stage 3 of DeepSpeed": ({**FULL, "gradient_checkpointing": 1}, 3),
    "lora, stage 2 of DeepSpeed": (LORA, 2),
    "tied, stage 1 of DeepSpeed": (TIED, 1),
    # the held-out rows of the first rank are several chunks of the loss, and the second has none of them
    "lora on the host, stage 3 of DeepSpeed": ({**LORA, **MOMENTUM, "loss_chunk_tokens": 8}, 3),
}
OFFLOADED["lora on the host, stage 3 of DeepSpeed"] = ON_HOST
GOES_ON["full of DeepSpeed"] = (FULL, "full, stage 3 of DeepSpeed")
MOVED |= {"stage 3 to stage 2 of DeepSpeed": 2, "stage 3 from DeepSpeed": 3}
OVERFLOWS = {
    "lomo, stage 3": {**LOMO, "model": "steep", "max_grad_value": 1.0, "learning_rate": 1e-3},
    "full, stage 2 of DeepSpeed": {**FULL, "model": "steep"},
}
"""Runs in fp16 whose first steps overflow, and are skipped."""
UNEXPORTED = {"lora": ("adapter", 0), "full": ("model", 3)}
"""Methods whose export has something in its way: its folder, and the stage. At stage 3 the others hand their weights
to the first rank."""
STOPPED, MISCOUNTED, OVERFLOWING, IN_THE_WAY = "stopped", "miscounted", "overflowing ", "unexported"


def possible(cases):
    """Those that need no library that is not installed."""
    installed = find_spec("deepspeed") is not None
    return {name: case for name, case in cases.items() if installed or "DeepSpeed" not in name}


def marked(cases):
    """The names, those of DeepSpeed's cases skipped where it is not installed."""
    marks = (pytest.mark.deepspeed, NEEDS_DEEPSPEED)
    return [pytest.param(name, marks=marks) if "DeepSpeed" in name else name for name in cases]


def divided(plan, world, stage, output_dir, *, by="fsdp"):
    """``plan`` for ``world`` processes, at the same global batch: fewer micro-batches on each."""
    steps = plan.batch.global_batch_size // world
    micro = min(plan.batch.micro_batch_size, steps)
    batch = replace(plan.batch, micro_batch_size=micro, accumulation=steps // micro)
    hardware = replace(plan.hardware, gpus_per_node=world)
    sharding = Single() if world == 1 else Ddp() if stage == 0 else Zero(stage=stage, backend=by)
    return replace(
        plan, batch=batch, hardware=hardware, sharding=sharding, run=replace(plan.run, output_dir=str(output_dir))
    )  # fmt: skip


def backend_of(name):
    return "deepspeed" if "DeepSpeed" in name else "fsdp"


def gradient_norms(folder):
    return [step.grad_norm for step in steps_of(folder)]


def evaluations(folder):
    return [s.eval_loss for s in steps_of(folder) if s.eval_loss is not None]


def counts(folder):
    report = report_of(folder)
    return report.trainable_parameters, report.total_parameters


def largest_difference(one, other):
    """Of all exported weights, adapter or model."""
    [file] = [*one.glob("adapter/*.safetensors"), *one.glob("model/*.safetensors")]
    ours, theirs = load_file(file), load_file(other / file.relative_to(one))
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


@pytest.fixture(scope="module")
def make(model_folder, tmp_path_factory):
    data = tmp_path_factory.mktemp("rows") / "questions.jsonl"
    write_lines(data, QUESTIONS[:24])
    folders = {
        "": model_folder,
        "tied": tied_like(model_folder, tmp_path_factory.mktemp("tied")),
        "steep": steep_like(model_folder, tmp_path_factory.mktemp("steep")),
    }
    unused = tmp_path_factory.mktemp("unused")

    def make(*, model="", **settings):
        return plan_of(folders[model], data, unused, **{**COMMON, **settings})

    return make


def tied_like(folder, tied):
    """A model of the same shape and tokenizer whose head is its embedding, in ``tied``."""
    config = LlamaConfig.from_pretrained(folder, tie_word_embeddings=True)
    torch.manual_seed(0)
    return beside_tokenizer(LlamaForCausalLM(config), folder, tied)


def steep_like(folder, steep):
    """A model whose embeddings are so small that their fp16 gradients overflow at the first loss scale."""
    model = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(0.1)
    return beside_tokenizer(model, folder, steep)


SAME_LOSSES = ("gradient_checkpointing", "loss_chunk_tokens")


def alone_in(folder, settings):
    """Where the run of one process is: it is that of all cases whose settings give the same losses."""
    telling = (f"{name}={value}" for name, value in settings.items() if name not in SAME_LOSSES)
    return folder / "alone" / " ".join(telling)


@pytest.fixture(scope="module")
def results(make, tmp_path_factory):
    """Every case by two processes and by one, runs that stop, go on or fail, and one with too few processes."""
    folder = tmp_path_factory.mktemp("several")
    jobs = []
    for name, (settings, stage) in possible(CASES).items():
        plan = make(**settings)
        if not (alone := alone_in(folder, settings)).exists():
            trained(divided(plan, 1, stage, alone))
        planned = divided(plan, 2, stage, folder / name, by=backend_of(name))
        jobs.append(Job(plan=replace(planned, offload=OFFLOADED.get(name, Offload()))))
    for name, settings in possible(OVERFLOWS).items():
        plan = replace(make(**settings, max_steps=6, val_fraction=0.125), precision=Precision.FP16)
        trained(divided(plan, 1, 3, folder / f"{OVERFLOWING}{name} alone"))
        stage = 2 if "stage 2" in name else 3
        jobs.append(Job(plan=divided(plan, 2, stage, folder / f"{OVERFLOWING}{name}", by=backend_of(name))))
    for name, (settings, _) in possible(GOES_ON).items():
        plan = divided(make(**settings, async_save=True), 2, 3, folder / STOPPED / name, by=backend_of(name))
        jobs.append(Job(plan=plan, stop_after=2))
    full = make(**FULL)
    jobs.append(Job(plan=divided(full, 2, 0, folder / STOPPED / "full by DDP"), stop_after=2))
    trained(divided(full, 1, 0, folder / STOPPED / "full by one"), stop_after=2)
    sources = {
        "DDP to stage 2": "full by DDP",
        "one process to stage 3": "full by one",
        "stage 3 from DeepSpeed": "full of DeepSpeed",
    }
    for name, stage in possible(MOVED).items():
        saved = folder / STOPPED / sources.get(name, "full") / "checkpoints/step-2"
        planned = divided(full, 2, stage, folder / name, by=backend_of(name.partition(" from ")[0]))
        jobs.append(Job(plan=planned, resume=str(saved)))
    for tuning, (export, stage) in UNEXPORTED.items():
        run = folder / IN_THE_WAY / tuning
        run.mkdir(parents=True)
        (run / export).write_text("in the way")
        jobs.append(Job(plan=divided(make(tuning=tuning, max_steps=1), 2, stage, run)))
    four = make(micro_batch_size=1, gradient_accumulation_steps=4)
    jobs.append(Job(plan=divided(four, 4, 3, folder / MISCOUNTED)))
    (folder / "said.json").write_text(json.dumps(train_on(2, jobs, folder / "jobs")))
    return folder


def said(results):
    return json.loads((results / "said.json").read_text())


@pytest.mark.parametrize("name", marked(CASES))
def test_two_processes_train_the_model_of_one(results, name):
    alone = alone_in(results, CASES[name][0])
    assert_close(results / name, alone, within=LOSS)
    assert gradient_norms(results / name) == pytest.approx(gradient_norms(alone), rel=1e-4)
    assert evaluations(results / name) == pytest.approx(evaluations(alone), abs=LOSS)
    assert largest_difference(results / name, alone) < WEIGHT
    assert counts(results / name) == counts(alone)


def test_all_ranks_say_the_same(results):
    first, second = (each[: -1 - len(UNEXPORTED)] for each in said(results))
    assert first == second
    assert [each["status"] for each in first] == [
        *["complete"] * (len(possible(CASES)) + len(possible(OVERFLOWS))),
        *["interrupted"] * (len(possible(GOES_ON)) + 1),
        *["complete"] * len(possible(MOVED)),
    ]


@pytest.mark.parametrize("tuning", UNEXPORTED)
def test_ranks_save_together_what_could_not_be_exported(results, tuning):
    """And it is exported from there."""
    run, (export, _) = results / IN_THE_WAY / tuning, UNEXPORTED[tuning]
    job = list(UNEXPORTED).index(tuning) - 1 - len(UNEXPORTED)
    first, second = (rank[job]["error"] for rank in said(results))
    assert f"weights are saved in {run / 'checkpoints' / 'step-1'}, but exporting failed" in first
    assert "already exists" in second
    (run / export).unlink()
    export_run(run, None, "adapter" if tuning == "lora" else "full")
    assert list((run / export).glob("*.safetensors"))


@pytest.mark.parametrize("name", marked(OVERFLOWS))
def test_ranks_skip_together_the_steps_that_overflow_in_one_process(results, name):
    """The norm is that of all ranks, so an overflow in one rank's share is everybody's."""
    folder = results / f"{OVERFLOWING}{name}"
    alone = results / f"{OVERFLOWING}{name} alone"
    two, one = ([(step.skipped, step.loss_scale) for step in steps_of(each)] for each in (folder, alone))
    assert two == one
    assert {skipped for skipped, _ in two} == {True, False}
    assert_close(folder, alone, within=FP16_LOSS)


def test_the_report_has_a_row_for_every_rank(results):
    report = report_of(results / "full, stage 3")
    assert [row.rank for row in report.ranks] == [0, 1]
    for row in report.ranks:
        assert row.waiting_seconds is not None
        assert 0 < row.waiting_seconds < row.step_seconds
    assert report.memory is not None
    assert report.memory.phases == {
        phase: max(row.memory[phase] for row in report.ranks) for phase in report.memory.phases
    }


def test_measured_memory_of_a_rank_is_what_was_predicted(results):
    for name in possible(CASES).keys() - OFFLOADED.keys():
        plan = written_plan(results / name)
        report = report_of(results / name)
        predicted = predict_memory(plan).tensor_peak_bytes  # of full rows: the data's are shorter
        assert report.memory is not None
        assert report.memory.peak_bytes < 1.02 * predicted, name


def test_another_number_of_processes_than_planned_is_refused(results):
    for rank in said(results):
        assert "the plan is for 4 ranks, and 2 were started" in rank[-1]["error"]


@pytest.mark.parametrize("name", marked(GOES_ON))
def test_a_run_of_two_goes_on_with_one_process(make, results, tmp_path, name):
    broken = tmp_path / "broken"
    shutil.copytree(results / STOPPED / name, broken, symlinks=True)
    settings, case = GOES_ON[name]
    following = divided(make(**settings), 1, 3, broken)
    assert trained(following, resume=True).status == "complete"
    straight = alone_in(results, CASES[case][0])
    assert_close(broken, straight, within=LOSS)
    assert largest_difference(broken, straight) < WEIGHT


@pytest.mark.parametrize("name", marked(MOVED))
def test_a_run_goes_on_under_another_strategy(results, name):
    straight = results / "full, stage 3"
    if name == "stage 3 to stage 3":
        assert losses(results / name) == losses(straight)
        assert largest_difference(results / name, straight) == 0
    assert_close(results / name, straight, within=LOSS)
    assert largest_difference(results / name, straight) < WEIGHT


def test_every_rank_writes_its_share_of_what_is_divided(results):
    saved = results / STOPPED / "full/checkpoints/step-2"
    sizes = {group: [(saved / f"{group}-rank{rank}.safetensors").stat().st_size for rank in (0, 1)]
             for group in ("model", "optimizer")}  # fmt: skip
    assert all(0.8 < first / second < 1.25 for first, second in sizes.values())
    assert load_file(saved / "model.safetensors") == {}
    assert not (results / STOPPED / "full by DDP/checkpoints/step-2/slices.json").exists()


@pytest.mark.slow
def test_two_nodes_of_two_share_within_each_and_train_the_model_of_one(make, tmp_path):
    """Every node holds all shares; a checkpoint of them goes on alone."""
    cases = {"lora": {"tuning": "lora", "micro_batch_size": 1}, "full": {**FULL, "micro_batch_size": 1}}
    jobs = []
    for name, settings in cases.items():
        alone = make(gradient_accumulation_steps=8, **settings)
        trained(divided(alone, 1, 0, tmp_path / f"{name} alone"))
        for stage in (2, 3):
            plan = divided(alone, 4, stage, tmp_path / f"{name}, stage {stage}")
            hardware = replace(plan.hardware, nodes=2, gpus_per_node=2)
            hybrid = Zero(stage=stage, backend="fsdp", hybrid=True)
            jobs.append(Job(plan=replace(plan, hardware=hardware, sharding=hybrid)))
    stopped = replace(jobs[-1].plan, run=replace(jobs[-1].plan.run, output_dir=str(tmp_path / STOPPED)))
    ended = train_on(4, [*jobs, Job(plan=stopped, stop_after=2)], tmp_path / "jobs")
    assert [each["status"] for each in ended[3]] == ["complete"] * len(jobs) + ["interrupted"]
    for name in cases:
        alone_at = tmp_path / f"{name} alone"
        for stage in (2, 3):
            folder = tmp_path / f"{name}, stage {stage}"
            assert_close(folder, alone_at, within=LOSS)
            assert gradient_norms(folder) == pytest.approx(gradient_norms(alone_at), rel=1e-4)
            assert largest_difference(folder, alone_at) < WEIGHT
    alone = make(gradient_accumulation_steps=8, **cases["full"])
    assert trained(divided(alone, 1, 0, tmp_path / STOPPED), resume=True).status == "complete"
    assert_close(tmp_path / STOPPED, tmp_path / "full alone", within=LOSS)
