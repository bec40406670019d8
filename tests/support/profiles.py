"""A profile of a small model, written by hand, and what it consists of."""

from __future__ import annotations

from typing import Any

from thinwire.cost import parts
from thinwire.spec import ModelSpec
from thinwire.spec.profile import CodecRow, CollectiveRow, ComputeRow, OverlapRow, Profile

MODEL = ModelSpec(layers=2, hidden=64, heads=4, ffn=256, vocab=512, seq=32)

MIB = 1 << 20


def collective(kind: Any, local: int, nodes: int, sent: int, seconds: float) -> CollectiveRow:
    return CollectiveRow(
        kind=kind,
        local=local,
        nodes=nodes,
        sent=sent,
        seconds=seconds,
        low=seconds * 0.9,
        high=seconds * 1.2,
        samples=5,
    )


def profile(**changes: Any) -> Profile:
    """Two nodes of two ranks: 1 GB/s inside, 0.1 GB/s across, a millisecond of latency."""
    rows = [
        collective(kind, local, nodes, sent, 1e-3 + sent / rate)
        for kind in ("all_gather", "reduce_scatter", "all_to_all", "broadcast")
        for local, nodes, rate in ((2, 1, 1e9), (1, 2, 1e8))
        for sent in (MIB // 16, MIB, 16 * MIB)
    ]
    codecs = [
        CodecRow(codec=name, dtype=dtype, work=work, numel=n, seconds=n * 1e-9, low=n * 0.9e-9, high=n * 1.1e-9)
        for name in ("int8:256", "int4:256")
        for dtype in ("bfloat16", "float32")
        for work in ("encode", "decode", "feedback")
        for n in (1 << 16, 1 << 20)
    ]
    shape = {"hidden": 64, "ffn": 256, "heads": 4, "kv_heads": 4, "vocab": 512, "seq": 32, "micro_batch": 1}
    by_kind = {part.kind: part for part in parts(MODEL, "block")}
    compute = [
        ComputeRow(
            part=kind, dtype="bfloat16", forward=2e-3, backward=5e-3, flops=by_kind[kind].forward_flops(32, 32), **shape
        )
        for kind in ("block", "head", "embedding")
    ]
    meetings = [
        OverlapRow(scope="inside", sent=MIB, compute=1.3, transfer=1.5, delay=4e-3, hidden=64),
        OverlapRow(scope="inside", sent=MIB, compute=1.2, transfer=1.0, delay=6e-3, hidden=4096),
        OverlapRow(scope="across", sent=MIB, compute=1.1, transfer=1.2, delay=5e-3, hidden=64),
    ]
    made = Profile(
        device="cpu", backend="gloo", torch="2.13", nodes=2, gpus_per_node=2, memory=4 << 30, base_memory=200 * MIB,
        update_seconds=1e-9, step_seconds=1e-4, collectives=tuple(rows), codecs=tuple(codecs), compute=tuple(compute),
        overlap=tuple(meetings),
    )  # fmt: skip
    return made.with_(**changes)
