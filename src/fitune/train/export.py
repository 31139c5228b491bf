"""What a finished run hands over: an adapter, a merged model or a full one, each verified by reloading."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from fitune.checkpoint.export import export_adapter, export_full, export_merged
from fitune.data.templates import load_template
from fitune.models.language_model import LanguageModel
from fitune.spec.plan import Plan
from fitune.spec.reports import RunReport
from fitune.train.card import model_card

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
