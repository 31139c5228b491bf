"""Spellings of the names of devices, devices by their figures alone, and hardware made of them."""

import re
from dataclasses import dataclass, replace

from fitune.errors import HardwareError, did_you_mean, joined_hints
from fitune.units import GIB
from fitune.values.machines.cards import Card, devices_elsewhere, known_cards
from fitune.values.machines.hardware import Gpu, Hardware

_WATTS = re.compile(r"(?<!\d)(\d{2,4}) ?w(?:atts?)?(?![a-z])")
_NOISE = re.compile(
    r"nvidia|geforce|tesla|quadro|rtx|gtx|jetson|blackwell|generation|edition|workstation|amd|instinct|intel|apple"
    r"|colab|kaggle|(?<![a-z])(?:gpu|ac)(?![a-z])"
)
_FORM_FACTOR = re.compile(r"(sxm\d?|pcie|hbm\d?e?)")
_MEMORY = re.compile(r"(?<![a-z\d])(\d+)\s*(?:gb|gib|g)(?![a-z])")


def gpu_names() -> tuple[str, ...]:
    """The canonical names."""
    return tuple(card.gpu.name for card in known_cards())


def find_gpu(name: str) -> Gpu:
    """The GPU of a canonical name or any usual spelling: ``RTX4090``, ``NVIDIA A100-SXM4-80GB``, ``Tesla V100 32GB``.

    ``h100`` means the SXM card, or may be a slower board; with a form factor or watts (``H100 (350W)``) it is one of
    them. A product that comes with two sizes of memory needs the size: ``v100``, ``a100`` and ``4060ti`` alone are
    refused, because a plan for the larger would not run on the smaller. Of sizes less than twice apart the one sold
    without a size in its name is meant (``3060``). Raises HardwareError for those and for unknown names.
    """
    card = _card_of(name)
    return _board(name, card.gpu)


def shared_host_bytes(name: str) -> int:
    """Bytes that are left to the host where it shares one memory with the device ``name``; else 0."""
    return _card_of(name).host_bytes


_LARGE_NODES = {"v100-32gb": 16, "a100-40gb": 16}
"""GPUs in the largest machines that are sold or rented, where those have more than 8: NVIDIA's DGX-2 (its data sheet)
and Google Cloud's a2-megagpu-16g."""


def most_gpus(name: str) -> int:
    """GPUs in the largest machine with the card ``name``: one where it shares the host's memory."""
    card = _card_of(name)
    return 1 if card.host_bytes else _LARGE_NODES.get(card.gpu.name, 8)


def gpus_called(name: str) -> tuple[Gpu, ...]:
    """The GPUs of the product that ``name`` spells, one for each size of memory; none for an unknown name."""
    return tuple(card.gpu for card in _sizes_of(_split_name(name)[0]))


def _sizes_of(key: str) -> list[Card]:
    return _cards_of(key) or _cards_of(_FORM_FACTOR.sub("", key))


def _card_of(name: str) -> Card:
    key, gb = _split_name(name)
    cards = _sizes_of(key)
    found = [card for card in cards if gb in (None, card.advertised_gb, *card.other_gb)]
    if gb is None and len(found) > 1:
        sizes = [card.advertised_gb for card in found]
        usual = [card for card in found if not card.gpu.name.endswith("gb")]
        usual = usual if max(sizes) < 2 * min(sizes) else []
        found = [card for card in found if card.gpu.name == name.lower()] or usual or found
    if len(found) == 1:
        return found[0]
    if cards:
        raise HardwareError(
            f"gpu = {name!r}: {cards[0].key.upper()} comes with "
            + " or ".join(f"{card.advertised_gb} GB" for card in cards),
            hint="--gpu one of " + ", ".join(f"{card.gpu.name} ({card.advertised_gb} GB)" for card in cards),
        )
    _refuse_elsewhere(name, key)
    _refuse_slips(name)
    raise HardwareError(
        f"gpu = {name!r} is not cpu and none of the {len(known_cards())} known cards",
        hint=joined_hints(did_you_mean(name, gpu_names()), CARDS_OF_A_SIZE, BY_FIGURES),
    )


CARDS_OF_A_SIZE = "gpu: 24GB lists the cards of that size"
BY_FIGURES = "without --gpu, --gpu-memory 24GiB --gpu-flops 165e12 --gpu-bandwidth 1008GB/s describe any other CUDA GPU"
_WHY_ELSEWHERE = {
    "rocm": "it runs ROCm, on which fitune has never been run",
    "gaudi": "it is no CUDA device",
    "metal": "it runs Metal; on a Mac fitune trains small models on the processor",
    "pascal": "its compute capability is below 7.0 (Volta), which fitune needs",
}


def _refuse_elsewhere(name: str, key: str) -> None:
    """Raises HardwareError for a device without CUDA 7.0."""
    found = next((device for device in devices_elsewhere() if device.key == key), None)
    if found is None and not _APPLE.fullmatch(key):
        return
    kind = "metal" if found is None else found.kind
    raise HardwareError(
        f"gpu = {name!r}: fitune does not train on {name if found is None else found.name}: {_WHY_ELSEWHERE[kind]}",
        hint=_ON_A_MAC if kind == "metal" else BY_FIGURES,
    )


def _refuse_slips(name: str) -> None:
    """Raises HardwareError for several cards, a laptop's card, a device without CUDA, and ``cuda`` itself."""
    text = name.lower()
    _refuse_several(name, text)
    _refuse_size(name, text)
    if re.fullmatch(r"(cuda|gpu)(:\d+)?", text):
        raise HardwareError(f"gpu = {name!r} is no card", hint="leave gpu out for the GPUs of this machine")
    if _LAPTOP.search(text):
        raise HardwareError(
            f"gpu = {name!r}: a laptop's card has less memory and speed than the desktop's of its name, and none "
            "is in the table",
            hint=BY_FIGURES,
        )
    if _NO_CUDA.search(text):
        raise HardwareError(
            f"gpu = {name!r} is no CUDA device: fitune trains on those and on processors",
            hint=f"--gpu cpu, or a card: {CARDS_OF_A_SIZE}",
        )


def _refuse_several(name: str, text: str) -> None:
    """Raises HardwareError for ``2x3090`` and ``3090,3090``: cards by their number or one by one, alike or not."""
    counted = next(filter(None, (pattern.fullmatch(text) for pattern in _COUNTED)), None)
    listed = [part.strip() for part in re.split(r"[,;+&]", text)]
    if counted:
        listed = [counted["card"]] * int(counted["number"])
    found = [_cards_of(_split_name(part)[0]) for part in listed]
    if (len(listed) == 1 and not counted) or not found or not all(found):
        return
    fault, card = "gives a number of cards" if counted else "lists several cards", listed[0]
    if len({_split_name(part) for part in listed}) > 1:
        fault = "names different cards: all GPUs of a plan are of one kind"
        card = min((cards[0].gpu for cards in found), key=lambda gpu: gpu.memory_bytes).name
    raise HardwareError(
        f"gpu = {name!r} {fault}", hint=f"--gpu {card.replace(' ', '-')} --gpus {len(listed)}"
    )


def _refuse_size(name: str, text: str) -> None:
    """Raises HardwareError for ``24GB``: the cards of that size, as sold."""
    size = re.fullmatch(r"(\d{1,3}) ?gi?b?", text)
    if size is None:
        return
    cards = [card.gpu.name for card in known_cards() if card.advertised_gb == int(size[1])]
    raise HardwareError(
        f"gpu = {name!r} is a size, not a card",
        hint=f"--gpu one of {size[1]} GB: {', '.join(cards)}" if cards else BY_FIGURES,
    )


_COUNTED = (
    re.compile(r"(?P<number>\d{1,2}) ?[x×*] ?(?P<card>.+)"),
    re.compile(r"(?P<card>.+?) ?[x×*] ?(?P<number>\d{1,2})"),
)
_LAPTOP = re.compile(r"laptop|mobile|max-?q")
_NO_CUDA = re.compile(
    r"radeon|\brx ?\d{4}|\d{4} ?xtx?\b|\bstrix|\barc\b|\btpu|\bv\d[ep]\b|trainium|inferentia|ascend|\bnpu\b"
)
_ON_A_MAC = "on that Mac, --gpu cpu plans for its own processor and memory"
_APPLE = re.compile(r"m\d(pro|max|ultra)?|mps|metal|(apple|mac).*")
"""Keys of Apple's chips and machines; not all of them stand in the table."""


def _board(name: str, gpu: Gpu) -> Gpu:
    """The board of ``name`` where one name is sold with several powers (H100: 350 W, 500 W and 700 W)."""
    text = name.lower()
    if not gpu.slower_board:
        return gpu
    watts = _WATTS.search(text)
    if watts and int(watts.group(1)) <= 400 and not _FORM_FACTOR.search(text):
        return find_gpu(gpu.slower_board)
    is_named = _FORM_FACTOR.search(text) or "workstation" in text or (watts and int(watts.group(1)) >= 600)
    return replace(gpu, slower_board="") if is_named else gpu


def _split_name(name: str) -> tuple[str, int | None]:
    """The product without maker, brand and separators, and the memory if it is named: ("a100pcie", 40)."""
    text = name.lower()
    text = _WATTS.sub(" ", text)
    memory = _MEMORY.search(text)
    text = _NOISE.sub(" ", _MEMORY.sub(" ", text))
    return re.sub(r"[^a-z0-9]", "", text), int(memory.group(1)) if memory else None


def _cards_of(key: str) -> list[Card]:
    return [card for card in known_cards() if card.key == key]


def similar_gpu(name: str, *, memory_bytes: int, capability: tuple[int, int]) -> Gpu:
    """A device that is not in the table but was found in a machine: memory as found, rates a stand-in.

    They are those of the slowest known card of the nearest architecture that is not newer; ``source`` says so.
    """
    older = [card.gpu for card in known_cards() if card.gpu.capability <= capability]
    if not older:
        raise HardwareError(
            f"{name} has compute capability {capability[0]}.{capability[1]}; fitune needs 7.0 (Volta) or newer"
        )
    nearest = max(gpu.capability for gpu in older)
    like = min((gpu for gpu in older if gpu.capability == nearest), key=lambda gpu: gpu.fp16_flops)
    return replace(
        like,
        name=name,
        memory_bytes=memory_bytes,
        capability=capability,
        link_bandwidth=like.host_bandwidth,
        source=f"memory as the driver reports; not in the table: rates of the slowest like it, {like.name}",
        slower_board="",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFigures:
    """Figures that a recipe gives of its GPU besides a name or instead of one; None is not given."""

    memory_bytes: int | None = None
    flops: float | None = None
    """Dense bf16, accumulating in fp32."""
    bandwidth: float | None = None
    link_bandwidth: float | None = None

    @property
    def describe_a_gpu(self) -> bool:
        """True if a figure of the device itself is given."""
        return any(each is not None for each in (self.memory_bytes, self.flops, self.bandwidth))


def gpu_of_figures(figures: GpuFigures) -> Gpu:
    """A CUDA GPU that nobody has named. Assumed: fp32 at a quarter of bf16, compute capability 8.0, PCIe 4.

    Raises HardwareError where its three figures are not all there.
    """
    if figures.memory_bytes is None or figures.flops is None or figures.bandwidth is None:
        raise HardwareError("a GPU by its figures needs memory, FLOPS and bandwidth", hint=BY_FIGURES)
    return Gpu(
        name=f"gpu-{round(figures.memory_bytes / GIB)}gib",
        memory_bytes=figures.memory_bytes,
        bf16_flops=figures.flops,
        fp16_flops=figures.flops,
        fp32_flops=figures.flops / 4,
        bandwidth=figures.bandwidth,
        capability=(8, 0),
        link_bandwidth=figures.link_bandwidth or _PCIE_4,
        host_bandwidth=_PCIE_4,
        source="figures of the recipe; assumed: compute capability 8.0, PCIe 4, fp32 at a quarter of bf16",
    )


def with_figures(gpu: Gpu, figures: GpuFigures) -> Gpu:
    """``gpu`` with the figures of the recipe in place of its own."""
    if figures == GpuFigures():
        return gpu
    scale = 1.0 if figures.flops is None else figures.flops / gpu.fp16_flops
    return replace(
        gpu,
        memory_bytes=figures.memory_bytes or gpu.memory_bytes,
        bf16_flops=gpu.bf16_flops * scale,
        fp16_flops=gpu.fp16_flops * scale,
        bandwidth=figures.bandwidth or gpu.bandwidth,
        link_bandwidth=figures.link_bandwidth or gpu.link_bandwidth,
        source=f"{gpu.source}; some figures of the recipe",
    )


_PCIE_4 = 32e9
NODE_NETWORK = 12.5e9
"""Bytes/s in one direction between two nodes where nobody says: 100 Gbit/s, our assumption."""


def cpu_gpu(*, memory_bytes: int, cores: int, has_bf16_products: bool = False) -> Gpu:
    """The processor as a device. Capability (0, 0); links are memory copies.

    fp32: 40 GFLOP/s a core, half of what one AVX2 core was measured to reach (83 on a cloud EPYC, torch
    2.13, 768³ products). 16 bit: 1 GFLOP/s, measured on the same core: without AVX512-BF16 or AMX torch
    falls back to scalar code. bf16 with such instructions (``has_bf16_products``): twice fp32; a Zen 4 core was
    measured to reach 2.2 times. Memory: 10 GB/s a core, at most 40 (two channels of DDR4).
    """
    bf16 = 80e9 if has_bf16_products else 1e9
    bandwidth = 10e9 * min(cores, 4)
    return Gpu(
        name="cpu",
        memory_bytes=memory_bytes,
        bf16_flops=bf16 * cores,
        fp16_flops=1e9 * cores,
        fp32_flops=40e9 * cores,
        bandwidth=bandwidth,
        capability=(0, 0),
        link_bandwidth=bandwidth,
        host_bandwidth=bandwidth,
        source=f"{cores} cores × 40 GFLOP/s fp32 (half of one measured AVX2 core), {bf16 / 1e9:g} GFLOP/s bf16",
    )


def hardware_for(
    *,
    gpu: Gpu,
    gpus: int = 1,
    nodes: int = 1,
    host_memory_bytes: int = 0,
    cpu_cores: int = 0,
    nvme_bytes: int = 0,
    internode_bandwidth: float = NODE_NETWORK,
) -> Hardware:
    """``gpus`` is the number in each node. Between nodes: 100 Gbit/s Ethernet a node unless told otherwise."""
    for name, value in (("gpus", gpus), ("nodes", nodes)):
        if value < 1:
            raise HardwareError(f"{name} = {value} must be at least 1")
    return Hardware(
        gpu=gpu,
        gpus_per_node=gpus,
        nodes=nodes,
        host_memory_bytes=host_memory_bytes,
        cpu_cores=cpu_cores,
        nvme_bytes=nvme_bytes,
        internode_bandwidth=internode_bandwidth if nodes > 1 else 0.0,
    )
