"""The counts are exact: against hand arithmetic, against published totals, against transformers and PEFT."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from fitune.recipe.targets import resolve_targets
from fitune.rehearse.profile import TransformersTracer
from fitune.values.counts import adapters_of, count_parameters, lora_parameters
from fitune.values.model.known_models import find_known_model, names_with_formulas
from fitune.values.model.model_config import load_model_spec, spec_from_config
from fitune.values.model.tracer import trace_with
from fitune.values.plan import Lora
from rehearse.tiny_configs import FAMILIES, OTHERS, tiny

HAND_COUNTS = {
    # blocks · (q + k + v + o + gate, up, down + norms) + embeddings + final norm + head
    "Qwen/Qwen2.5-0.5B": (
        # biases of q (896), k and v (2 heads of 64)
        24 * (2 * 896 * 896 + 896 + 2 * (896 * 128 + 128) + 3 * 896 * 4864 + 2 * 896) + 151936 * 896 + 896
    ),
    "Qwen/Qwen3-8B": (
        # q and k norms over 128
        36 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128)
        + 2 * 151936 * 4096
        + 4096
    ),
    "Qwen/Qwen3-30B-A3B": (
        # 128 experts of 768, a router of 128 rows
        48 * (2 * 2048 * 4096 + 2 * 2048 * 512 + 128 * 3 * 2048 * 768 + 128 * 2048 + 2 * 2048 + 2 * 128)
        + 2 * 151936 * 2048
        + 2048
    ),
    "google/gemma-2-2b": (
        # four norms; 8 heads of 256 are narrower than the stream, 4 key-value heads
        26 * (2 * 2304 * 2048 + 2 * 2304 * 1024 + 3 * 2304 * 9216 + 4 * 2304) + 256000 * 2304 + 2304
    ),
    "tiiuae/falcon-7b": (
        # one key-value head of 64, fused; plain MLP; one LayerNorm (weight and bias); tied
        32 * (4544 * (4544 + 2 * 64) + 4544 * 4544 + 2 * 4544 * 18176 + 2 * 4544) + 65024 * 4544 + 2 * 4544
    ),
    "openai-community/gpt2": (
        # 1024 learned positions, tied
        12 * (768 * 2304 + 2304 + 768 * 768 + 768 + 2 * 768 * 3072 + 3072 + 768 + 4 * 768)
        + (50257 + 1024) * 768
        + 2 * 768
    ),
}

PUBLISHED_TOTALS = {
    "Qwen/Qwen3-8B": 8_190_735_360,
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-2-13b-hf": 13_015_864_320,
    "meta-llama/Llama-2-70b-hf": 68_976_648_192,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "mistralai/Mixtral-8x22B-v0.1": 140_620_634_112,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "google/gemma-2-9b": 9_241_705_984,
    "google/gemma-3-1b-pt": 999_885_952,
    "microsoft/phi-2": 2_779_683_840,
    "microsoft/Phi-3-mini-4k-instruct": 3_821_079_552,
    "microsoft/phi-4": 14_659_507_200,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1_100_048_384,
    "01-ai/Yi-34B": 34_388_917_248,
    "openai-community/gpt2": 124_439_808,
    "openai-community/gpt2-xl": 1_557_611_200,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
    "codellama/CodeLlama-7b-hf": 6_738_546_688,
    "codellama/CodeLlama-13b-hf": 13_016_028_160,
    "codellama/CodeLlama-34b-hf": 33_743_970_304,
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": 8_030_261_248,
    "deepseek-ai/DeepSeek-R1-Distill-Llama-70B": 70_553_706_496,
    "mistralai/Mistral-Nemo-Base-2407": 12_247_782_400,
    "mistralai/Mistral-Small-24B-Base-2501": 23_572_403_200,
    "mistralai/Mistral-Small-3.1-24B-Base-2503": 23_572_403_200,
    "google/gemma-3-270m": 268_098_176,
    "mistralai/Mistral-Small-Instruct-2409": 22_247_282_688,
    "mistralai/Mistral-Large-Instruct-2407": 122_610_069_504,
    "Qwen/Qwen2.5-Coder-0.5B": 494_032_768,
    "Qwen/Qwen2.5-Coder-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-Coder-3B": 3_085_938_688,
    "Qwen/Qwen2.5-Coder-7B": 7_615_616_512,
    "Qwen/Qwen2.5-Coder-14B": 14_770_033_664,
    "Qwen/Qwen2.5-Coder-32B": 32_763_876_352,
    "Qwen/Qwen2-0.5B": 494_032_768,
    "Qwen/Qwen2-1.5B": 1_543_714_304,
    "Qwen/Qwen2-7B": 7_615_616_512,
    "Qwen/Qwen2-72B": 72_706_203_648,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": 7_615_616_512,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B": 14_770_033_664,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": 32_763_876_352,
    "Qwen/Qwen3-4B-Instruct-2507": 4_022_468_096,
    "Qwen/Qwen3-30B-A3B-Instruct-2507": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "Qwen/Qwen3-235B-A22B-Instruct-2507": 235_093_634_560,
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": 480_154_875_392,
    "tiiuae/Falcon3-1B-Base": 1_669_408_768,
    "tiiuae/Falcon3-3B-Base": 3_227_655_168,
    "tiiuae/Falcon3-7B-Base": 7_455_550_464,
    "tiiuae/Falcon3-10B-Base": 10_305_653_760,
    "codellama/CodeLlama-70b-hf": 68_976_910_336,
    "mistralai/Mathstral-7B-v0.1": 7_248_023_552,
    "Qwen/Qwen2.5-Math-1.5B": 1_543_714_304,
    "Qwen/QwQ-32B": 32_763_876_352,
    "microsoft/Phi-4-reasoning": 14_659_507_200,
    "microsoft/Phi-4-mini-instruct": 3_836_021_760,
    "microsoft/phi-1_5": 1_418_270_720,
}

WIDE_HEADS = {"head_dim": 32}
GROUPED = {"new_decoder_architecture": True, "num_kv_heads": 2}
SMALL = {
    **{family: (family, {}) for family in (*FAMILIES, *OTHERS)},
    "llama, with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen3": ("qwen3", WIDE_HEADS),
    "gemma2": ("gemma2", WIDE_HEADS),
    "gemma3_text": ("gemma3_text", WIDE_HEADS),
    "phi": ("phi", {"qk_layernorm": True}),
    "falcon, grouped heads": ("falcon", GROUPED),
    "falcon, grouped heads, one norm": ("falcon", {**GROUPED, "num_ln_in_parallel_attn": 1}),
    "falcon, sequential, with biases": (
        "falcon", {"multi_query": False, "parallel_attn": False, "bias": True, "ffn_hidden_size": 96}
    ),
}  # fmt: skip

PUBLISHED_TOTALS_OF_TRACED = {
    "EleutherAI/pythia-70m": 70_426_624,
    "EleutherAI/pythia-160m": 162_322_944,
    "EleutherAI/pythia-410m": 405_334_016,
    "EleutherAI/pythia-1b": 1_011_781_632,
    "EleutherAI/pythia-1.4b": 1_414_647_808,
    "EleutherAI/pythia-2.8b": 2_775_208_960,
    "EleutherAI/pythia-6.9b": 6_857_302_016,
    "EleutherAI/pythia-12b": 11_846_072_320,
    "EleutherAI/gpt-neox-20b": 20_554_567_680,
    "EleutherAI/gpt-j-6b": 6_050_882_784,
    "google/gemma-7b": 8_537_680_896,
    "google/gemma-2b": 2_506_172_416,
    "allenai/OLMo-7B-hf": 6_888_095_744,
    "allenai/OLMo-1B-hf": 1_176_764_416,
    "allenai/OLMo-2-1124-7B": 7_298_617_344,
    "allenai/OLMo-2-1124-13B": 13_716_198_400,
    "allenai/OLMo-2-0425-1B": 1_484_916_736,
    "allenai/Olmo-3-1025-7B": 7_298_011_136,
    "allenai/Olmo-3-1125-32B": 32_233_522_176,
    "allenai/OLMoE-1B-7B-0924": 6_919_161_856,
    "CohereForAI/c4ai-command-r-v01": 34_980_831_232,
    "stabilityai/stablelm-3b-4e1t": 2_795_443_200,
    "bigcode/starcoder2-3b": 3_030_371_328,
    "bigcode/starcoder2-7b": 7_173_923_840,
    "bigcode/starcoder2-15b": 15_957_889_024,
    "HuggingFaceTB/SmolLM3-3B": 3_075_098_624,
    "THUDM/GLM-4-9B-0414": 9_400_279_040,
    "THUDM/glm-4-9b-chat-hf": 9_399_951_360,
    "Qwen/Qwen1.5-MoE-A2.7B": 14_315_784_192,
    "openai/gpt-oss-120b": 116_829_156_672,
    "openai/gpt-oss-20b": 20_914_757_184,
    "deepseek-ai/DeepSeek-V3": 671_026_404_352,
    "deepseek-ai/DeepSeek-V2-Lite": 15_706_484_224,
    "Qwen/Qwen3-Next-80B-A3B-Instruct": 79_674_391_296,
    "baidu/ERNIE-4.5-0.3B-PT": 360_748_032,
    "baidu/ERNIE-4.5-21B-A3B-PT": 21_825_437_888,
    "ByteDance-Seed/Seed-OSS-36B-Instruct": 36_151_104_512,
    "zai-org/GLM-4.5-Air": 106_852_245_504,
    "moonshotai/Kimi-K2-Instruct": 1_026_408_209_408,
    "ibm-granite/granite-3.1-2b-base": 2_533_531_648,
    "ibm-granite/granite-3.3-2b-base": 2_533_539_840,
    "ibm-granite/granite-3.1-8b-base": 8_170_848_256,
    "ibm-granite/granite-3.3-8b-base": 8_170_864_640,
    "ibm-granite/granite-4.1-3b": 3_402_836_480,
    "ibm-granite/granite-4.0-micro": 3_402_836_480,
    "ibm-granite/granite-4.0-1b": 1_631_750_144,
    "ibm-granite/granite-4.0-350m": 352_379_904,
    "swiss-ai/Apertus-8B-2509": 8_053_338_176,
    "ibm-granite/granite-4.0-h-350m": 340_332_224,
    "LiquidAI/LFM2-350M": 354_483_968,
    "LiquidAI/LFM2-700M": 742_489_344,
    "LiquidAI/LFM2-1.2B": 1_170_340_608,
    "MiniMaxAI/MiniMax-M2": 228_689_748_992,
    "mistralai/Ministral-3-8B-Base-2512": 8_489_553_920,
    "mistralai/Ministral-3-3B-Base-2512": 3_429_006_336,
    "mistralai/Ministral-3-14B-Base-2512": 13_506_073_600,
    "meta-llama/Llama-4-Scout-17B-16E": 107_769_861_120,
    "Qwen/Qwen3.5-35B-A3B": 34_660_610_688,
    "internlm/internlm3-8b-instruct": 8_804_241_408,
    "allenai/Olmo-Hybrid-7B": 7_430_870_688,
    "upstage/Solar-Open-100B": 102_651_793_408,
    "tencent/Hunyuan-7B-Instruct": 7_504_568_320,
    "EleutherAI/gpt-neo-1.3B": 1_315_575_808,
    # whole checkpoints, without towers and the keys and values that shared blocks never use
    "google/gemma-3n-E2B": 5_439_595_456 - 983_438_688 - 10 * 2_097_408,
    "google/gemma-3n-E4B": 7_850_135_376 - 983_438_688 - 15 * 2_097_408,
    "google/gemma-4-E2B": 5_123_178_051 - 475_728_160 - 18_880_512 - 35,
    "google/gemma-4-E4B": 7_996_156_490 - 478_087_456 - 55_055_616 - 42,
    "google/gemma-4-26B-A4B": 25_805_936_206 - 572_794_416 - 30,
    "google/gemma-4-31B": 31_273_088_876 - 575_743_536 - 60,
    "state-spaces/mamba-130m-hf": 129_135_360,
    "state-spaces/mamba-370m-hf": 371_516_416,
    "state-spaces/mamba-790m-hf": 793_204_224,
    "state-spaces/mamba-1.4b-hf": 1_372_178_432,
    "state-spaces/mamba-2.8b-hf": 2_768_345_600,
    "mistralai/Mamba-Codestral-7B-v0.1": 7_285_403_648,
    "tiiuae/Falcon-H1-0.5B-Base": 521_411_104,
    "tiiuae/Falcon-H1-1.5B-Instruct": 1_554_863_488,
    "tiiuae/Falcon-H1-1.5B-Deep-Base": 1_554_872_208,
    "tiiuae/Falcon-H1-7B-Base": 7_585_648_736,
    "tiiuae/Falcon-H1-7B-Instruct": 7_585_654_880,
    "nvidia/Nemotron-H-8B-Base-8K": 8_100_852_736,
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": 8_888_227_328,
}
"""Of models whose shapes are read from transformers' modules."""

PUBLISHED_BILLIONS = {
    "tiiuae/falcon-mamba-7b": "7.273",
    "tiiuae/Falcon-H1-1.5B-Base": "1.555",
    "tiiuae/Falcon-H1-1.5B-Deep-Instruct": "1.55",
    "tiiuae/Falcon-H1-3B-Base": "3.149",
    "tiiuae/Falcon-H1-34B-Base": "34",
    "nvidia/Nemotron-H-4B-Base-8K": "4",
    "nvidia/Nemotron-H-8B-Reasoning-128K": "8",
    "nvidia/Nemotron-H-47B-Base-8K": "47",
    "nvidia/Nemotron-H-47B-Reasoning-128K": "47",
    "nvidia/Nemotron-H-56B-Base-8K": "56",
    "nvidia/NVIDIA-Nemotron-Nano-12B-v2": "12.31",
}
"""Of traced models whose published count is a rounded one."""


def build(config, *, device="meta"):
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config)


def number_of_parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


def blocks(model):
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


def distinct_shapes():
    configs = {id(find_known_model(name).config): name for name in reversed(names_with_formulas())}
    return [pytest.param(name, id=name) for name in reversed(configs.values())]


@pytest.mark.parametrize("name", HAND_COUNTS)
def test_the_hand_count(name):
    assert count_parameters(load_model_spec(name)).total == HAND_COUNTS[name]


def test_the_published_total():
    """Of a model with formulas, or by the shipped shapes of one that is traced."""
    published = PUBLISHED_TOTALS | PUBLISHED_TOTALS_OF_TRACED
    found = {name: count_parameters(load_model_spec(name, offline=True)).total for name in published}
    assert found == published


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", PUBLISHED_TOTALS_OF_TRACED)
def test_the_published_total_of_a_traced_model(name, tmp_path, monkeypatch):
    """By transformers' modules, and by what is planned with: shipped shapes where there are any."""
    monkeypatch.setenv("FITUNE_CACHE", str(tmp_path))
    trace_with(TransformersTracer)
    config = find_known_model(name).config
    read = TransformersTracer().shapes(config, name=name, digest="", dtype="bfloat16")
    assert count_parameters(read).total == PUBLISHED_TOTALS_OF_TRACED[name]
    assert count_parameters(load_model_spec(name)) == count_parameters(read)


@pytest.mark.parametrize("name", PUBLISHED_BILLIONS)
def test_the_published_total_of_a_traced_model_to_its_last_digit(name):
    published = PUBLISHED_BILLIONS[name]
    total = count_parameters(load_model_spec(name, offline=True)).total
    assert f"{total / 1e9:.{len(published.partition('.')[2])}f}" == published


def test_components_of_qwen3_8b():
    counts = count_parameters(load_model_spec("Qwen/Qwen3-8B"))
    assert counts.attention == 36 * (2 * 4096 * 4096 + 2 * 4096 * 1024)
    assert counts.mlp == 36 * 3 * 4096 * 12288
    assert counts.norms == 36 * (2 * 4096 + 2 * 128) + 4096
    assert counts.embeddings == counts.head == 151936 * 4096
    assert (counts.experts, counts.router) == (0, 0)
    assert counts.active == counts.total


def test_a_token_of_mixtral_goes_through_two_of_eight_experts():
    counts = count_parameters(load_model_spec("mixtral-8x7b"))
    assert counts.experts == 32 * 8 * 3 * 4096 * 14336
    assert counts.total - counts.active == 32 * 6 * 3 * 4096 * 14336
    assert counts.router == 32 * 8 * 4096


@pytest.mark.parametrize("name", distinct_shapes())
def test_table_entry_is_the_transformers_model(name):
    """Two blocks are built, the rest is arithmetic: what a block adds is the same for every block."""
    known = find_known_model(name)
    layers = "n_layer" if "n_layer" in known.config else "num_hidden_layers"
    shallow = {**known.config, layers: 2}
    model = build(CONFIG_MAPPING[shallow["model_type"]](**shallow))
    two_blocks = number_of_parameters(model)
    block = sum(parameter.numel() for parameter in blocks(model)[0].parameters())
    counts = count_parameters(load_model_spec(name))
    assert count_parameters(spec_from_config(shallow, name=name)).total == two_blocks
    assert counts.total == two_blocks + (known.config[layers] - 2) * block


@pytest.mark.parametrize(("family", "different"), SMALL.values(), ids=SMALL)
def test_the_linears_are_those_of_the_first_block(family, different):
    config, spec = tiny(family, **different)
    model = build(config)
    assert count_parameters(spec).total == number_of_parameters(model)
    block = blocks(model)[0]
    for linear in spec.linears:
        assert shape_in(block, linear) == shape_of(linear), linear.name
    matrices = {name for name, p in block.named_parameters() if p.dim() > 1}
    assert {name.removesuffix(".weight") for name in matrices} == {linear.name for linear in spec.linears}
    assert spec.tied_embeddings == (
        model.get_output_embeddings().weight is model.get_input_embeddings().weight
    )


@pytest.mark.parametrize(("family", "different"), SMALL.values(), ids=SMALL)
def test_lora_trains_exactly_what_is_counted(family, different):
    config, spec = tiny(family, **different)
    for targets in (
        resolve_targets(spec, ["all-linear"]),
        spec.adaptable_names[:1],
        spec.adaptable_names[-1:],
    ):
        theirs = LoraConfig(r=4, target_modules=list(targets), fan_in_fan_out=family == "gpt2")
        adapted = get_peft_model(build(config, device="cpu"), theirs)
        trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
        ours = Lora(rank=4, alpha=4, dropout=0.0, targets=targets)
        assert trained == lora_parameters(spec, ours) > 0
        assert trained == sum(tensor.elements * tensor.count for tensor in adapters_of(spec, ours))


def test_lora_on_llama_3_1_8b_by_hand():
    """q, k, v, o, gate, up, down of 32 blocks at rank 16: 41.9 million, the figure PEFT prints."""
    spec = load_model_spec("meta-llama/Llama-3.1-8B")
    by_hand = 32 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))
    lora = Lora(rank=16, alpha=16, dropout=0.0, targets=spec.adaptable_names)
    assert lora_parameters(spec, lora) == by_hand == 41_943_040


def shape_of(linear):
    matrix = (linear.out_features, linear.in_features)
    return (linear.copies, *matrix) if linear.copies > 1 else matrix


def shape_in(block, linear):
    """The shape transformers has under that name, turned where Conv1D keeps it transposed."""
    found = block
    for part in linear.name.split("."):
        found = getattr(found, part)
    if isinstance(found, torch.Tensor):
        return tuple(found.shape)
    assert (getattr(found, "bias", None) is not None) == linear.bias
    shape = tuple(found.weight.shape)
    return shape[::-1] if type(found).__name__ == "Conv1D" else shape
