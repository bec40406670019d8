"""How large the GPU check is: on a card, and in a rehearsal on CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

__all__ = ["CARD", "REHEARSAL", "Scale", "card_name", "scale_of"]

_MIB = 1 << 20


@dataclass(frozen=True)
class Scale:
    """Sizes of all parts.

    Attributes:
        device: ``cuda`` or ``cpu``.
        dtypes: Dtypes of the tensors to encode, by torch's name, most valuable first.
        sizes: Sizes of the tensors to encode, in bytes; the goals hold at the first one.
        codec_rounds: Rounds that count, for each codec, dtype and size.
        is_whole: Whether all codecs and presets have their turn, or one of each kind.
        steps: Updates of each comparison of losses.
        model: Fields of ``LlamaConfig`` of the timed step; its layers are what fits the card at most.
        batch: Sequences of the timed step.
        rounds: Rounds of the timed step that count.
        turn: Steps of a system in a round.
        ranks: Ranks of a rehearsal of the parts for several cards.
        memory: Bytes of the card that are free when the check begins; a rehearsal pretends to have a card of 80 GB.
        traces: Directory for a trace of each system's timed step.
    """

    device: str
    dtypes: tuple[str, ...]
    sizes: tuple[int, ...]
    codec_rounds: int
    is_whole: bool
    steps: int
    model: Mapping[str, Any]
    batch: int
    rounds: int
    turn: int
    ranks: int
    memory: int = 79 << 30
    traces: Path = Path("traces")


CARD: Final = Scale(
    device="cuda",
    dtypes=("bfloat16", "float32", "float16"),
    sizes=(256 * _MIB, 64 * _MIB, 16 * _MIB, _MIB),
    codec_rounds=9,
    is_whole=True,
    steps=8,
    model={"vocab": 32000, "hidden": 2048, "layers": 18, "heads": 16, "kv_heads": 16, "ffn": 5504, "seq": 2048},
    batch=4,
    rounds=7,
    turn=3,
    ranks=4,
)
"""On one card: a Llama of at most 1.04 billion parameters and 8,192 tokens a step."""

REHEARSAL: Final = Scale(
    device="cpu",
    dtypes=("float32",),
    sizes=(_MIB // 4, _MIB // 16),
    codec_rounds=2,
    is_whole=False,
    steps=2,
    model={"vocab": 256, "hidden": 64, "layers": 2, "heads": 4, "kv_heads": 4, "ffn": 128, "seq": 32},
    batch=2,
    rounds=2,
    turn=1,
    ranks=2,
)
"""On CPU: the same code in seconds."""


def scale_of(device: str, *, memory: int | None = None, traces: Path = Path("traces")) -> Scale:
    """The scale of a run on ``cuda``, or of a rehearsal on ``cpu``.

    Args:
        device: ``cuda`` or ``cpu``.
        memory: Bytes that the card has at most; None for what is free on it.
        traces: Directory for traces.
    """
    scale = replace({"cuda": CARD, "cpu": REHEARSAL}[device], traces=traces)
    if device == "cuda":
        scale = replace(scale, memory=torch.cuda.mem_get_info()[0])
    return scale if memory is None else replace(scale, memory=min(memory, scale.memory))


def card_name(device: str) -> str:
    """The card's name, as torch reports it; ``cpu`` for a rehearsal."""
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"
