"""The devices that fitune knows by name, as the tables of docs/cards.md.

python bench/cards.py
"""

from fitune.spec.machines.cards import Card, devices_elsewhere, known_cards
from fitune.units import format_bytes


def main() -> None:
    names = f"card ({len(known_cards())}) | memory | dense 16 bit, TFLOP/s | fp32 | GB/s | capability"
    print(f"| {names} | link, host GB/s | source |")
    print("|---|---:|---:|---:|---:|---|---:|---|")
    for card in sorted(known_cards(), key=lambda card: (card.gpu.capability, card.gpu.memory_bytes)):
        print(card_line(card))
    print(f"\n| not trained on ({len(devices_elsewhere())}) | GB | TFLOP/s | GB/s | because of | source |")
    print("|---|---:|---:|---:|---|---|")
    for device in devices_elsewhere():
        memory, rate = device.advertised_gb or "–", f"{device.flops / 1e12:,.4g}" if device.flops else "–"
        print(
            f"| `{device.name}` | {memory} | {rate} | {device.bandwidth / 1e9:,.0f} | {device.kind} | {device.source} |"
        )


def card_line(card: Card) -> str:
    gpu = card.gpu
    numbers = "" if gpu.has_bf16 else " fp16"
    major, minor = gpu.capability
    return (
        f"| `{gpu.name}` | {format_bytes(gpu.memory_bytes)} | {gpu.fp16_flops / 1e12:,.4g}{numbers} | "
        f"{gpu.fp32_flops / 1e12:,.4g} | {gpu.bandwidth / 1e9:,.0f} | {major}.{minor} | "
        f"{gpu.link_bandwidth / 1e9:,.0f}, {gpu.host_bandwidth / 1e9:,.0f} | {gpu.source} |"
    )


if __name__ == "__main__":
    main()
