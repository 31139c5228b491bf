"""Settings that contradict each other, the model or the device: refused with the arithmetic and a way out.

Rules are asked for every plan (values/rules.py): tests/values/test_rules.py walks over all of their settings.
"""

import pytest

from fitune.errors import HardwareError, RecipeError
from plans import plan_of

ON_H100 = [
    ("micro_batch_size: 4, gradient_accumulation_steps: 3, global_batch_size: 16", "4 × .* 3 = 12"),
    ("micro_batch_size: 5, global_batch_size: 16", r"16 / \(micro_batch_size 5\) = 3.20"),
    ("gpus: 3, global_batch_size: 16", r"16 / \(3 devices\) = 5.33"),
    ("gpus: 2, global_batch_size: 12, micro_batch_size: 4", r"12 / \(2 devices × .* 4\) = 1.50"),
    ("attn_implementation: flash, precision: fp32", "16-bit numbers.* fp32"),
    ("seq_len: 200000", "68928 more than the 131072"),
    ("gradient_checkpointing: 17", "17 blocks.* has 16"),
    ("loss: plain, loss_chunk_tokens: 64", "chunks"),
    ("optimizer: sgd, momentum: 0.9", "no momentum"),
    ("val_fraction: 0.1, eval_data: [e.jsonl]", "holds rows out"),
    ("tuning: full, export: adapter", "adapter"),
    ("tuning: lora, lora_target_modules: [q_prj]", "q_proj"),
    ("tuning: full, rslora: true", "rslora is for adapters, and tuning: full trains none"),
    ("tuning: full, lora_layers: 12-15", "lora_layers is for adapters, and tuning: full trains none"),
    ("tuning: lora, lora_layers: [15, 16]", "there is no block 16; .* has 16, numbered 0 to 15"),
    ("tuning: lora, lora_modules_to_save: [norm]", "'norm' is neither the embedding nor the head"),
    ("tuning: lora, lora_modules_to_save: [embed_tokens, wte]", "names embed_tokens twice"),
    ("tuning: full, lora_modules_to_save: [lm_head]", "trains none: it trains every weight"),
    ("tuning: full, dora: true", "adapters"),
    ("tuning: full, quantization: nf4", "cannot be trained"),
    ("tuning: qlora, quantization: none", "forbids"),
    ("quantization: nf4, quantization_bits: 8", "4 bits, not quantization_bits = 8"),
    ("quantization_bits: 3, group_size: 100", "leaves a rest"),
    ("tuning: lomo, gradient_accumulation_steps: 4", "steps: 4"),
    ("tuning: lomo, precision: bf16-master", r"masters \(asked for: tuning: lomo, precision: bf16-master\)"),
    ("tuning: adalomo, optimizer: adamw", "optimizer itself"),
    ("tuning: lomo, max_grad_norm: 0", "max_grad_norm: 0"),
    ("tuning: lomo, gpus: 8, zero: 2", "stage 3 .* zero: 2"),
    ("tuning: lomo, offload_optimizer: cpu", "no optimizer states"),
    ("tuning: lomo, offload_parameters: cpu", "LOMO steps weights on the device"),
    ("tuning: full, max_grad_value: 1.0", "for lomo and adalomo"),
    ("gpus: 8, optimizer: adamw-8bit, backend: deepspeed", "fp32 states"),
    ("optimizer: adamw-8bit, offload_optimizer: cpu", "8-bit AdamW steps on the device"),
    ("zero: 3", "for several devices, and there is 1"),
    ("backend: fsdp", "several devices"),
    ("gpus: 8, hybrid_sharding: true", "nodes: 1, gpus: 8"),
    ("gpus: 8, zero: 0, backend: deepspeed", "DDP"),
    ("gpus: 2, offload_optimizer: cpu, zero: 0", "DDP"),
    ("gpus: 2, offload_parameters: cpu, zero: 2, backend: deepspeed", "zero = 2"),
    ("gpus: 2, offload_optimizer: nvme", "needs a folder"),
    ("offload_optimizer: nvme, nvme_path: /n", "DeepSpeed at stage 3"),
    ("offload_activations: nvme", r"to the host, not to NVMe .*: nvme\)\n  try: offload_activations: cpu$"),
    ("kernels: liger, torch_compile: true", "overwrite saved"),
    ("tuning: lomo, torch_compile: true", "all of its gradients"),
    ("offload_activations: cpu, torch_compile: true", "moves them"),
    ("gpus: 2, torch_compile: true", "for one device .* torch_compile: true"),
    ("optimizer_in_bwd: true, gradient_accumulation_steps: 4", "gradient_accumulation_steps: 4"),
    ("optimizer_in_bwd: true, global_batch_size: 8, micro_batch_size: 2", "8 is 4 × micro_batch_size 2"),
    ("optimizer_in_bwd: true, tuning: lora", "adapters are hundreds of times fewer"),
    ("optimizer_in_bwd: true, quantization: nf4", "next to nothing to gain"),
    ("tuning: full, optimizer_in_bwd: true, gpus: 2, backend: deepspeed", "in backward at stages 2 and 3"),
    ("tuning: full, optimizer_in_bwd: true, gpus: 2, zero: 1", "in backward at stages 2 and 3"),
    ("tuning: full, optimizer_in_bwd: true, gpus: 2, optimizer: adamw-8bit", "on several devices"),
    ("tuning: full, optimizer_in_bwd: true, offload_optimizer: cpu", "on the host .* offload_optimizer: cpu"),
    ("tuning: full, optimizer_in_bwd: true, offload_parameters: cpu", "offload_parameters: cpu"),
    ("optimizer_in_bwd: true, offload_activations: cpu", "two backward passes .* offload_activations: cpu"),
]  # fmt: skip
ELSEWHERE = [
    ("v100-32gb", "attn_implementation: flash", "8.0 or newer .* 7.0", HardwareError),
    ("cpu", "attn_implementation: flash", "GPUs", HardwareError),
    ("t4", "precision: bf16", "7.5.* no bf16", HardwareError),
    ("v100-32gb", "precision: bf16-master", "no bf16", HardwareError),
    ("cpu", "precision: fp16", "CPU", HardwareError),
    ("cpu", "optimizer: adamw-8bit", "kernels for GPUs", HardwareError),
    ("cpu", "kernels: liger", "7.0 and newer, not on a CPU", HardwareError),
    ("cpu", "offload_optimizer: cpu", "no other memory to offload to", RecipeError),
]  # fmt: skip


@pytest.mark.parametrize(
    ("card", "settings", "said", "error"), [*(("h100", *row, RecipeError) for row in ON_H100), *ELSEWHERE]
)
def test_contradictions_are_refused_with_the_arithmetic(card, settings, said, error):
    with pytest.raises(error, match=said) as caught:
        plan_of("llama-3.2-1b", card, settings)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("model", "settings", "said"),
    [
        ("falcon-7b", "kernels: liger", r"\(falcon\) has others"),
        ("gpt2", "kernels: liger", r"\(gpt2\) has others"),
        ("falcon-7b", "attn_implementation: flash, seq_len: 2048", "mask over the whole stream"),
        ("gpt-oss-20b", "attn_implementation: flash", "a learned score of each head of .* joins the softmax"),
    ],
)
def test_what_a_model_cannot_do_is_refused(model, settings, said):
    with pytest.raises(RecipeError, match=said) as caught:
        plan_of(model, "h100", settings, tuning="lora")
    assert caught.value.hint
