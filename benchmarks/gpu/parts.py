"""The parts of the GPU check, in their order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["PARTS", "Part", "part_named"]


@dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
        name: Name of the part and of its file.
        function: ``module:function`` of the package; takes the scale and a function that reports progress.
        proves: What a passed part proves, as a clause for a table.
        minutes: Minutes that it is expected to take on one card.
        limit: Minutes after which it is ended.
        cards: Cards that it needs.
        nodes: Nodes that it needs; a part for several nodes is started by torchrun alone.
    """

    name: str
    function: str
    proves: str
    minutes: float
    limit: float
    cards: int = 1
    nodes: int = 1


PARTS: Final = (
    Part("environment", "environment:environment", "which card, driver and software the numbers are from", 0.2, 2),
    Part("tests", "gpu_tests:gpu_tests", "Triton codecs give the bytes of the C++ ones; stream lanes keep order", 6, 9),
    Part(
        "codecs",
        "codecs:codec_speeds",
        "INT8 reaches 80 % and INT4 60 % of a device copy, both ways; messages equal the reference",
        7,
        9.5,
    ),
    Part("encoded", "training:encoded_losses", "training with codecs gives the losses that it gives on CPU", 1.5, 5),
    Part("presets", "training:presets_on_one_card", "every preset trains as on CPU, on NCCL and on 4 ranks", 3, 7),
    Part("waits", "waits:host_waits", "no update makes the host wait for the device", 0.7, 4),
    Part("step", "step:steps", "a 1B step takes at most 3 % longer than PyTorch and no longer than FSDP2", 4, 8),
    Part("host", "step:host_costs", "a unit adds at most 12 launches (30 with codecs) and 0.8 ms of host work", 1, 5),
    Part("predictions", "step:predictions", "how far the planner's seconds and bytes are from the card's", 1, 5),
    Part(
        "cards", "cluster:several_cards", "NCCL: parity, losses under codecs, bytes, times beside FSDP2", 6, 20, cards=2
    ),
    Part("nodes", "cluster:several_cards", "the same across nodes", 6, 20, cards=2, nodes=2),
)


def part_named(name: str) -> Part:
    """The part of a name; a ``KeyError`` if there is none."""
    return {part.name: part for part in PARTS}[name]
