"""Is what was exported the model that was trained? Bits of every weight, and logits on fixed tokens.

Equal bits are asked of the weights, and of merged ones their own law (merge_law.py). Logits are compared within a
tolerance, because another device, another memory alignment or a merge rounds differently; with the same kernels they
come out equal too.
Shapes: B rows, T tokens, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import PeftModel
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from fitune.errors import CheckpointError
from fitune.models.attention import attends_by_rows

Check = Callable[[Tensor], bool]
"""True if a stored tensor is the one that was trained."""

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest |difference| of logits relative to the largest |logit|.

A merge rounds each weight once, by at most 2⁻²⁴ (fp32), 2⁻¹¹ (fp16), 2⁻⁸ (bf16) of its value.
Over some 200 linears in a row such errors add up like a random walk, to about 15 times that, and each
activation is rounded as often: 1e-6, 7e-3 and 6e-2 of a typical logit, less of the largest. That a router chooses
another expert for such a difference is no rounding: routes are fixed while logits are compared (routing.py).
"""


def fixed_ids(model: PreTrainedModel | PeftModel) -> Tensor:
    """The same 2 × 16 tokens [B, T] for every model of one vocabulary size."""
    config = _base(model).config.get_text_config()
    spread_BT = torch.arange(2 * 16).reshape(2, 16) * 7919 + 13
    return (spread_BT % config.vocab_size).to(_base(model).device)


@torch.no_grad()
def logits(model: PreTrainedModel | PeftModel) -> Tensor:
    """fp32 logits [B, T, V] of the fixed tokens on the host, without dropout; the model is left as it was."""
    training = model.training
    model.eval()
    try:
        logits_BTV: Tensor = model(input_ids=fixed_ids(model), use_cache=False).logits
    finally:
        model.train(training)
    return logits_BTV.float().cpu()


@contextmanager
def plain_attention(model: PreTrainedModel | PeftModel) -> Iterator[str]:
    """Transformers' own attention for a while; yields its name, for the reloaded model to use."""
    base = _base(model)
    before = base.config._attn_implementation
    if attends_by_rows(base):
        base.set_attn_implementation("sdpa" if base._supports_sdpa else "eager")
    try:
        yield base.config._attn_implementation
    finally:
        if base.config._attn_implementation != before:
            base.set_attn_implementation(before)


def is_equal(trained: Tensor, dtype: torch.dtype, stored: Tensor) -> bool:
    """True if ``stored`` is ``trained``, rounded to ``dtype``, bit for bit; a number that is none equals nothing."""
    wanted = trained.detach().cpu()
    wanted = wanted.to(dtype) if wanted.is_floating_point() else wanted
    return torch.equal(stored.to("cpu", wanted.dtype), wanted)


def require_same_weights(reloaded: Mapping[str, Tensor], checks: Mapping[str, Check]) -> None:
    """Raises CheckpointError naming the tensors that are not what was trained."""
    wrong = [name for name, check in checks.items() if name not in reloaded or not check(reloaded[name])]
    wrong += [name for name in reloaded if name not in checks]
    _refuse(wrong)


def require_same_files(folder: Path, checks: Mapping[str, Check]) -> int:
    """Compare the files in ``folder`` likewise, one tensor in memory at a time; also returns how many were compared.

    A name that is on disk only is passed over: some families store experts otherwise than they hold them.
    """
    compared, wrong = 0, []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (not a dict)
                if name in checks:
                    compared += 1
                    wrong += [] if checks[name](opened.get_tensor(name)) else [name]
    _refuse(wrong)
    return compared


def _refuse(wrong: Sequence[str]) -> None:
    if wrong:
        raise CheckpointError(
            f"the exported files do not hold the trained weights; {len(wrong)} tensors differ, "
            f"are not finite or are missing: {', '.join(wrong[:5])}"
        )


def require_close(found: Tensor, expected: Tensor, dtype: torch.dtype, *, slack: float = 1.0) -> float:
    """Largest |difference| of logits. Raises CheckpointError when it is more than rounding in ``dtype`` explains."""
    difference = (found - expected).abs().max().item()
    allowed = slack * TOLERANCE[dtype] * max(1.0, expected.abs().max().item())
    if not difference <= allowed:  # also refuses NaN
        raise CheckpointError(
            f"the exported model does not answer like the trained one: logits differ by {difference:.3g}, "
            f"rounding in {dtype} explains {allowed:.3g}"
        )
    return difference


def require_filled(folder: Path) -> None:
    """Raises CheckpointError for a file without tensors or with a tensor of no elements (trl#4416)."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            names = list(opened.keys())
            empty = [name for name in names if 0 in opened.get_slice(name).get_shape()]
        if empty or not names:
            raise CheckpointError(
                f"{file.name}: empty tensors were exported: {', '.join(empty[:5]) or 'all'}"
            )


def rounded_away(found: Tensor, trained: Tensor, untrained: Tensor) -> tuple[str, ...]:
    """A warning when a merge changed the logits by as much as half of what training did."""
    lost, learned = (found - trained).square().mean().sqrt(), (untrained - trained).square().mean().sqrt()
    if learned == 0:
        return ("the adapter changes nothing: merged and base model answer alike",)
    if lost > 0.5 * learned:
        return (
            f"rounding the merged weights moves the logits by {lost:.2g}, training moved them by {learned:.2g}: "
            "much of what was learned is lost; export the adapter, or train longer",
        )
    return ()


def _base(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    return model.get_base_model() if isinstance(model, PeftModel) else model
