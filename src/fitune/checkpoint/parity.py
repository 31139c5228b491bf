"""An export read back and held against the model in memory: bits of every weight, then logits on fixed tokens.

Equal bits are asked of the weights, and of merged ones their own law (merge_law.py). Logits are compared within a
tolerance, because another device, another memory alignment or a merge rounds differently; with the same kernels they
come out equal too. Reloading needs the weights a second time, on the device when they fit there and else on the host.
Where they fit nowhere the files are compared tensor by tensor, and a warning says that logits were not.

Both models send each token to the same experts. A router takes the k largest of its scores. Where two are nearly equal,
one rounding of a weight far before it swaps them, and logits of two right models differ by far more than rounding
explains.

Shapes: B rows, T tokens, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from fitune.errors import CheckpointError, is_out_of_memory
from fitune.models.attention import attends_by_rows

Model = PreTrainedModel | PeftModel
Check = Callable[[Tensor], bool]
"""True if a stored tensor is the one that was trained."""

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest |difference| of logits relative to the largest |logit|.

A merge rounds each weight once, by at most 2⁻²⁴ (fp32), 2⁻¹¹ (fp16), 2⁻⁸ (bf16) of its value.
Over some 200 linears in a row such errors add up like a random walk, to about 15 times that, and each
activation is rounded as often: 1e-6, 7e-3 and 6e-2 of a typical logit, less of the largest. That a router chooses
another expert for such a difference is no rounding: routes are fixed while logits are compared.
"""


def fixed_ids(model: Model) -> Tensor:
    """2 × 16 tokens [B, T], the same for every model of one vocabulary size."""
    config = _base(model).config.get_text_config()
    spread_BT = torch.arange(2 * 16).reshape(2, 16) * 7919 + 13
    return (spread_BT % config.vocab_size).to(_base(model).device)


@torch.no_grad()
def logits(model: Model) -> Tensor:
    """fp32 logits [B, T, V] of the fixed tokens on the host, without dropout; the model is left as it was."""
    training = model.training
    model.eval()
    try:
        logits_BTV: Tensor = model(input_ids=fixed_ids(model), use_cache=False).logits
    finally:
        model.train(training)
    return logits_BTV.float().cpu()


@contextmanager
def plain_attention(model: Model) -> Iterator[str]:
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


def require_close(found: Tensor, expected: Tensor, dtype: torch.dtype, *, slack: float) -> float:
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


def _base(model: Model) -> PreTrainedModel:
    return model.get_base_model() if isinstance(model, PeftModel) else model


Routes = Mapping[str, tuple[Tensor, ...]]
"""Name of a router -> what it answered: scores, weights and numbers of the chosen experts."""


@contextmanager
def recorded_routes(model: Model) -> Iterator[Routes]:
    """Yields a mapping that the routers of ``model`` write into while they run, each its last answer."""
    routes: dict[str, tuple[Tensor, ...]] = {}

    def record(name: str, output: Any) -> None:
        if _chooses(output):
            routes[name] = tuple(tensor.detach().cpu() for tensor in output)

    with _hooked(model, record):
        yield routes


@contextmanager
def fixed_routes(model: Model, routes: Routes) -> Iterator[None]:
    """While it lasts, the routers of ``model`` answer as recorded."""

    def answer(name: str, output: Any) -> Any:
        if name not in routes:
            return None
        return tuple(
            wanted.to(own.device, own.dtype) for wanted, own in zip(routes[name], output, strict=True)
        )

    with _hooked(model, answer):
        yield


def has_routers(model: Model) -> bool:
    """True if the config of ``model`` says that tokens choose among experts."""
    config = _base(model).config.get_text_config()
    return any((getattr(config, name, 0) or 0) > 1 for name in _EXPERTS)


_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


@contextmanager
def _hooked(model: Model, hook: Callable[[str, Any], Any]) -> Iterator[None]:
    def hook_of(name: str) -> Callable[[nn.Module, Any, Any], Any]:
        return lambda _module, _inputs, output: hook(name, output)

    modules = _base(model).named_modules() if has_routers(model) else ()
    handles = [module.register_forward_hook(hook_of(name)) for name, module in modules if name]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _chooses(output: Any) -> bool:
    """True if a module answered as transformers' routers do: tensors alone, and the numbers of experts among them."""
    if not isinstance(output, tuple) or not all(isinstance(tensor, Tensor) for tensor in output):
        return False
    return any(tensor.dtype == torch.int64 for tensor in output)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """Result of a verification; ``difference`` and ``found`` are None where logits could not be compared."""

    trained: Tensor
    found: Tensor | None = None
    difference: float | None = None
    warnings: tuple[str, ...] = ()


def verify_export(
    model: Model,
    folder: Path,
    checks: Mapping[str, Check],
    *,
    reload: Callable[[str], Any],
    weights_of: Callable[[Any], Mapping[str, Tensor]],
    dtypes: Sequence[torch.dtype],
    slack: float,
    on_reloaded: Callable[[PreTrainedModel], None] | None,
) -> Verified:
    """Compare what ``reload`` (given the name of an attention) makes of ``folder`` with ``model``.

    ``checks`` say of each of its ``weights_of`` whether it is right; ``dtypes`` are those of the files.
    ``slack`` widens what is allowed to logits, where weights were rounded on the way.
    Raises CheckpointError naming the weights that are wrong, or when logits differ by more than rounding explains.
    """
    with plain_attention(model) as attention, recorded_routes(model) as routes:
        trained = logits(model)
        try:
            reloaded = reload(attention)
            require_same_weights(weights_of(reloaded), checks)
            compared = _compared(reloaded, trained, routes, _coarsest(model, dtypes), slack)
            if on_reloaded is not None:
                on_reloaded(reloaded)
            return compared
        except (MemoryError, RuntimeError, OSError) as error:
            if not is_out_of_memory(error):
                raise
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    count = require_same_files(folder, checks)
    warning = (
        f"not verified by reloading, for there is no memory for a second copy ({reason}); "
        f"{count} tensors in the files were compared one by one and are right"
    )
    return Verified(trained=trained, warnings=(warning,))


def _compared(reloaded: Model, trained: Tensor, routes: Routes, dtype: torch.dtype, slack: float) -> Verified:
    if has_routers(reloaded) and not routes:
        warning = (
            "logits are not compared: the experts that tokens take cannot be fixed; every weight is right"
        )
        return Verified(trained=trained, warnings=(warning,))
    with fixed_routes(reloaded, routes):
        found = logits(reloaded)
    difference = require_close(found, trained, dtype, slack=slack)
    return Verified(trained=trained, found=found, difference=difference)


def reload_device(model: Model, *, needed_bytes: int | None = None) -> torch.device:
    """The model's own device, so that the same kernels answer, unless a second copy does not fit there.

    ``needed_bytes``: of a copy that is not as large as the model.
    """
    device = next(model.parameters()).device
    if device.type != "cuda":
        return device
    needed = needed_bytes or sum(parameter.nbytes for parameter in model.parameters())
    free, _ = torch.cuda.mem_get_info(device)
    return device if free > 1.2 * needed else torch.device("cpu")


def _coarsest(model: Model, dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """The floating type with the coarsest steps among the trained and the exported weights."""
    trained = (tensor.dtype for tensor in model.parameters() if tensor.is_floating_point())
    return max((*trained, *dtypes), key=lambda dtype: torch.finfo(dtype).eps)
