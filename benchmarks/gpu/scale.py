"""How large the GPU check is: on a card, and in a rehearsal on CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from thinwire.spec import Plan
from thinwire_bench.codecs.bench import CODECS

__all__ = ["CARD", "REHEARSAL", "Scale", "scale_of"]

_MIB = 1 << 20


@dataclass(frozen=True)
class Scale:
    """Sizes of all parts.

    Attributes:
        device: ``cuda`` or ``cpu``.
        codecs: Names of the codecs to time.
        dtypes: Dtypes of the tensors to encode, by torch's name.
        sizes: Sizes of the tensors to encode, in bytes.
        codec_rounds: Rounds that count, for each codec, dtype and size.
        codec_seconds: Seconds after which no further codec is timed.
        presets: Presets to train.
        encoded: Presets with codecs, whose losses are compared.
        steps: Updates of each comparison of losses.
        model: Fields of ``LlamaConfig`` of the timed step.
        batch: Sequences of the timed step.
        rounds: Rounds of the timed step that count.
        turn: Steps of a system in a round.
        ranks: Ranks of a rehearsal of the parts for several cards.
        traces: Directory for a trace of each system's timed step; None keeps none.
    """

    device: str
    codecs: tuple[str, ...]
    dtypes: tuple[str, ...]
    sizes: tuple[int, ...]
    codec_rounds: int
    codec_seconds: float
    presets: tuple[str, ...]
    encoded: tuple[str, ...]
    steps: int
    model: Mapping[str, Any]
    batch: int
    rounds: int
    turn: int
    ranks: int
    traces: Path | None = None


CARD: Final = Scale(
    device="cuda",
    codecs=CODECS,
    dtypes=("bfloat16", "float32", "float16"),
    sizes=(_MIB, 16 * _MIB, 64 * _MIB, 256 * _MIB),
    codec_rounds=9,
    codec_seconds=420.0,
    presets=Plan.preset_names(islands=False),
    encoded=("zeropp", "thinwire"),
    steps=8,
    model={"vocab": 32000, "hidden": 2048, "layers": 18, "heads": 16, "kv_heads": 16, "ffn": 5504, "seq": 2048},
    batch=4,
    rounds=9,
    turn=4,
    ranks=4,
)
"""On one card: a Llama of 1.04 billion parameters and 8,192 tokens a step."""

REHEARSAL: Final = Scale(
    device="cpu",
    codecs=("int8:256", "int4:256", "bf16"),
    dtypes=("float32",),
    sizes=(_MIB // 4,),
    codec_rounds=2,
    codec_seconds=60.0,
    presets=("zero3",),
    encoded=("zeropp",),
    steps=2,
    model={"vocab": 256, "hidden": 64, "layers": 2, "heads": 4, "kv_heads": 4, "ffn": 128, "seq": 32},
    batch=2,
    rounds=2,
    turn=1,
    ranks=2,
)
"""On CPU: the same code in seconds."""


def scale_of(device: str) -> Scale:
    """The scale of a run on ``cuda``, or of a rehearsal on ``cpu``."""
    return {"cuda": CARD, "cpu": REHEARSAL}[device]
