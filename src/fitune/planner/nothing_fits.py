"""When nothing fits: the smallest memory that would do, who has it, and what change would help, all computed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from fitune.errors import NothingFits
from fitune.estimate.overhead import usable_bytes
from fitune.estimate.predict import predict
from fitune.estimate.step import StepStages
from fitune.planner.describe import host_sum, wrapped
from fitune.planner.fit import fits, host_fits
from fitune.planner.method_search import MethodSearch
from fitune.planner.methods import to_adapters
from fitune.planner.precision import methods_for
from fitune.spec.gpus import CARDS
from fitune.spec.hardware import Hardware
from fitune.spec.model import ModelSpec
from fitune.spec.model_config import load_model_spec
from fitune.spec.model_table import known_model_names
from fitune.spec.parameters import count_parameters
from fitune.spec.plan import Plan, Precision
from fitune.spec.recipe import Recipe
from fitune.spec.reports import Rejection
from fitune.spec.rules import adds_gradients_up, keeps_rules
from fitune.spec.words import describe_offload, describe_plan
from fitune.units import format_bytes

_SHORTEST_ROW = 64


def nothing_fits(
    recipe: Recipe,
    smallest: Sequence[StepStages],
    rejected: Sequence[Rejection],
    *,
    model: ModelSpec,
    hardware: Hardware,
) -> NothingFits:
    """The error to raise; ``smallest`` is the smallest plan of every method that was searched."""
    best = min(smallest, key=shortage)
    peak = predict(best.plan).peak_bytes
    usable = usable_bytes(hardware)
    devices = f"{hardware.num_gpus} ×" if hardware.num_gpus > 1 else "one"
    lines = [
        f"nothing fits: {model.name} on {devices} {hardware.gpu.name} of {format_bytes(hardware.gpu.memory_bytes)}, "
        f"{format_bytes(usable)} usable",
        *(f"{wrapped(item.what)}\n{wrapped(item.why, indent=4)}" for item in rejected),
        _smallest_memory(best, peak, usable),
        wrapped(describe_plan(best.plan)),
        _device_that_holds(best.plan, peak),
    ]
    changes = Changes(recipe=recipe, model=model, hardware=hardware, best=best)
    lines += changes.about_the_host()
    return NothingFits("\n".join(lines), hint=changes.advice())


def shortage(step: StepStages) -> tuple[bool, int]:
    return not host_fits(step), predict(step.plan).peak_bytes


def _smallest_memory(best: StepStages, peak: int, usable: int) -> str:
    if peak <= usable:
        return f"the devices would do, the host does not: {host_sum(predict(best.plan))}, with"
    return f"smallest memory that would do: {format_bytes(peak)} a device ({format_bytes(peak - usable)} short), with"


def _device_that_holds(plan: Plan, peak: int) -> str:
    """The known GPU with the least memory on which the plan fits."""
    for card in sorted(CARDS, key=lambda card: card.gpu.memory_bytes):
        needs_bf16 = plan.precision in (Precision.BF16, Precision.BF16_MASTER)
        if card.gpu.has_bf16 or not needs_bf16:
            other = replace(plan, hardware=replace(plan.hardware, gpu=card.gpu))
            if predict(other).peak_bytes <= usable_bytes(other.hardware):
                return f"the smallest known GPU that holds it: {card.gpu.name}"
    largest = max(CARDS, key=lambda card: card.gpu.memory_bytes).gpu
    return f"no known GPU holds it (the largest, {largest.name}, has {format_bytes(largest.memory_bytes)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Settings that differ, or hardware."""

    words: str
    settings: dict[str, object]
    hardware: Hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What could be asked for instead; each was searched like the recipe itself."""

    recipe: Recipe
    model: ModelSpec
    hardware: Hardware
    best: StepStages

    def advice(self) -> str:
        """Changes that were computed to fit; failing that, what the largest single change leaves short."""
        tried = [
            (change, step) for change in self._possible() if (step := self._smallest(change)) is not None
        ]
        helpful = [change.words for change, step in tried if fits(step)]
        shorter = self._longest_row()
        helpful += [f"seq_len: {shorter}"] if shorter is not None else []
        if helpful:
            return ", or ".join(helpful)
        notes = [f"{change.words} would need {_needs(step)}" for change, step in tried]
        model = self._largest_model()
        if model is not None:
            notes.append(f"the largest known model that fits this way is {model}")
        return "a smaller model or more memory; " + "; ".join(notes)

    def about_the_host(self) -> Iterator[str]:
        """With what waits on the host the devices may do; then the host's sum says how much is missing there."""
        for method in methods_for(self.recipe, model=self.model, hardware=self.hardware):
            step = MethodSearch(self.recipe, method, self.model, self.hardware).least_host()
            if step is not None:
                estimate = predict(step.plan)
                offload = describe_offload(step.plan.offload)
                yield wrapped(
                    f"with {offload} the devices would do, the host does not: {host_sum(estimate)}", indent=0
                )
                return

    def _possible(self) -> Iterator[Change]:
        for words, settings in self._settings():
            yield Change(words=words, settings=settings, hardware=self.hardware)
        if self.recipe.gpu is not None and not self.hardware.gpu.is_cpu:
            for times in (2, 4, 8):
                gpus = self.hardware.gpus_per_node * times
                if gpus <= 8:
                    devices = replace(self.hardware, gpus_per_node=gpus)
                    yield Change(words=f"gpus: {gpus}", settings={"gpus": gpus}, hardware=devices)

    def _liger_would_run(self) -> bool:
        return self.recipe.kernels == "torch" and keeps_rules(
            replace(self.best.plan, kernels="liger"), "plan"
        )

    def _settings(self) -> Iterator[tuple[str, dict[str, object]]]:
        recipe, batch = self.recipe, self.best.plan.batch
        yield from self._in_backward()
        if recipe.tuning in ("full", "lomo", "adalomo"):
            yield to_adapters(recipe, "lora")
        if recipe.tuning in ("full", "lomo", "adalomo", "lora") and not recipe.quantization_is_asked_for:
            words, settings = to_adapters(recipe, "qlora")
            yield words, {**settings, "quantization": None}
        if recipe.precision == "fp32" and self.hardware.gpu.has_bf16:
            yield "precision: bf16-master", {"precision": "bf16-master"}
        if recipe.precision == "bf16-master":
            yield "precision: bf16", {"precision": "bf16"}
        if batch.micro_batch_size > 1 and adds_gradients_up(self.best.plan.tuning):
            steps = batch.global_batch_size
            words = f"micro_batch_size: 1, gradient_accumulation_steps: {steps}"
            yield words, {"micro_batch_size": 1, "gradient_accumulation_steps": steps}
        if recipe.gradient_checkpointing is not None:
            yield "gradient_checkpointing open", {"gradient_checkpointing": None}
        if recipe.loss == "plain":
            yield "loss: chunked", {"loss": "chunked"}
        if self._liger_would_run():
            yield "kernels: liger (pip install 'fitune[liger]')", {"kernels": "liger"}
        for pin in ("zero", "backend", "hybrid_sharding"):
            if getattr(recipe, pin) is not None:
                yield f"{pin} open", {pin: None}
        for pin in ("offload_parameters", "offload_optimizer", "offload_activations"):
            if getattr(recipe, pin) == "device":
                yield f"{pin}: cpu", {pin: "cpu"}

    def _in_backward(self) -> Iterator[tuple[str, dict[str, object]]]:
        """Where all weights are to be trained on one device: the same steps without their gradients."""
        recipe = self.recipe
        host = {"cpu", "nvme"} & {recipe.offload_parameters, recipe.offload_optimizer}
        if recipe.tuning != "full" or recipe.optimizer_in_backward or self.hardware.num_gpus > 1 or host:
            return
        if recipe.gradient_accumulation_steps in (None, 1):
            yield "optimizer_in_backward: true", {"optimizer_in_backward": True}
        if recipe.global_batch_size is None and recipe.micro_batch_size is None:
            rows = {"micro_batch_size": 1, "gradient_accumulation_steps": 1}
            words = "optimizer_in_backward: true with micro_batch_size: 1, then the whole batch"
            yield words, {"optimizer_in_backward": True, **rows}

    def _smallest(self, change: Change) -> StepStages | None:
        recipe = self.recipe.model_copy(update=change.settings)
        found = []
        for method in methods_for(recipe, model=self.model, hardware=self.hardware):
            step = MethodSearch(recipe, method, self.model, change.hardware).smallest()
            if step is not None:
                found.append(step)
        return min(found, key=shortage) if found else None

    def _longest_row(self) -> int | None:
        """The longest seq_len, a multiple of 64, at which the smallest method fits: bytes only grow with tokens."""

        def fits_with(seq_len: int) -> bool:
            return self._method_fits(self.recipe.model_copy(update={"seq_len": seq_len}), self.model)

        return _largest_multiple(fits_with, below=self.best.plan.batch.seq_len)

    def _method_fits(self, recipe: Recipe, model: ModelSpec) -> bool:
        plan = self.best.plan
        for method in methods_for(recipe, model=model, hardware=self.hardware):
            alike = type(method.tuning) is type(plan.tuning) and method.precision is plan.precision
            if alike and MethodSearch(recipe, method, model, self.hardware).fits():
                return True
        return False

    def _largest_model(self) -> str | None:
        """The known model with the most parameters that fits with the smallest plan's method."""
        known = (load_model_spec(name, offline=True) for name in known_model_names())
        for model in sorted(known, key=lambda model: count_parameters(model).total, reverse=True):
            seq_len = min(self.recipe.seq_len, model.max_seq_len)
            changed = {"seq_len": seq_len, "lora_target_modules": ["all-linear"], "lora_layers": []}
            if self._method_fits(self.recipe.model_copy(update=changed), model):
                return model.name
        return None


def _needs(step: StepStages) -> str:
    if not host_fits(step):
        return f"on the host {host_sum(predict(step.plan))}"
    return format_bytes(predict(step.plan).peak_bytes)


def _largest_multiple(fits_with: Callable[[int], bool], *, below: int) -> int | None:
    low, high = 0, -(-below // _SHORTEST_ROW)
    while high - low > 1:
        middle = (low + high) // 2
        if fits_with(middle * _SHORTEST_ROW):
            low = middle
        else:
            high = middle
    return low * _SHORTEST_ROW or None
