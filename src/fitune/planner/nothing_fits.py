"""The error when nothing fits, with the changes that would: each is named only if a plan with it was found to fit."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fitune.errors import NothingFits
from fitune.estimate.overhead import enough_host_bytes
from fitune.estimate.predict import predict
from fitune.estimate.step import StepStages
from fitune.planner.candidates import Request
from fitune.planner.defaults import ROW_STEP, with_cards, with_host_memory
from fitune.planner.explain import describe_how, host_sum, verdict_of
from fitune.planner.fit import fits, host_fits, last_true, shortage
from fitune.planner.method_search import MethodSearch
from fitune.planner.methods import methods_for, to_adapters
from fitune.planner.search import first_choice
from fitune.units import GIB, format_bytes, wrapped
from fitune.values.counts import count_parameters
from fitune.values.machines.cards import known_cards
from fitune.values.machines.gpus import find_gpu, hardware_for, most_gpus
from fitune.values.model.known_models import names_with_formulas
from fitune.values.model.model_config import load_model_spec
from fitune.values.plan import Plan, Precision
from fitune.values.predictions import Estimate, Rejection
from fitune.values.rules import adds_gradients_up, keeps_rules
from fitune.values.words import describe_offload, describe_plan

LARGE_CARD = "a100-80gb"
"""Whose machines are named where nothing fits here."""
LARGE_MACHINES = ((1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (8, 4))
"""Cards in a node, nodes."""
MOST_CHANGES = 5
NEAREST = 3
"""So many changes that come closest are named where none is enough."""


def nothing_fits(
    request: Request, smallest: Sequence[StepStages], rejected: Sequence[Rejection]
) -> NothingFits:
    """The error to raise; ``smallest`` is the smallest plan of every method that was searched."""
    model, hardware = request.model, request.hardware
    best = min(smallest, key=shortage)
    needed = predict(best.plan)
    devices = f"{hardware.num_gpus} ×" if hardware.num_gpus > 1 else "one"
    changes = _Changes(request=request, best=best)
    host_alone_is_short = needed.peak_bytes <= needed.usable_bytes and not host_fits(best)
    lines = [
        f"nothing fits: {model.name} on {devices} {hardware.gpu.name} of {format_bytes(hardware.gpu.memory_bytes)}, "
        f"{format_bytes(needed.usable_bytes)} usable",
        *(f"{wrapped(item.what)}\n{wrapped(item.why, indent=4)}" for item in rejected),
        *(() if host_alone_is_short else _missing_on_devices(best.plan)),
        *changes.about_the_host(),
    ]
    facts = {
        "what": verdict_of(replace(best.plan, hardware=hardware)),
        "how": describe_how(best.plan),
        "needed_bytes": needed.peak_bytes,
        "usable_bytes": needed.usable_bytes,
        "short": list(_short(needed)),
        "changes": list(changes.planned()),
    }
    return NothingFits("\n".join(lines), hint=changes.advice(), facts=facts)


OF_HOST = "of host memory a node"


def _short(needed: Estimate) -> Iterator[dict[str, object]]:
    """Where it is short, with bytes."""
    for of, size, usable in (
        ("a device", needed.peak_bytes, needed.usable_bytes),
        (OF_HOST, needed.host_bytes, needed.usable_host_bytes),
        ("of NVMe a node", needed.nvme_bytes, needed.usable_nvme_bytes),
    ):
        if usable and size > usable:
            yield {"of": of, "needed_bytes": size, "usable_bytes": usable}


def setting_words(settings: Mapping[str, object], *, as_options: bool) -> str:
    """``--seq-len 1024 without --zero`` as options, ``seq_len: 1024, without zero`` as keys of a recipe."""
    parts = []
    for key, value in settings.items():
        name = f"--{key.replace('_', '-')}" if as_options else key
        said = str(value).lower() if isinstance(value, bool) else value
        given = f"{name} {said}" if as_options else f"{name}: {said}"
        parts.append(f"without {name}" if value is None or value is False else given)
    return (" " if as_options else ", ").join(parts)


def _missing_on_devices(plan: Plan) -> Iterator[str]:
    """The smallest plan, how much of a device it is short of, and the known GPU with the least memory that holds it."""
    needed = predict(plan)
    peak, short = needed.peak_bytes, needed.peak_bytes - needed.usable_bytes
    yield f"smallest memory that is enough: {format_bytes(peak)} a device ({format_bytes(short)} short), with"
    yield wrapped(describe_plan(plan))
    needs_bf16 = plan.precision in (Precision.BF16, Precision.BF16_MASTER)
    with_own_memory = (card.gpu for card in known_cards() if not card.host_bytes)
    can_run_it = (gpu for gpu in with_own_memory if gpu.has_bf16 or not needs_bf16)
    cards = sorted(can_run_it, key=lambda gpu: gpu.memory_bytes)
    for gpu in cards:
        there = predict(replace(plan, hardware=replace(plan.hardware, gpu=gpu)))
        if there.peak_bytes <= there.usable_bytes:
            yield f"the smallest known GPU that holds it: {gpu.name}"
            return
    largest = max(cards, key=lambda gpu: gpu.memory_bytes)
    yield f"no known GPU holds it (the largest, {largest.name}, has {format_bytes(largest.memory_bytes)})"


@dataclass(frozen=True, kw_only=True)
class _Changes:
    """Changes of a request for which nothing fits; each is searched like the request itself."""

    request: Request
    best: StepStages

    def advice(self) -> str:
        """Changes that were computed to fit; failing that, what the largest single change leaves short."""
        helpful = [words for words, *_ in self._helpful]
        helpful += [f"seq_len: {self._longest_row}"] if self._longest_row else []
        if helpful:
            return ", or ".join(helpful)
        notes = []
        for words, step, _ in sorted(self._tried, key=lambda tried: shortage(tried[1]))[:NEAREST]:
            estimate = predict(step.plan)
            needs = (
                format_bytes(estimate.peak_bytes) if host_fits(step) else f"on the host {host_sum(estimate)}"
            )
            notes.append(f"{words} would need {needs}")
        model = largest_known_model(self.request, self._is_enough)
        notes += [f"the largest known model that fits this way is {model}"] if model is not None else []
        return "a smaller model or more memory; " + "; ".join(notes)

    @cached_property
    def _tried(self) -> list[tuple[str, StepStages, dict[str, object]]]:
        """Changes with their smallest plans."""
        return [
            (words or setting_words(settings, as_options=False), step, settings)
            for words, settings in self._settings()
            if (step := self._smallest(settings)) is not None
        ]

    @cached_property
    def _helpful(self) -> list[tuple[str, StepStages, dict[str, object]]]:
        """Changes that fit. A change that adds settings to one that is enough alone is left out."""
        found: list[tuple[str, StepStages, dict[str, object]]] = []
        for change in self._tried:
            if fits(change[1]) and not change[0].startswith(tuple(words for words, *_ in found)):
                found.append(change)
        return found

    def planned(self) -> Iterator[dict[str, object]]:
        """At most MOST_CHANGES that fit, each of another kind, as they would be planned: first those that keep the
        method, then other methods, more cards, a larger machine."""
        recipe, kinds = self.request.recipe, set[object]()
        for changed, settings in self._requests():
            said = {key: value for key, value in settings.items() if getattr(recipe, key) != value}
            kind = said.get("tuning", next(iter(said)))
            found = first_choice(changed) if kind not in kinds and len(kinds) < MOST_CHANGES else None
            if found is not None and found.estimate.fits:
                kinds.add(kind)
                yield {
                    "change": setting_words(said, as_options=False),
                    "settings": said,
                    "peak_bytes": found.estimate.peak_bytes,
                    "tokens_per_second": found.estimate.tokens_per_second,
                }

    def _requests(self) -> Iterator[tuple[Request, dict[str, object]]]:
        """Changed requests, and what differs; of the others so many that there is room for a larger machine."""
        settings = [settings for _, _, settings in self._helpful]
        keeping = [each for each in settings if not {"tuning", "gpus"} & each.keys()]
        keeping += [{"seq_len": self._longest_row}] if self._longest_row else []
        others = [each for each in settings if {"tuning", "gpus"} & each.keys()]
        first_of = {each.get("tuning", next(iter(each))): each for each in reversed([*keeping, *others])}
        for each in [*reversed(first_of.values())][: MOST_CHANGES - 1]:
            yield self._changed(each), each
        yield from self._larger_machines(beside=[*keeping, *others])

    def _larger_machines(
        self, *, beside: Sequence[dict[str, object]]
    ) -> Iterator[tuple[Request, dict[str, object]]]:
        """The method wished for on the fewest large cards that hold it; where nothing else helps, adapters too."""
        recipe = self.request.recipe
        lesser = [
            to_adapters(recipe, name)[1] for name in ("lora", "qlora") if recipe.tuning not in (None, name)
        ]
        for settings in ({}, *([] if beside else lesser)):
            if (found := on_large_cards(self.request.with_pins(**settings))) is not None:
                there = machine_settings(found)
                if self.request.recipe.gpu == LARGE_CARD:
                    del there["gpu"]
                if there not in beside:
                    yield found, {**settings, **there}

    def about_the_host(self) -> Iterator[str]:
        """Says how much of a node's memory or NVMe is missing where it fits the devices with offload."""
        for method in methods_for(self.request):
            step = MethodSearch(self.request, method).least_host()
            if step is not None:
                needed = predict(step.plan)
                missing, enough = [], []
                for short in _short(needed):
                    if short["of"] == OF_HOST:
                        missing.append(f"the host: {host_sum(needed)}")
                        enough.append(f"host_memory: {-(-enough_host_bytes(needed.host_bytes) // GIB)}GiB")
                    else:
                        usable = format_bytes(needed.usable_nvme_bytes)
                        missing.append(f"NVMe: {format_bytes(needed.nvme_bytes)} a node, {usable} usable")
                        enough.append(f"nvme_size: {-(-needed.nvme_bytes // GIB)}GiB")
                words = f"with {describe_offload(step.plan.offload)} it fits the devices but not"
                said = f"{words} {'; nor '.join(missing)}; {' with '.join(enough)} is enough"
                yield wrapped(said, indent=0)
                return

    def _settings(self) -> Iterator[tuple[str, dict[str, object]]]:
        """Changes, and words where the settings do not say it all: settings first, then more devices."""
        recipe, hardware, batch = self.request.recipe, self.request.hardware, self.best.plan.batch
        yield from self._in_backward()
        if recipe.tuning in ("full", "lomo", "adalomo"):
            yield to_adapters(recipe, "lora")
        if recipe.tuning in ("full", "lomo", "adalomo", "lora") and not recipe.quantization_is_asked_for:
            words, settings = to_adapters(recipe, "qlora")
            yield words, {**settings, "quantization": None}
        if recipe.precision == "fp32" and hardware.gpu.has_bf16:
            yield "", {"precision": "bf16-master"}
        if recipe.precision == "bf16-master":
            yield "", {"precision": "bf16"}
        if batch.micro_batch_size > 1 and adds_gradients_up(self.best.plan.tuning):
            yield "", {"micro_batch_size": 1, "gradient_accumulation_steps": batch.global_batch_size}
        if recipe.gradient_checkpointing is not None:
            yield "gradient_checkpointing open", {"gradient_checkpointing": None}
        if recipe.loss == "plain":
            yield "", {"loss": "chunked"}
        if recipe.kernels == "torch" and keeps_rules(replace(self.best.plan, kernels="liger"), "plan"):
            yield "kernels: liger (pip install 'fitune[liger]')", {"kernels": "liger"}
        for pin in ("zero", "backend", "hybrid_sharding"):
            if getattr(recipe, pin) is not None:
                yield f"{pin} open", {pin: None}
        for pin in ("offload_parameters", "offload_optimizer", "offload_activations"):
            if getattr(recipe, pin) == "device":
                yield "", {pin: "cpu"}
        here = hardware.gpus_per_node
        if recipe.gpu is not None and not hardware.gpu.is_cpu:
            for gpus in (2 * here, 4 * here, 8 * here):
                if gpus <= most_gpus(recipe.gpu):
                    yield "", {"gpus": gpus}

    def _in_backward(self) -> Iterator[tuple[str, dict[str, object]]]:
        """Full fine-tuning on one device without all gradients at once, by AdaLomo also without optimizer states."""
        recipe, devices = self.request.recipe, self.request.hardware.num_gpus
        if recipe.tuning != "full" or recipe.optimizer_in_backward:
            return
        is_open = recipe.global_batch_size is None and recipe.micro_batch_size is None
        one_row = {"global_batch_size": devices, "gradient_accumulation_steps": None}
        at_once: dict[str, object] = {"optimizer_in_backward": True}
        if devices == 1 and not {"cpu", "nvme"} & {recipe.offload_parameters, recipe.offload_optimizer}:
            if recipe.gradient_accumulation_steps in (None, 1):
                yield "", at_once
            if is_open:
                words = "optimizer_in_backward: true with micro_batch_size: 1, then the whole batch"
                yield words, {**at_once, **one_row}
        adalomo: dict[str, object] = {"tuning": "adalomo", "precision": None}
        words = "tuning: adalomo, which trains every weight too"
        yield words, adalomo
        if is_open:
            yield f"{words}, with micro_batch_size: 1 as the whole batch", {**adalomo, **one_row}

    def _smallest(self, settings: dict[str, object]) -> StepStages | None:
        """The smallest plan with ``settings``; None when there is no plan with them."""
        changed = self._changed(settings)
        methods = methods_for(changed)
        found = [step for method in methods if (step := MethodSearch(changed, method).smallest()) is not None]
        return min(found, key=shortage, default=None)

    def _changed(self, settings: dict[str, object]) -> Request:
        changed = self.request.with_pins(**settings)
        if "gpus" not in settings:
            return changed
        hardware = with_cards(changed.hardware, changed.recipe.gpus or 1, changed.recipe)
        return replace(changed, hardware=hardware)

    @cached_property
    def _longest_row(self) -> int:
        """The longest seq_len, a multiple of 64, at which the smallest plan's method fits; 0 when none is."""

        def is_enough(steps: int) -> bool:
            """True if rows of ``steps`` · ROW_STEP tokens fit."""
            return self._is_enough(self.request.with_pins(seq_len=steps * ROW_STEP))

        most = -(-self.best.plan.batch.seq_len // ROW_STEP)
        return last_true(is_enough, 0, most) * ROW_STEP

    def _is_enough(self, request: Request) -> bool:
        """True if the request fits with the method of the smallest plan."""
        plan = self.best.plan
        return any(
            MethodSearch(request, method).fits()
            for method in methods_for(request)
            if type(method.tuning) is type(plan.tuning) and method.precision is plan.precision
        )


def on_large_cards(request: Request) -> Request | None:
    """The request on the fewest of LARGE_MACHINES that hold it on their devices; None where none does, and for several
    nodes or a card that was described by its figures: what is typed would be of those."""
    recipe = request.recipe
    figures = (recipe.gpu_memory, recipe.gpu_flops, recipe.gpu_bandwidth, recipe.interconnect)
    if request.hardware.nodes > 1 or any(figures):
        return None
    for gpus, nodes in LARGE_MACHINES:
        there = hardware_for(
            gpu=find_gpu(LARGE_CARD), gpus=gpus, nodes=nodes, host_memory_bytes=recipe.host_memory or 0,
            nvme_bytes=recipe.nvme_size or 0,
        )  # fmt: skip
        changed = request.with_pins(gpu=LARGE_CARD, gpus=gpus, nodes=nodes)
        changed = replace(changed, hardware=with_host_memory(there))
        if fits_on_devices(changed):
            return changed
    return None


def machine_settings(request: Request) -> dict[str, object]:
    """The settings that name the large cards of ``on_large_cards``."""
    recipe = request.recipe
    nodes = {"nodes": recipe.nodes} if recipe.nodes > 1 else {}
    return {"gpu": LARGE_CARD, "gpus": recipe.gpus or 1, **nodes}


def fits_on_devices(request: Request) -> bool:
    """True if a method of the request fits with everything on the devices."""
    return any(MethodSearch(request, method, on_device=True).fits() for method in methods_for(request))


def largest_known_model(request: Request, fits: Callable[[Request], bool]) -> str | None:
    """The known model with the most parameters that ``fits``, with adapters on all linears and rows no longer than it
    takes; None when none does."""
    known = [load_model_spec(name, offline=True) for name in names_with_formulas()]
    for model in sorted(known, key=lambda model: count_parameters(model).total, reverse=True):
        seq_len = min(request.recipe.seq_len, model.max_seq_len)
        other = replace(request, model=model)
        if fits(other.with_pins(seq_len=seq_len, lora_target_modules=["all-linear"], lora_layers=[])):
            return model.name
    return None
