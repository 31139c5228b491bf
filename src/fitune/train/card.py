"""The model card of an export: what it is, how it was trained, what was measured."""

from collections.abc import Iterator
from pathlib import Path

from fitune.files import read_text
from fitune.models.identity import base_reference
from fitune.spec.plan import ChunkedLoss, Dense, Full, InBackward, Lomo, Lora, Offload, Plan
from fitune.spec.reports import RunReport
from fitune.spec.words import describe_base
from fitune.units import format_bytes, format_count, format_seconds


def model_card(plan: Plan, report: RunReport, *, kind: str) -> str:
    """README.md of an export of this kind (train/export.py FOLDERS): figures, plan, and the recipe to do it again."""
    library = "peft" if kind == "adapter" else "transformers"
    sources = ", ".join(Path(source.path).name for source in plan.data.sources)
    return "\n".join(
        [
            f"---\nbase_model: {base_reference(plan.model_path)}\nlibrary_name: {library}\ntags:\n- fitune\n---\n",
            f"# {plan.model.name}, {_method(plan)}\n",
            f"Fine-tuned with fitune on {sources}.\n",
            *_figures(plan, report, kind),
            "\n## Plan\n",
            *_plan(plan),
            *_recipe(plan),
            "",
        ]
    )


def _figures(plan: Plan, report: RunReport, kind: str) -> Iterator[str]:
    trained, total = format_count(report.trainable_parameters), format_count(report.total_parameters)
    tokens, supervised = format_count(report.tokens), format_count(report.supervised_tokens)
    seconds = format_seconds(report.seconds)
    yield f"- {report.steps} steps, {tokens} tokens, {supervised} of them supervised, in {seconds}"
    yield f"- loss {report.first_loss:.4f} → {report.final_loss:.4f}"
    if report.best_eval_loss is not None:
        yield f"- best held-out loss: {report.best_eval_loss:.4f}"
    yield f"- {trained} of {total} parameters trained"
    if report.merged_loss is not None:
        yield from (f"- {line}" for line in report.merged_loss.lines())
    if report.memory is not None:
        yield f"- measured peak memory: {format_bytes(report.memory.peak_bytes)}"
    yield from _added_tokens(plan, kind)


def _added_tokens(plan: Plan, kind: str) -> Iterator[str]:
    """What somebody who loads it without fitune has to know."""
    if plan.added_tokens:
        tokens, rows = ", ".join(f"`{token}`" for token in plan.added_tokens), plan.model.vocab_size
        first = f"; before PEFT loads it: `base.resize_token_embeddings({rows})`" if kind == "adapter" else ""
        yield f"- added tokens: {tokens}; {rows:,} rows in embedding and head{first}"


def _plan(plan: Plan) -> Iterator[str]:
    batch, schedule, layers = plan.batch, plan.schedule, plan.model.num_layers
    rows = "packs" if batch.packing else "rows"
    chunked = isinstance(plan.loss, ChunkedLoss)
    yield f"- {plan.precision}, {_optimizer(plan)}, learning rate {schedule.learning_rate:g} ({schedule.kind})"
    yield (
        f"- {batch.global_batch_size} {rows} of at most {batch.seq_len:,} tokens a step: "
        f"{batch.micro_batch_size} at a time, {batch.accumulation} accumulated"
    )
    yield (
        f"- {plan.recompute.blocks} of {layers} blocks recomputed, {'chunked' if chunked else 'plain'} loss, "
        f"{plan.attention} attention, seed {plan.run.seed}"
    )
    if plan.offload != Offload():
        places = {"weights": plan.offload.parameters, "optimizer": plan.offload.optimizer}
        places["activations"] = plan.offload.activations
        yield f"- on the host: {', '.join(name for name, place in places.items() if place != 'device')}"


def _optimizer(plan: Plan) -> str:
    if isinstance(plan.tuning, Lomo):
        return "AdaLomo" if plan.tuning.adaptive else "LOMO"
    return type(plan.optimizer).__name__


def _recipe(plan: Plan) -> Iterator[str]:
    """As the run directory has it; a run that was started from Python has none."""
    file = Path(plan.run.output_dir) / "recipe.yaml"
    if file.is_file():
        yield f"\n## Recipe\n\n```yaml\n{read_text(file, follow_links=False).rstrip()}\n```"


def _method(plan: Plan) -> str:
    match plan.tuning:
        case Lora(rank=rank, base=base, dora=dora):
            adapters = f"{'DoRA' if dora else 'LoRA'} r={rank}"
            return adapters if isinstance(base, Dense) else f"{adapters} on {describe_base(base)}"
        case Lomo(adaptive=adaptive):
            return f"full fine-tuning with {'AdaLomo' if adaptive else 'LOMO'}"
        case Full(update=update):
            in_backward = isinstance(update, InBackward)
            return f"full fine-tuning{', stepped in backward' if in_backward else ''}"
