"""A rehearsal: what the Plan's own step takes, without its device and without weights."""

from contextlib import suppress

from transformers import PretrainedConfig

from fitune.models.door import model_config
from fitune.rehearse.allocator import reserved_peak
from fitune.rehearse.layer_extrapolation import Depth, Irregular, extrapolated
from fitune.rehearse.step import record_few_blocks, record_step
from fitune.rehearse.trace import Trace, peaks_by_kind
from fitune.spec.plan import Lora, Offload, Plan
from fitune.spec.reports import Rehearsal


def rehearse(plan: Plan, *, exact: bool = False, outside: dict[str, int] | None = None) -> Rehearsal:
    """Trace the second step of ``plan``; ``exact`` traces every block instead of a few that stand for all.

    ``outside`` is what no tensor explains (contexts, workspaces), by name: it is taken as given.
    """
    config = model_config(plan.model_path)
    if plan.added_tokens:
        config.vocab_size = plan.model.vocab_size
    trace, traced = trace_plan(plan, config, exact=exact)
    on_cuda = not plan.hardware.gpu.is_cpu
    return Rehearsal(
        phases=peaks_by_kind(trace, on_cuda=on_cuda),
        outside=outside or {},
        reserved_bytes=reserved_peak(trace),
        layers_traced=traced,
    )


def trace_plan(plan: Plan, config: PretrainedConfig, *, exact: bool) -> tuple[Trace, int]:
    """The step's events and how many blocks were traced for them.

    What leaves the device leaves while the next block works: such a step is traced whole.
    """
    layers = plan.model.num_layers
    recomputed = min(plan.recompute.blocks, layers)
    depth = Depth(recomputed=recomputed, kept=layers - recomputed)
    repeats = _blocks_are_alike(config, plan) and plan.offload == Offload()
    if not exact and depth.shallow() != depth and repeats:
        with suppress(Irregular):  # then every block is traced
            passes, update = record_few_blocks(plan, config, depth)
            return extrapolated(passes, update, depth), depth.shallow().layers
    return record_step(plan, config), layers


def _blocks_are_alike(config: PretrainedConfig, plan: Plan) -> bool:
    """Not where windowed and global attention take turns, or where some have adapters and others have none."""
    some_adapted = isinstance(plan.tuning, Lora) and bool(plan.tuning.layers)
    return len(set(getattr(config, "layer_types", None) or ())) <= 1 and not some_adapted
