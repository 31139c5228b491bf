"""What a finished run hands over: an adapter, a merged model or a full one, each verified by reloading."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from fitune.checkpoint.export import export_adapter, export_full, export_merged
from fitune.data.templates import load_template
from fitune.models.language_model import LanguageModel
from fitune.spec.plan import Dense, Full, Hqq, InBackward, Lomo, Lora, Nf4, Plan
from fitune.spec.reports import RunReport
from fitune.units import format_bytes, format_count, format_seconds

FOLDERS = {"adapter": "adapter", "merged": "merged", "full": "model"}
"""Kind of export -> its folder in the run directory."""


def export_result(
    plan: Plan, model: LanguageModel, tokenizer: PreTrainedTokenizerBase, report: RunReport
) -> Path:
    """Write ``plan.run.export`` into the run directory and return its folder."""
    kind = plan.run.export
    target = Path(plan.run.output_dir) / FOLDERS[kind]
    common = {
        "chat_template": load_template(tokenizer, plan.data.chat_template).source,
        "card": model_card(plan, report, kind=kind),
        "replace": True,
    }
    match kind:
        case "adapter":
            exported = export_adapter(model.whole, tokenizer, target, base=plan.model_path, **common)
        case "merged":
            exported = export_merged(model.whole, tokenizer, target, base_path=plan.model_path, **common)
        case "full":
            exported = export_full(model.whole, tokenizer, target, **common)
    return exported.path


def model_card(plan: Plan, report: RunReport, *, kind: str) -> str:
    """README.md of an export of this kind (FOLDERS): what it is, what it was trained on, what was measured."""
    method = _method(plan)
    eval_line = (
        "" if report.best_eval_loss is None else f"- best held-out loss: {report.best_eval_loss:.4f}\n"
    )
    memory = "not measured" if report.memory is None else format_bytes(report.memory.peak_bytes)
    sources = ", ".join(Path(source.path).name for source in plan.data.sources)
    library = "peft" if kind == "adapter" else "transformers"
    return (
        f"---\nbase_model: {plan.model.name}\nlibrary_name: {library}\ntags:\n- fitune\n---\n\n"
        f"# {plan.model.name}, {method}\n\n"
        f"Fine-tuned with fitune on {sources}.\n\n"
        f"- precision: {plan.precision}, learning rate {plan.schedule.learning_rate:g} ({plan.schedule.kind})\n"
        f"- {report.steps} steps, {format_count(report.tokens)} tokens, "
        f"{format_count(report.supervised_tokens)} of them supervised, in {format_seconds(report.seconds)}\n"
        f"- loss {report.first_loss:.4f} → {report.final_loss:.4f}\n{eval_line}"
        f"{_added_tokens(plan, kind)}"
        f"- {format_count(report.trainable_parameters)} of {format_count(report.total_parameters)} parameters trained\n"
        f"- measured peak memory: {memory}\n"
    )


def _added_tokens(plan: Plan, kind: str) -> str:
    """What somebody who loads it without fitune has to know."""
    if not plan.added_tokens:
        return ""
    tokens, rows = ", ".join(f"`{token}`" for token in plan.added_tokens), plan.model.vocab_size
    first = f"; before PEFT loads it: `base.resize_token_embeddings({rows})`" if kind == "adapter" else ""
    return f"- added tokens: {tokens}; {rows:,} rows in embedding and head{first}\n"


def _method(plan: Plan) -> str:
    match plan.tuning:
        case Lora(rank=rank, base=Dense()):
            return f"LoRA r={rank}"
        case Lora(rank=rank, base=Nf4()):
            return f"QLoRA r={rank} on a base in NF4"
        case Lora(rank=rank, base=Hqq(bits=bits)):
            return f"LoRA r={rank} on a base in HQQ {bits} bit"
        case Lomo(adaptive=adaptive):
            return f"full fine-tuning with {'AdaLomo' if adaptive else 'LOMO'}"
        case Full(update=update):
            in_backward = isinstance(update, InBackward)
            return f"full fine-tuning{', stepped in backward' if in_backward else ''}"
