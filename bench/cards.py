"""The devices that fitune knows by name, as the tables of docs/cards.md.

python bench/cards.py
"""

from itertools import groupby

from fitune.values.machines.cards import Card, devices_elsewhere, known_cards

KINDS = {"rocm": "AMD (ROCm)", "gaudi": "Intel Gaudi", "metal": "Apple (Metal)", "pascal": "NVIDIA Pascal"}


def main() -> None:
    cards = sorted(known_cards(), key=lambda card: (card.gpu.capability, card.gpu.memory_bytes))
    print(f"| card ({len(cards)}) | GiB | dense 16 bit, TFLOP/s | GB/s | capability | link, host GB/s |")
    print("|---|---:|---:|---:|---|---:|")
    for card in cards:
        print(card_line(card))
    elsewhere = devices_elsewhere()
    print(f"\n| not trained on ({len(elsewhere)}) | |\n|---|---|")
    for kind, devices in groupby(elsewhere, key=lambda device: device.kind):
        print(f"| {KINDS[kind]} | {', '.join(f'`{device.name}`' for device in devices)} |")


def card_line(card: Card) -> str:
    gpu = card.gpu
    numbers = "" if gpu.has_bf16 else " fp16"
    major, minor = gpu.capability
    return (
        f"| `{gpu.name}` | {gpu.memory_bytes / 2**30:.2f} | {gpu.fp16_flops / 1e12:,.4g}{numbers} | "
        f"{gpu.bandwidth / 1e9:,.0f} | {major}.{minor} | "
        f"{gpu.link_bandwidth / 1e9:,.0f}, {gpu.host_bandwidth / 1e9:,.0f} |"
    )


if __name__ == "__main__":
    main()
