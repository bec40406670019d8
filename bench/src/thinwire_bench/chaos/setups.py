"""The runs that a campaign disturbs: every preset, and codecs, schedules and sources of data in turn."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from thinwire.spec import Wire
from thinwire.spec.codec import FAMILIES
from thinwire.spec.io import write_toml
from thinwire.spec.plan_parts.presets import PRESETS

STEPS: Final = 72
"""Updates of a run."""

SAVE_EVERY: Final = 4
"""Updates from one checkpoint to the next."""

_KEPT: Final = 3

_WORDS: Final = 300
_LINES: Final = 3000


@dataclass(frozen=True)
class SmallRun:
    """A small run that is trained undisturbed once, and disturbed once.

    Attributes:
        name: Unique.
        group: What it is there for: ``preset``, ``codec`` or ``schedule``.
        plan: The recipe's ``plan`` table.
        source: Where its tokens come from; a key of :data:`SOURCES`.
        nodes: Logical nodes.
        local: Ranks of a node.
        kind: Kind of the model.
        layers: Blocks of the model.
        experts: Experts of a block; ``None`` for one feed-forward.
    """

    name: str
    group: str
    plan: Mapping[str, Any]
    source: str
    nodes: int = 2
    local: int = 2
    kind: str = "llama"
    layers: int = 2
    experts: int | None = None

    def recipe(self, corpus: Path, *, timeout: float, steps: int = STEPS) -> str:
        """The recipe as TOML, on text of :func:`make_corpus`; a collective gives up after ``timeout`` seconds."""
        model = {"kind": self.kind, "layers": self.layers, "hidden": 32, "ffn": 96, "heads": 2}
        if self.experts is not None:
            model |= {"experts": self.experts, "active_experts": 2}
        train = {"steps": steps, "seq": 16, "global_batch": 8, "validate_every": 30, "validation_samples": 12}
        recipe = {
            "plan": {**self.plan, "micro_batch": 2},
            "model": model,
            "data": SOURCES[self.source].keys(corpus),
            "train": {**train, "tensorboard": False},
            "optimizer": {"lr": 1e-2, "warmup": 10},
            "checkpoint": {"every": SAVE_EVERY, "keep": _KEPT},
            "cluster": {"timeout": f"{timeout:g} s", "max_restarts": 99},
        }
        return write_toml(recipe)


@dataclass(frozen=True)
class DataKind:
    """A kind of training data: the recipe's ``[data]`` for a corpus, and what writes the file below it from lines."""

    keys: Callable[[Path], dict[str, Any]]
    make: Callable[[Path, list[str]], None] = field(default=lambda _directory, _lines: None)


def _text(directory: Path, lines: list[str]) -> None:
    (directory / "text.txt").write_text("\n".join(lines), encoding="utf-8")


def _jsonl(directory: Path, lines: list[str]) -> None:
    rows = (json.dumps({"text": line}) for line in lines)
    (directory / "text.jsonl").write_text("\n".join(rows), encoding="utf-8")


def _parquet(directory: Path, lines: list[str]) -> None:
    from pyarrow import parquet, table

    parquet.write_table(table({"text": lines}), directory / "text.parquet")


def _arrow(directory: Path, lines: list[str]) -> None:
    from pyarrow import ipc, table

    rows = table({"text": lines})
    with (directory / "text.arrow").open("wb") as file, ipc.new_stream(file, rows.schema) as writer:
        writer.write_table(rows)


def _tokens(directory: Path, lines: list[str]) -> None:
    content = "\n".join(lines).encode()
    (directory / "tokens.bin").write_bytes(b"".join(byte.to_bytes(2, "little") for byte in content))


def _documents(source: str, file: str) -> Callable[[Path], dict[str, Any]]:
    return lambda corpus: {"source": source, "paths": [str(corpus / file)], "vocab": 300}


SOURCES: Final[Mapping[str, DataKind]] = {
    "text": DataKind(_documents("text", "text.txt"), _text),
    "jsonl": DataKind(_documents("jsonl", "text.jsonl"), _jsonl),
    "parquet": DataKind(_documents("parquet", "text.parquet"), _parquet),
    "datasets": DataKind(_documents("datasets", "text.arrow"), _arrow),
    "tokens": DataKind(
        lambda corpus: {
            "source": "tokens", "paths": [str(corpus / "tokens.bin")], "vocab": 256, "token_type": "uint16",
        },
        _tokens,
    ),
    "stdlib": DataKind(lambda _corpus: {"source": "stdlib", "vocab": 300, "max_bytes": "1MiB"}),
}  # fmt: skip
"""Every kind of training data of a recipe."""


def make_corpus(directory: Path) -> None:
    """Write made-up text, always the same, in every form, unless it is there."""
    written = directory / "written"
    if written.exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    chance = random.Random(0)
    known = ["".join(chance.choices("abcdefghij", k=chance.randint(2, 6))) for _ in range(_WORDS)]
    lines = [" ".join(chance.choices(known, k=12)) for _ in range(_LINES)]
    for source in SOURCES.values():
        source.make(directory, lines)
    written.touch()


_ISLANDS: Final = {"every": 8}
"""Islands of a short run exchange more often than the presets say, so that exchanges are hit."""

_CODECS: Final[Mapping[str, Mapping[str, Any]]] = {
    "bf16": {"gather": "bf16", "dp": "bf16"},
    "fp16": {"dp": "fp16"},
    "int4-hadamard": {"dp": "int4:64,hadamard", "error_feedback": True},
    "int8-stochastic": {"dp": "int8:64,stochastic"},
    "int2": {"reduce_inter": "int2:32", "error_feedback": True},
    "zfp": {"policy": "zhybrid"},
    "mpc": {"policy": "mzhybrid"},
    "hybrid": {"policy": "hybrid"},
    "difference": {"spread": "int4:256", "spread_difference": True, "dp": "int8:64"},
    "exp3": {"gather": "exp3"},
}
"""The wire of a setup by its name; :func:`_wires` adds the other families of codecs."""

_SCHEDULES: Final[Mapping[str, Mapping[str, Any]]] = {
    "pipeline-1f1b": {"pp": 2},
    "pipeline-interleaved": {"pp": 2, "pipeline_schedule": "interleaved"},
    "tensor": {"tp": 2},
    "context": {"cp": 2},
    "experts": {"ep": 2},
    "codec-for-half": {"wire": {"dp": "int4:64", "error_feedback": True, "compress_until": 0.5}},
    "chunks": {"bucket_chunks": 2, "bucket_bytes": 16384},
    "recomputed": {"recompute": True, "overlap": {"input_gradient": True}},
    "no-overlap": {"overlap": {"gather": False, "reduce": False, "sync": False, "spread": False}},
    "float16": {"compute_dtype": "float16"},
    "islands-by-stretch": {"preset": "islands", "islands": {"every": 4, "schedule": [[0.5, 8]]}},
    "islands-top-k": {"preset": "islands", "islands": {"every": 4, "codec": "topk:1/8,int2", "error_feedback": True}},
}
"""Keys of a plan by a setup's name."""


def _wires() -> dict[str, Mapping[str, Any]]:
    """The wire of each setup, with gradients in the first example of every family that none of them names."""
    named = {codec.family for wire in _CODECS.values() for codec in Wire.parse(wire).codecs().values()}
    return {**_CODECS, **{name: {"dp": each.examples[0]} for name, each in FAMILIES.items() if name not in named}}


def setups() -> list[SmallRun]:
    """All runs: presets on two by two ranks, codecs and schedules on two."""
    sources = list(SOURCES)
    made: list[SmallRun] = []
    for name, preset in PRESETS.items():
        plan: dict[str, Any] = {"preset": name, "compute_dtype": "float32"}
        if preset.islands is not None:
            plan["islands"] = _ISLANDS
        made.append(SmallRun(name, "preset", plan, sources[len(made) % len(sources)]))
    for name, wire in _wires().items():
        # Gathered parameters and reduced gradients both cross the wire under zero2 with a partial first factor.
        dtype = "bfloat16" if name == "exp3" else "float32"  # which encodes no other
        plan = {"preset": "zero3" if "gather" in wire else "zero1", "compute_dtype": dtype, "wire": dict(wire)}
        made.append(SmallRun(name, "codec", plan, sources[len(made) % len(sources)], nodes=2, local=1))
    for name, keys in _SCHEDULES.items():
        plan = {"preset": "zero1", "compute_dtype": "float32", **keys}
        apart = any(axis in keys for axis in ("pp", "tp", "cp", "ep"))
        made.append(
            SmallRun(
                name,
                "schedule",
                plan,
                sources[len(made) % len(sources)],
                nodes=1 if apart else 2,
                local=2 if apart else 1,
                kind="gpt" if name == "chunks" else "llama",
                layers=4 if apart else 2,
                experts=4 if "ep" in keys else None,
            )
        )
    return made
