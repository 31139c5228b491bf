"""The devices that fitune knows by name, as the tables of docs/cards.md.

python bench/cards.py
"""

from fitune.spec.machines.cards import Card, Elsewhere, devices_elsewhere, known_cards
from fitune.units import format_bytes


def main() -> None:
    cards = sorted(known_cards(), key=lambda card: (card.gpu.capability, card.gpu.memory_bytes))
    sources = list(dict.fromkeys(source_of(device) for device in (*cards, *devices_elsewhere())))
    names = f"card ({len(cards)}) | memory | dense 16 bit, TFLOP/s | fp32 | GB/s | capability"
    print(f"| {names} | link, host GB/s | source |")
    print("|---|---:|---:|---:|---:|---|---:|---:|")
    for card in cards:
        print(card_line(card, sources.index(source_of(card)) + 1))
    print(f"\n| not trained on ({len(devices_elsewhere())}) | GB | TFLOP/s | GB/s | because of | source |")
    print("|---|---:|---:|---:|---|---:|")
    for device in devices_elsewhere():
        memory, rate = device.advertised_gb or "–", f"{device.flops / 1e12:,.4g}" if device.flops else "–"
        source = sources.index(source_of(device)) + 1
        print(
            f"| `{device.name}` | {memory} | {rate} | {device.bandwidth / 1e9:,.0f} | {device.kind} | {source} |"
        )
    print("\nSources:\n")
    for number, source in enumerate(sources, 1):
        print(f"{number}. {source}")


def source_of(device: Card | Elsewhere) -> str:
    return device.gpu.source if isinstance(device, Card) else device.source


def card_line(card: Card, source: int) -> str:
    gpu = card.gpu
    numbers = "" if gpu.has_bf16 else " fp16"
    major, minor = gpu.capability
    return (
        f"| `{gpu.name}` | {format_bytes(gpu.memory_bytes)} | {gpu.fp16_flops / 1e12:,.4g}{numbers} | "
        f"{gpu.fp32_flops / 1e12:,.4g} | {gpu.bandwidth / 1e9:,.0f} | {major}.{minor} | "
        f"{gpu.link_bandwidth / 1e9:,.0f}, {gpu.host_bandwidth / 1e9:,.0f} | {source} |"
    )


if __name__ == "__main__":
    main()
