"""Choices that carry their own settings: how weights are trained, and over how many devices states are divided."""

from dataclasses import dataclass
from typing import Literal

from fitune.units import MIB
from fitune.values.quantisers import Dense, Quantiser

_DENSE = Dense()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipByValue:
    """Every element of a gradient is cut to [−value, value]; one backward pass."""

    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipByNorm:
    """The whole gradient is scaled to this norm, 0 for never.

    Where one gradient is held at a time a first backward measures the norm.
    """

    max_norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AfterBackward:
    """All gradients of the global batch first, then one step of all weights, clipped as the schedule says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InBackward:
    """The plan's optimizer steps each weight as soon as its gradient exists, which is then let go of.

    As LOMO does (Lv et al. 2023, arXiv 2306.09782), with any optimizer. Nothing adds up: no accumulation.
    """

    clip: ClipByValue | ClipByNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class Full:
    """Train every parameter."""

    update: AfterBackward | InBackward = AfterBackward()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lomo:
    """Train every parameter, each updated in backward as soon as its gradient exists.

    Lv et al. 2023, arXiv 2306.09782. The update is SGD without momentum, so the plan's optimizer is ``Sgd()``.
    ``adaptive`` is AdaLomo (arXiv 2310.10195): a factored second moment per matrix. Gradients never add up: no
    accumulation, no fp32 masters.
    """

    adaptive: bool
    clip: ClipByValue | ClipByNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Train low-rank adapters on a frozen base (Hu et al. 2021, arXiv 2106.09685); a 4-bit base makes it QLoRA.

    ``targets`` are the names of the adapted linears inside a block: the last part (``q_proj``), or all of it where the
    last part names several (``attn.c_proj``).
    ``dora`` also trains the norm of each row of the adapted weights (Liu et al. 2024, arXiv 2402.09353).
    ``rslora`` scales what adapters add by alpha / √rank instead of alpha / rank (Kalajdzievski 2023, arXiv 2312.03732).
    ``layers`` are the numbers of the adapted blocks, ascending; empty: all.
    ``modules_to_save`` are trained whole beside the adapters, in place (PEFT's word, Llama's names whatever the model
    calls them); where embedding and head are one tensor, both are named.
    """

    rank: int
    alpha: int
    dropout: float
    targets: tuple[str, ...]
    base: Dense | Quantiser = _DENSE
    dora: bool = False
    rslora: bool = False
    layers: tuple[int, ...] = ()
    modules_to_save: tuple[Literal["embed_tokens", "lm_head"], ...] = ()

    def adapts(self, block: int) -> bool:
        """True if the block has adapters."""
        return not self.layers or block in self.layers


Tuning = Full | Lomo | Lora


def trains_every_weight(tuning: Tuning) -> bool:
    """Full fine-tuning, whether gradients are gathered or used at once."""
    return not isinstance(tuning, Lora)


def clip_in_backward(tuning: Tuning) -> ClipByValue | ClipByNorm | None:
    """The clipping of gradients that are used as soon as they exist; None where they are gathered first."""
    match tuning:
        case Lomo(clip=clip) | Full(update=InBackward(clip=clip)):
            return clip
    return None


def updates_in_backward(tuning: Tuning) -> bool:
    """One gradient is alive at a time, and there are no others to add it to."""
    return clip_in_backward(tuning) is not None


def trains_embeddings(tuning: Tuning) -> bool:
    """True if the embeddings are trained."""
    return not isinstance(tuning, Lora) or "embed_tokens" in tuning.modules_to_save


def trains_head(tuning: Tuning) -> bool:
    """True if the output head is trained."""
    return not isinstance(tuning, Lora) or "lm_head" in tuning.modules_to_save


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW:
    """Two states per trained parameter (Loshchilov & Hutter, arXiv 1711.05101)."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW8bit:
    """AdamW with both states in 8 bit, scaled in blocks of 256 (Dettmers et al. 2022, arXiv 2110.02861)."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0


EIGHT_BIT_BLOCK = 256
"""Elements of an 8-bit state per fp32 scale (bitsandbytes' block size of its optimizers)."""
EIGHT_BIT_LEAST = 4096
"""Tensors of fewer elements keep fp32 states (bitsandbytes' min_8bit_size)."""
MASTER_BUCKET_BYTES = 64 * MIB
"""fp32 gradients exist for at most this many bytes of fp32 masters at a time."""
ADALOMO_ROWS = 512
"""Rows whose norms AdaLomo takes at a time. CUDA adds so many up without memory of its own: for 128,256 × 4,096 at once
it takes 252 MiB (Reduce.cuh)."""
DDP_BUCKET_BYTES = 25 * MIB
"""DDP sums gradients in buckets of this size; torch's own choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sgd:
    """No state without momentum, one per trained parameter with it."""

    momentum: float = 0.0
    weight_decay: float = 0.0


Optimizer = AdamW | AdamW8bit | Sgd


@dataclass(frozen=True, slots=True, kw_only=True)
class Single:
    """One process, one device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ddp:
    """Every device holds everything; gradients are summed in backward (Li et al. 2020, arXiv 2006.15704)."""


Backend = Literal["fsdp", "deepspeed"]
"""Library that divides the states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Zero:
    """Each device keeps one share of the states (Rajbhandari et al. 2020, arXiv 1910.02054).

    Stage 1 shares masters and optimizer states, 2 also gradients, 3 also weights. ``fsdp`` is torch's fully_shard:
    weights are shares between two steps at every stage; at stage 3 a block's weights exist whole only while it
    works, at 2 from forward to backward, at 1 whole gradients add up too until they are reduced once a step.
    ``hybrid`` shares within a node and repeats that on every node. ``settings`` are DeepSpeed's own, as the user's file
    names them; what is not among them is chosen (values/deepspeed.py).
    """

    stage: Literal[1, 2, 3]
    backend: Backend
    hybrid: bool = False
    settings: tuple[tuple[str, int | bool], ...] = ()


Sharding = Single | Ddp | Zero

Place = Literal["device", "cpu", "nvme"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """The place of each kind of state while nothing works on it; ``cpu`` is pinned host memory.

    ``parameters``: the weights, fetched block by block in forward and backward. ``optimizer``: masters and states,
    stepped by the host, and the gradients it steps with. ``activations``: what the blocks keep for backward.
    ``nvme_path`` is the folder for what waits on NVMe; empty when nothing does.
    """

    parameters: Place = "device"
    optimizer: Place = "device"
    activations: Place = "device"
    nvme_path: str = ""

    @property
    def places(self) -> tuple[Place, Place, Place]:
        """Where parameters, optimizer states and activations wait."""
        return self.parameters, self.optimizer, self.activations
