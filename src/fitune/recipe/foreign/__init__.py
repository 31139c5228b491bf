"""Which trainer a recipe was written for, and what its keys are here."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fitune.errors import RecipeError
from fitune.recipe.foreign.axolotl import read_axolotl
from fitune.recipe.foreign.llama_factory import read_llama_factory
from fitune.recipe.foreign.reading import Reading, words
from fitune.recipe.foreign.torchtune import read_torchtune
from fitune.recipe.foreign.trl import read_trl

OWN = words(
    "tuning data eval_data precision quantization quantization_bits zero backend seq_len on_long_row "
    "on_bad_row train_on_prompt lr_scheduler val_fraction log_steps keep_checkpoints loss_chunk_tokens"
)
"""Settings that only fitune has under these names: a recipe with one of them is its own."""
ABOUT_DEVICES = (
    "gpu", "gpu_memory", "gpu_flops", "gpu_bandwidth", "interconnect", "node_network", "gpus", "nodes",
    "host_memory", "nvme_path", "nvme_size", "price_per_gpu_hour", "objective",
)  # fmt: skip
"""Settings of fitune that may stand in another trainer's recipe: none of them names the devices."""

_AXOLOTL = words(
    "sequence_len datasets adapter micro_batch_size val_set_size sample_packing dataset_prepared_path special_tokens "
    "evals_per_epoch saves_per_epoch lora_target_linear load_in_8bit strict"
)
_LLAMA_FACTORY = words(
    "stage do_train finetuning_type template cutoff_len dataset lora_target quantization_bit model_class "
    "train_dataset dist_config peft_config sample_backend"
)
_UNSLOTH = words(
    "max_seq_length r random_state use_gradient_checkpointing full_finetuning loftq_config fast_inference"
)
_TRL = words(
    "dataset_name datasets dataset_mixture dataset_mixer dataset_config use_peft dataset_train_split "
    "dataset_text_field completion_only_loss assistant_only_loss accelerate_config per_device_train_batch_size "
    "lr_scheduler_type report_to"
)


def trainer_of(raw: Mapping[str, Any]) -> str | None:
    """The trainer whose recipe ``raw`` is; None for a recipe of fitune's own."""
    keys = set(raw)
    if any(isinstance(value, Mapping) and "_component_" in value for value in raw.values()):
        return "torchtune"
    if "model" in keys and len(keys & OWN) > (1 if "lr_scheduler" in keys else 0):
        return None
    if "base_model" in keys and len(keys & _AXOLOTL) >= 2:
        return "axolotl"
    if len(keys & _LLAMA_FACTORY) >= 3 and keys & {"model_name_or_path", "model"}:
        return "LLaMA-Factory"
    if keys & {"model_name_or_path", "model_name"} and len(keys & _UNSLOTH) >= 2:
        return "Unsloth"
    if "model_name_or_path" in keys and keys & _TRL:
        return "TRL"
    return None


_READERS: dict[str, Callable[[Reading], None]] = {
    "axolotl": read_axolotl,
    "TRL": read_trl,
    "Unsloth": read_trl,
    "torchtune": read_torchtune,
    "LLaMA-Factory": read_llama_factory,
}


def read_foreign(raw: Mapping[str, Any], *, where: str, folder: Path) -> Reading | None:
    """Another trainer's recipe, key by key; None for a recipe of fitune's own."""
    trainer = trainer_of(raw)
    if trainer is None:
        return None
    reading = Reading(trainer=trainer, where=where, raw=raw, folder=folder)
    reading.same({name: name for name in ABOUT_DEVICES})
    try:
        _READERS[trainer](reading)
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, OverflowError) as error:
        # the readers take values as the trainers' own recipes have them: a text where a mapping belongs fails there
        key = reading.latest
        why = (
            f": {str(error)[:100]}" if isinstance(error, ValueError) else ""
        )  # others tell of the reader's code
        raise RecipeError(
            f"{where}: {key} = {str(raw.get(key))[:60]!r} is not what {trainer} takes there{why}",
            hint=f"mend {key}, or leave it out",
        ) from None
    reading.finish()
    return reading
