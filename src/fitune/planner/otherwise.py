"""Faster and cheaper ways for the same model that the user has to decide about: lesser quality, fewer machines."""

from collections.abc import Iterator
from dataclasses import replace

from fitune.planner.candidates import Method, Request
from fitune.planner.fit import Found
from fitune.planner.method_search import MethodSearch
from fitune.planner.methods import lomo_of
from fitune.spec.plan import AdamW8bit, Full, Precision, Sgd
from fitune.spec.predictions import Priced
from fitune.units import format_dollars, format_rate

MUCH_FASTER = 1.4
"""Times the speed from which a way that changes the quality is named."""
FURTHER_GAIN = 1.25
"""Times the speed of a way with better quality from which a worse one is named beside it."""


def notes_on_quality(
    request: Request, method: Method, chosen: Priced, *, price_per_gpu_hour: float
) -> Iterator[str]:
    """Ways to train every weight on the devices alone that are much faster than with states on the host, and what each
    does to the result."""
    plan, recipe = chosen.plan, request.recipe
    is_open = recipe.precision is None and "optimizer" not in recipe.model_fields_set
    if (
        plan.tuning != Full()
        or plan.precision is not Precision.BF16_MASTER
        or plan.offload.optimizer == "device"
    ):
        return
    best = MUCH_FASTER * chosen.estimate.tokens_per_second
    for words, loses, other in _lesser(request, method) if is_open else ():
        found = MethodSearch(request, other, on_device=True).fastest()
        if found and found[0].tokens_per_second >= best:
            best = FURTHER_GAIN * found[0].tokens_per_second
            ratio = found[0].tokens_per_second / chosen.estimate.tokens_per_second
            cost = _cost_words(found[0], chosen, price_per_gpu_hour)
            yield f"note on speed: {words} is {ratio:.1f} × as fast{cost} on the devices alone, and {loses}"


def _lesser(request: Request, method: Method) -> Iterator[tuple[str, str, Method]]:
    """Settings, what they do to the result, and the method, the better first."""
    rounded = "rounds away updates under 1/256 of a weight"
    recipe = request.recipe
    eight_bit = AdamW8bit(
        beta1=recipe.adam_beta1,
        beta2=recipe.adam_beta2,
        eps=recipe.adam_epsilon,
        weight_decay=recipe.weight_decay,
    )
    bf16 = replace(method, precision=Precision.BF16)
    yield "precision: bf16", rounded, bf16
    yield (
        "precision: bf16 with optimizer: adamw-8bit",
        f"{rounded} and keeps moments in 8 bits",
        replace(bf16, optimizer=eight_bit),
    )
    adalomo = replace(
        bf16, tuning=lomo_of(recipe, adaptive=True), optimizer=Sgd(weight_decay=recipe.weight_decay)
    )
    yield "tuning: adalomo", f"{rounded} and keeps no momentum", adalomo


def _cost_words(found: Found, chosen: Priced, price: float) -> str:
    if not price:
        return ""
    dollars = price * chosen.plan.hardware.num_gpus / 3600 * 1e6
    there, here = dollars / found.tokens_per_second, dollars / chosen.estimate.tokens_per_second
    return f" ({format_dollars(there)} instead of {format_dollars(here)} a million tokens)"


def notes_on_nodes(request: Request, method: Method, chosen: Priced) -> Iterator[str]:
    """Says so where one node alone trains faster than all of them."""
    hardware = chosen.plan.hardware
    if hardware.nodes == 1:
        return
    alone = replace(request, hardware=replace(request.hardware, nodes=1, internode_bandwidth=0.0))
    found = MethodSearch(alone, method).fastest()
    speed = chosen.estimate.tokens_per_second
    if found and found[0].tokens_per_second > speed:
        yield (
            f"note on nodes: one node alone is {found[0].tokens_per_second / speed:.1f} × as fast, "
            f"{format_rate(found[0].tokens_per_second)}, because {hardware.internode_bandwidth * 8 / 1e9:g} Gbit/s "
            "between nodes is the limit; nodes: 1, or a larger global_batch_size, which sends as much for more rows"
        )
