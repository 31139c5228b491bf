"""Plans on the GPUs of this machine: how many, of which kind, with what others leave; and what each kind cannot do."""

from dataclasses import replace

import pytest

from fitune.measure.nvml import FoundGpu
from fitune.planner.explain import explain_plan
from fitune.planner.first_screen import first_screen
from fitune.planner.search import find_plan
from fitune.session.planning import wanted_hardware
from fitune.units import MIB
from fitune.values.machines.gpus import find_gpu
from fitune.values.model.model_spec import Dropout
from fitune.values.model.traits import flash_refused
from fitune.values.plan import Precision
from plans import known, lines_of, recipe_of

LLAMA = "llama-3.2-1b"
RTX_3060 = ("NVIDIA GeForce RTX 3060", 12288, (8, 6))
RTX_4090 = ("NVIDIA GeForce RTX 4090", 24564, (8, 9))


@pytest.fixture
def here(monkeypatch):
    """Puts these cards into this machine; other programs hold so many MiB of each."""

    def put(*cards, taken_mib=0):
        found = tuple(
            FoundGpu(
                index=i, uuid=f"GPU-{i}", name=name, memory_bytes=mib * MIB, capability=capability,
                taken_bytes=taken_mib * MIB,
            )
            for i, (name, mib, capability) in enumerate(cards)
        )  # fmt: skip
        monkeypatch.setattr("fitune.measure.hardware.gpus_here", lambda: found)

    return put


def report_here(settings="", model=LLAMA):
    recipe = recipe_of(model, settings, tuning="lora", **({"seq_len": 512} if model == LLAMA else {}))
    return find_plan(recipe, model=known(model), hardware=wanted_hardware(recipe))


def told(settings=""):
    """Words of the plan on where it runs, and lines on what was decided about the GPUs."""
    report = report_here(settings)
    title = " ".join(explain_plan(report).split("\n  LoRA")[0].split())
    return title.partition(" · on ")[2], lines_of(report, ("gpus", "note on memory"))


def test_the_first_screen_begins_with_them_and_what_others_hold_is_not_called_free(here):
    here(RTX_3060, RTX_4090, RTX_4090, taken_mib=1_500)
    first, _, rest = " ".join(first_screen(report_here(), {}, train="").split()).partition(" how ")
    assert first.endswith("2 × rtx-4090 (24 GiB, 1.5 taken by others); not used: 1 × NVIDIA GeForce RTX 3060")
    assert " of 20.31 GiB, " in rest
    assert "; 2.17 GiB kept free" in rest


def test_all_cards_of_the_kind_with_most_memory_are_planned_with_and_the_others_named(here):
    here(RTX_3060, RTX_4090, RTX_4090)
    where, decisions = told()
    assert where == "2 × rtx-4090 of 23.99 GiB; not used: 1 × NVIDIA GeForce RTX 3060"
    assert decisions == ["gpus: 2, all that are here and of this kind; gpus: 1 keeps one"]


def test_a_number_of_cards_is_kept(here):
    here(RTX_4090, RTX_4090)
    assert told("gpus: 1") == ("1 × rtx-4090 of 23.99 GiB; not used: 1 × NVIDIA GeForce RTX 4090", [])
    assert told("gpu: rtx-4090") == ("1 × rtx-4090 of 23.99 GiB", [])
    assert told("gpu: rtx-4090, gpus: 2")[0] == "2 × rtx-4090 of 23.99 GiB"


def test_what_a_desktop_holds_is_said_and_left_to_it(here):
    here(RTX_4090, taken_mib=1_500)
    where, [said] = told()
    assert where == "1 × rtx-4090 of 23.99 GiB, 1.50 GiB of it taken by other programs"
    assert said == (
        "note on memory: other programs hold 1.50 GiB of a GPU (nvidia-smi lists them): usable are 23.99 GiB - "
        "1.50 GiB - 2.17 GiB kept free = 20.31 GiB"
    )


def test_what_is_kept_free_on_an_unmeasured_kind_and_segments_of_fixed_sizes_are_said(here, monkeypatch):
    """The allocator is set in the environment of the process that plans."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "max_split_size_mb:128")
    here(RTX_4090)
    for settings in ("", "gpu: rtx-4090"):
        report = report_here(settings)
        assert lines_of(report, "no card of this kind was measured: 690.9 MiB of each stay free")
        assert lines_of(report, "torch's allocator has no expandable segments here")
        assert not report.chosen.plan.hardware.growing_segments


def test_a_card_that_is_nearly_full_has_other_plans(here):
    """A plan that took all of the card takes what is left of it."""
    peaks = []
    for taken_mib in (0, 5_000):
        here(RTX_4090, taken_mib=taken_mib)
        estimate = report_here(model="llama-3.1-8b").chosen.estimate
        peaks.append(estimate.peak_bytes)
        assert estimate.fits
    assert peaks[0] > 24_564 * MIB * 15 // 16 - 5_000 * MIB >= peaks[1]


@pytest.mark.parametrize(
    ("card", "head_dim", "dropout", "refused"),
    [
        ("rtx-3090", 192, 0.0, False),
        ("rtx-3090", 200, 0.0, True),
        ("jetson-agx-orin-64gb", 224, 0.0, True),  # 8.7
        ("rtx-5090", 224, 0.0, True),
        ("rtx-5090", 256, 0.0, False),
        ("rtx-5090", 256, 0.1, True),
        ("dgx-spark", 200, 0.0, True),  # 12.1
        ("a100-40gb", 224, 0.1, False),
        ("b200", 224, 0.1, False),
    ],
)
def test_heads_whose_backward_flash_attention_refuses(card, head_dim, dropout, refused):
    """As check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120 in torch's sdp_utils.cpp."""
    model = replace(known(LLAMA), head_dim=head_dim, dropout=Dropout(attention=dropout))
    why = flash_refused(model, find_gpu(card), Precision.BF16)
    assert (why is not None) is refused
    assert why is None or str(head_dim) in why


def test_a_v100_has_no_flash_attention_whatever_its_heads():
    for head_dim in (64, 256):
        model = replace(known(LLAMA), head_dim=head_dim)
        why = flash_refused(model, find_gpu("v100-16gb"), Precision.FP16)
        assert "8.0 or newer (Ampere), and v100-16gb has 7.0" in str(why)
