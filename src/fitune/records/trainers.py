"""The trainers that published runs name, and their habits; a name is looked for in a row's source and remarks."""

from dataclasses import replace

from fitune.records.habits import Habits, Logits

TRANSFORMERS = Habits(
    name="transformers Trainer with PEFT",
    source="transformers trainer.py, modeling_llama.py (loss); peft tuners/tuners_utils.py, utils/other.py",
    repeats_keys=("mistral", "mixtral"),
)

FAST_LOGITS = Logits(per_logit=8, hidden_copies=2)
"""Triton cross-entropy on logits in fp32: the logits and a shifted copy, over which the gradient is written."""

_FMS = replace(
    TRANSFORMERS,
    name="fms-acceleration",
    source="fms-acceleration: accelerated-peft and fused-ops-and-kernels plugins; transformers Trainer",
    upcasts_packed=False,
    fp32_stream=False,
)

TRAINERS: tuple[tuple[tuple[str, ...], Habits], ...] = (
    (
        ("fitune",),
        Habits(
            name="fitune",
            source="fitune train",
            is_fitune=True,
            adapter_bytes=2,
            upcasts_packed=False,
            fp32_stream=False,
            foreach=False,
            expandable_segments=True,
            counter="allocated",
        ),
    ),
    (
        ("fms-acceleration", "fms_accel"),
        _FMS,
    ),
    (
        ("fsdp_qlora",),
        replace(
            TRANSFORMERS,
            name="fsdp_qlora",
            source="AnswerDotAI/fsdp_qlora train.py: LoRA in the compute type, FSDP1, no upcast",
            adapter_bytes=2,
            dropout=0.1,
            checkpoints_units=False,
            upcasts_packed=False,
            fp32_stream=False,
            logits=Logits(per_logit=12, hidden_copies=3),
            missing="what loading and quantising left in torch's cache, which reserved memory counts",
        ),
    ),
    (
        ("qwenlm/qwen", "qwen_readme", "qwenlm"),
        replace(
            TRANSFORMERS,
            name="Qwen finetune.py",
            source="QwenLM/Qwen finetune.py and modeling_qwen.py: no upcast of logits, but autocast's of the loss",
            dropout=0.05,
            upcasts_packed=False,
            fp32_stream=False,
            logits=Logits(per_logit=8, hidden_copies=2),
            autocast_logits=Logits(per_logit=12, hidden_copies=2),  # 2, shifted 2, fp32 4, log-softmax 4
            missing="the instrument: nvidia-smi and torch's counters differ by gigabytes here",
        ),
    ),
    (
        ("torchtune",),
        Habits(
            name="torchtune",
            source="torchtune recipes: everything in bf16, fully_shard, chunked cross-entropy in 8 parts",
            adapter_bytes=2,
            upcasts_packed=False,
            fp32_stream=False,
            foreach=False,
            own_fsdp=True,
            expandable_segments=True,
            logits=Logits(per_logit=8, hidden_copies=2, chunks=8, whole=6),
            # compiled, a chunk's logits are let go as soon as its gradient is made
            compiled_logits=Logits(per_logit=6, chunks=8, whole=2),
            counter="allocated",
        ),
    ),
    (
        ("torchtitan",),
        Habits(
            name="torchtitan",
            source="torchtitan: fully_shard with fp32 shards, fused AdamW; logits in 16 bit, cross-entropy in fp32",
            upcasts_packed=False,
            fp32_stream=False,
            foreach=False,
            own_fsdp=True,
            expandable_segments=True,
            fp32_shards=True,
            logits=Logits(per_logit=12, hidden_copies=2),
            counter="reserved",
        ),
    ),
    (
        ("unsloth",),
        replace(
            TRANSFORMERS,
            name="unsloth",
            source="unslothai/unsloth: Triton norms, SwiGLU and cross-entropy, norms and embedding stay 16 bit",
            upcasts_packed=False,
            fp32_stream=False,
            fused_norms=True,
            fused_mlp=True,
            logits=FAST_LOGITS,
            counter="reserved",
        ),
    ),
    (
        ("axolotl", "llama-factory", "llamafactory", "ms-swift"),
        replace(
            TRANSFORMERS,
            name="transformers Trainer without upcast",
            source="axolotl utils/models.py and LLaMA-Factory model/adapter.py cast back or never upcast",
            upcasts_packed=False,
            fp32_stream=False,
        ),
    ),
    (
        ("litgpt", "lit-gpt", "lit_gpt"),
        replace(
            TRANSFORMERS,
            name="litgpt",
            source="Lightning-AI/litgpt finetune scripts: bf16-true, LoRA in bf16, cross-entropy in chunks of 128",
            adapter_bytes=2,
            dropout=0.05,
            upcasts_packed=False,
            fp32_stream=False,
            logits=Logits(per_logit=2, hidden_copies=2, whole=4),
            counter="allocated",
        ),
    ),
    (
        ("trl", "sfttrainer"),
        replace(
            TRANSFORMERS,
            name="TRL SFTTrainer with PEFT",
            source="trl trainer/utils.py, peft_module_casting_to_bf16: norms fp32, embedding and head cast back",
            upcasts_packed=False,
        ),
    ),
    (
        ("llm-foundry", "mosaicml", "composer"),
        Habits(
            name="LLM Foundry",
            source="mosaicml/llm-foundry: Composer, FSDP1 with fp32 shards, cross-entropy of flash-attention",
            foreach=False,
            fp32_shards=True,
            checkpoints_units=False,
            logits=Logits(per_logit=4, hidden_copies=2),
        ),
    ),
    (
        ("2306.09782", "openlmlab/lomo"),
        replace(
            TRANSFORMERS,
            name="LOMO",
            source="OpenLMLab/LOMO with transformers 4.28 (modeling_llama.py, LlamaAttention) and DeepSpeed",
            logits=Logits(per_logit=14, hidden_copies=3),
            clamps_scores=True,
            missing="what of the profiled activations is counted: the authors leave out the working memory of backward",
        ),
    ),
    (
        ("huggingface/blog",),
        replace(
            TRANSFORMERS,
            name="blog post on 4-bit training",
            source="huggingface/blog 4bit-transformers-bitsandbytes; transformers 4.30, peft 0.4",
            clamps_scores=True,
            missing="which linears have adapters, and what loading left in torch's cache",
        ),
    ),
    (
        ("fms-fsdp",),
        Habits(
            name="fms-fsdp",
            source="foundation-model-stack/fms-fsdp: FSDP1 with fp32 shards, compiled blocks, fused AdamW",
            foreach=False,
            fp32_shards=True,
            checkpoints_units=False,
            logits=Logits(per_logit=12, hidden_copies=2),
            missing="how many blocks selective recompute covers (half are assumed)",
        ),
    ),
    (
        ("llama-recipes", "llama-cookbook", "llama_cookbook"),
        replace(
            TRANSFORMERS,
            name="llama-recipes",
            source="meta-llama/llama-recipes: FSDP1, AnyPrecision or torch AdamW, PEFT",
            checkpoints_units=False,
            logits=Logits(per_logit=12, hidden_copies=3),
            counter="allocated",
        ),
    ),
)
