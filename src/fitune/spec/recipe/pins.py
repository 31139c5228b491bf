"""A recipe with the plan's choices written into it: what was planned here is what is planned where it runs."""

from typing import Any

from fitune.spec.choices import Ddp
from fitune.spec.plan import Plan, Zero, base_of
from fitune.spec.quantisers import settings_of
from fitune.spec.recipe.recipe import Recipe
from fitune.spec.words import method_name


def pinned(recipe: Recipe, plan: Plan) -> Recipe:
    """``recipe`` with the method, the precision, the placement and the global batch of ``plan``.

    Micro-batch, recomputed blocks and the chunks of the loss stay open: where memory runs out in a step, the next
    attempt may take less of them.
    """
    batch, hardware = plan.batch, plan.hardware
    pins: dict[str, Any] = {
        "tuning": method_name(plan.tuning), "precision": plan.precision.value, "gpus": hardware.gpus_per_node,
        "nodes": hardware.nodes, "seq_len": batch.seq_len, "attn_implementation": plan.attention,
        "global_batch_size": batch.global_batch_size * hardware.num_gpus,
        "learning_rate": plan.schedule.learning_rate, "output_dir": plan.run.output_dir,
        "export": plan.run.export,
        "async_save": plan.run.async_save, "offload_parameters": plan.offload.parameters,
        "offload_optimizer": plan.offload.optimizer, "offload_activations": plan.offload.activations,
        **settings_of(base_of(plan)), **_sharding(plan),
    }  # fmt: skip
    if plan.run.upload_to:
        pins["upload_to"] = plan.run.upload_to
    if recipe.objective == "cheapest":  # it chose how many devices; now they are said
        pins["objective"] = "fastest"
    return with_average_row(recipe.model_copy(update=pins), plan)


def with_average_row(recipe: Recipe, plan: Plan) -> Recipe:
    """Returns ``recipe`` with the average row that ``plan`` was chosen for; as it is where that is not known."""
    mean = plan.batch.mean_row_tokens
    return recipe.model_copy(update={"mean_row_tokens": mean}) if mean else recipe


def _sharding(plan: Plan) -> dict[str, Any]:
    match plan.sharding:
        case Zero(stage=stage, backend=backend, hybrid=hybrid):
            return {"zero": stage, "backend": backend, "hybrid_sharding": hybrid}
        case Ddp():
            return {"zero": 0}
    return {}
