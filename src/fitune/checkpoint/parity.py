"""A model that was read back, held against what was written and against the answers of the trained one.

Every tensor that was written must be in the model that transformers, or PEFT, makes of the folder. Logits are compared
within a tolerance, because another device, another memory alignment or a merge rounds differently; with the same
kernels they come out equal too. Reloading needs the weights a second time, on the device when they fit there and else
on the host. Where they fit nowhere a warning says so: the files were read back when they were written.

Both models send each token to the same experts. A router takes the k largest of its scores. Where two are nearly equal,
one rounding of a weight far before it swaps them, and logits of two right models differ by far more than rounding
explains.

Shapes: B rows, T tokens, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from fitune.checkpoint.layout import Digests, digest, require_same
from fitune.errors import CheckpointError, first_line, is_out_of_memory
from fitune.models.attention import use_cached_attention
from fitune.models.language_model import without_adapters

Model = PreTrainedModel | PeftModel
Verified = tuple[float | None, tuple[str, ...]]
"""Largest difference of an export's logits from the trained model's, on fixed tokens, None where they could not be
compared; and warnings, one of which then says why where a model was in memory."""

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest |difference| of logits relative to the largest |logit|.

A merge rounds each weight once, by at most 2⁻²⁴ (fp32), 2⁻¹¹ (fp16), 2⁻⁸ (bf16) of its value.
Over some 200 linears in a row such errors add up like a random walk, to about 15 times that, and each
activation is rounded as often: 1e-6, 7e-3 and 6e-2 of a typical logit, less of the largest. That a router chooses
another expert for such a difference is no rounding: routes are fixed while logits are compared.
"""


def verify_export(
    model: Model,
    digests: Digests,
    *,
    reload: Callable[[str], Any],
    held: Callable[[Any], Mapping[str, Tensor]],
    dtypes: Sequence[torch.dtype],
    slack: float,
    on_reloaded: Callable[[Any], None] = lambda _: None,
) -> Verified:
    """Load the export by ``reload`` (given the name of an attention) and compare what is ``held`` there with
    ``digests``, and its logits with those of ``model``.

    ``dtypes`` are those of the files. ``slack`` widens what is allowed to logits, where weights were rounded.
    Raises CheckpointError naming the weights that are wrong, or when logits differ by more than rounding explains.
    """
    difference: float | None = None
    warnings: tuple[str, ...] = ()
    with plain_attention(model) as attention:
        trained, routes = logits(model)
        try:
            reloaded = reload(attention)
            found = {name: digest(t) for name, t in held(reloaded).items() if name in digests}
            require_same(found, digests, "the exported files do not hold the trained weights")
            if has_routers(reloaded) and not routes:
                warnings = (
                    "logits are not compared: the experts that tokens take cannot be fixed; every weight is right",
                )
            else:
                kinds = [*(t.dtype for t in model.parameters() if t.is_floating_point()), *dtypes]
                coarsest = max(kinds, key=lambda kind: torch.finfo(kind).eps)
                again, _ = logits(reloaded, routes)
                difference = (again - trained).abs().max().item()
                allowed = slack * TOLERANCE[coarsest] * max(1.0, trained.abs().max().item())
                if not difference <= allowed:  # also refuses NaN
                    raise CheckpointError(
                        f"the exported model does not answer like the trained one: logits differ by {difference:.3g}, "
                        f"rounding in {coarsest} explains {allowed:.3g}"
                    )
            on_reloaded(reloaded)
            return difference, warnings
        except (MemoryError, RuntimeError, OSError) as error:
            if not is_out_of_memory(error):
                raise
            reason = first_line(error)
    warning = (
        f"not verified by reloading, for there is no memory for a second copy ({reason}); "
        f"{len(digests)} tensors were read back from the files and are right"
    )
    return None, (warning,)


@contextmanager
def plain_attention(model: Model) -> Iterator[str]:
    """Transformers' own attention for a while; yields its name, for the reloaded model to use."""
    base = without_adapters(model)
    before = base.config._attn_implementation
    use_cached_attention(base)
    try:
        yield base.config._attn_implementation
    finally:
        if base.config._attn_implementation != before:
            base.set_attn_implementation(before)


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


Routes = Mapping[str, tuple[Tensor, ...]]
"""Name of a router -> what it answered: scores, weights and numbers of the chosen experts."""


@torch.no_grad()
def logits(model: Model, routes: Routes | None = None) -> tuple[Tensor, Routes]:
    """fp32 logits [B, T, V] of 2 × 16 tokens, the same for every model of one vocabulary size, on the host, without
    dropout; and what its routers answered. With ``routes`` they answer as recorded. The model is left as it was."""
    base, recorded = without_adapters(model), dict[str, tuple[Tensor, ...]]()
    spread_BT = torch.arange(2 * 16).reshape(2, 16) * 7919 + 13
    ids_BT = (spread_BT % base.config.get_text_config().vocab_size).to(base.device)

    def hook_of(name: str) -> Callable[[nn.Module, Any, Any], Any]:
        """Records or repeats what the module ``name`` answers."""

        def hook(_module: nn.Module, _inputs: Any, output: Any) -> Any:
            """The tensors to answer with; None for the module's own."""
            if routes is None and _chooses(output):
                recorded[name] = tuple(tensor.detach().cpu() for tensor in output)
            if routes is None or name not in routes:
                return None
            pairs = zip(routes[name], output, strict=True)
            return tuple(wanted.to(own.device, own.dtype) for wanted, own in pairs)

        return hook

    modules = base.named_modules() if has_routers(model) else ()
    handles = [module.register_forward_hook(hook_of(name)) for name, module in modules if name]
    training = model.training
    model.eval()
    try:
        return model(input_ids=ids_BT, use_cache=False).logits.float().cpu(), recorded
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()


_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def has_routers(model: Model) -> bool:
    """True if the config of ``model`` says that tokens choose among experts."""
    config = without_adapters(model).config.get_text_config()
    return any((getattr(config, name, 0) or 0) > 1 for name in _EXPERTS)


def _chooses(output: Any) -> bool:
    """True if a module answered as transformers' routers do: tensors alone, and the numbers of experts among them."""
    if not isinstance(output, tuple) or not all(isinstance(tensor, Tensor) for tensor in output):
        return False
    return any(tensor.dtype == torch.int64 for tensor in output)
