"""Random valid plans, in which every key that changes no result may have any value: exact in float32, or lossy."""

from __future__ import annotations

import random
from typing import Any

import thinwire as tw
from thinwire.errors import SpecError

__all__ = ["drawn_plan"]

TUNED = ("gather_bytes", "reduce_bytes", "spread_bytes", "persist_bytes", "reuse_bytes")
WAYS = ("gather", "reduce", "sync", "spread", "stages")
HOPS = ("gather", "reduce_intra", "reduce_inter", "spread")
LOSSY = ("int8:32", "int4:16", "int8:64,stochastic", "int4:32,hadamard", "zfp:16")
"""Codecs of lossy plans. Tensors are tiny, and so are blocks."""


def drawn_plan(seed: int, world: int, *, lossy: bool = False) -> tw.Plan:
    """The plan of a seed, for 2 or 4 ranks; sizes are those of tiny models.

    Args:
        seed: of all choices.
        world: number of ranks.
        lossy: compute in bf16, or encode messages lossily, or both.
    """
    rng = random.Random(seed)
    local = rng.choice([ranks for ranks in (1, 2, 4) if world % ranks == 0])
    nodes = world // local

    def factor() -> dict[str, int]:
        return {name: rng.choice([n for n in (1, 2, 4) if of % n == 0]) for name, of in mesh.items()}

    mesh = {"local": local, "nodes": nodes}
    params, optimizer = factor(), factor()
    fields: dict[str, Any] = {
        "mesh": mesh,
        "params": params,
        "grads": rng.choice((params, optimizer)),
        "optimizer": optimizer,
        "compute_dtype": "float32",
        "partition": rng.choice(("intra", "intra", "inter")),
        "granularity": rng.choice(("block", "block", "module")),
        "recompute": rng.random() < 0.1,
        "prefetch": rng.choice((0, 1, 1, 2, 5)),
        "backward_prefetch": rng.choice(("block", "module")),
        "bucket_bytes": rng.choice((1, 100, 1000, 4 << 20)),
        "bucket_chunks": rng.choice((1, 1, 2, 3)),
        "kept_unit": rng.choice(("none", "last")),
        "overlap": {way: rng.random() < 0.7 for way in WAYS} | {"input_gradient": rng.random() < 0.2},
        **{key: rng.choice((0, 0, 64, 500, 2000, 1_000_000)) for key in TUNED},
    }
    if rng.random() < 0.3:
        fields |= {"secondary": factor(), "secondary_reuse": rng.random() < 0.5}
    if rng.random() < 0.3:
        fields["prefetch_bytes"] = rng.choice((1, 300, 3000))
    if rng.random() < 0.3:
        fields["live_bytes"] = rng.choice((1500, 1_000_000))
    if rng.random() < 0.4:
        fields["wire"] = {hop: "mpc" for hop in HOPS if rng.random() < 0.5}
    if rng.random() < 0.4:
        fields["residence"] = {
            "optimizer": rng.choice(("device", "host-stream", "host-update")),
            "gradients": rng.choice(("device", "host")),
            "params": rng.choice(("device", "host")),
        }
    if lossy:
        fields |= _loss(rng)
    try:
        return tw.Plan.parse(fields)
    except SpecError:  # factors that do not go together: the next ones
        return drawn_plan(rng.randrange(1 << 30), world, lossy=lossy)


def _loss(rng: random.Random) -> dict[str, Any]:
    narrow = rng.random() < 0.7
    wire: dict[str, Any] = {hop: rng.choice(LOSSY) for hop in HOPS if rng.random() < 0.6}
    if rng.random() < 0.5:
        wire["error_feedback"] = True
    if rng.random() < 0.5:
        wire["spread_difference"] = True
    return {"compute_dtype": "bfloat16" if narrow else "float32", "wire": wire}
