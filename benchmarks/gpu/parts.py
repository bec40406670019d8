"""The parts of the GPU check, most valuable first."""

from __future__ import annotations

import importlib
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from benchmarks.gpu.case import Case
from benchmarks.gpu.scale import Scale

__all__ = ["PARTS", "Part", "part_named"]


@dataclass(frozen=True)
class Part:
    """One part: cases that share a process.

    Attributes:
        name: Name of the part and of its file.
        function: ``module:function`` of the package, a :data:`~benchmarks.gpu.case.Cases`; imported in the part's
            process, so that a missing package fails this part alone.
        proves: What a passed part proves, as a clause for a table.
        cards: Cards that it needs.
        nodes: Nodes that it needs; a part for several nodes is started by torchrun alone.
        beside: Whether it may run beside others: it times nothing, and what it trains is small.
    """

    name: str
    function: str
    proves: str
    cards: int = 1
    nodes: int = 1
    beside: bool = False

    def cases(self, scale: Scale, stack: ExitStack) -> list[Case]:
        """The part's cases."""
        module, _, attribute = self.function.partition(":")
        made: list[Case] = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), attribute)(scale, stack)
        return made


PARTS: Final = (
    Part("environment", "environment:cases", "which card, driver and software the numbers are from; its ceilings"),
    Part("contact", "contact:cases", "wheels load, codecs agree on 1 MiB, presets make a step, NCCL answers"),
    Part("step", "step:cases", "a step takes at most 3 % longer than PyTorch and no longer than FSDP2"),
    Part("codecs", "codecs:cases", "INT8 reaches 80 % and INT4 60 % of a device copy; messages equal the reference"),
    Part("predictions", "large:cases", "the largest Llama: seconds within 10 %, memory within 5 % of the planner's"),
    Part("offload", "offload:cases", "states on the host: the same bits, a step at most 5 % longer"),
    Part(
        "tests", "gpu_tests:cases", "Triton codecs give the bytes of the C++ ones; stream lanes keep order", beside=True
    ),
    Part(
        "presets",
        "training:preset_cases",
        "every preset trains as on CPU, on NCCL and on 4 ranks, in fp32",
        beside=True,
    ),
    Part(
        "encoded", "training:encoded_cases", "training with codecs, and in fp16, gives the losses of CPUs", beside=True
    ),
    Part("streams", "streams:cases", "losses do not depend on delays; sanitizers report nothing", beside=True),
    Part("waits", "waits:cases", "no update makes the host wait for the device", beside=True),
    Part(
        "models",
        "models:cases",
        "compiled blocks, recomputation and a Hugging Face model of 1B train as without",
        beside=True,
    ),
    Part("host", "host:cases", "a unit adds at most 12 launches (30 with codecs) and 0.8 ms of host work"),
    Part("slow-link", "slow_link:cases", "four ranks on the card, two hosts joined by a slow link, steps beside DDP"),
    Part("cards", "cluster:cases", "NCCL: parity, losses under codecs, bytes, times beside FSDP2", cards=2),
    Part("nodes", "cluster:cases", "the same across nodes", cards=2, nodes=2),
)


def part_named(name: str) -> Part:
    """The part of a name; a ``KeyError`` if there is none."""
    return {part.name: part for part in PARTS}[name]
