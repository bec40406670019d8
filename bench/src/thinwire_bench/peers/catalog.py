"""Which systems and models there are, by name; imports no torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from thinwire.errors import SpecError, UsageError
from thinwire.spec import Plan
from thinwire_bench.peers.interface import SystemKind, SystemSpec

REFERENCE: Final = "local"
"""The peer that does not communicate."""


MODELS: Final[Mapping[str, Mapping[str, int]]] = {
    "llama-17m": {"vocab": 4096, "hidden": 512, "layers": 4, "heads": 8, "kv_heads": 8, "ffn": 1376},
    "llama-59m": {"vocab": 4096, "hidden": 1024, "layers": 4, "heads": 16, "kv_heads": 16, "ffn": 2752},
    "llama-5m": {"vocab": 4096, "hidden": 256, "layers": 4, "heads": 4, "kv_heads": 4, "ffn": 704},
    "llama-1m": {"vocab": 4096, "hidden": 96, "layers": 2, "heads": 4, "kv_heads": 4, "ffn": 256},
}
"""Models by name, as fields of ``LlamaConfig``; the first is the one of the published numbers."""


TINY: Final[Mapping[str, int]] = {"vocab": 64, "hidden": 32, "layers": 2, "heads": 2, "kv_heads": 2, "ffn": 64}
"""A model of no weight: what a process needs to train it is what its libraries and communicators need."""

EVERY: Final = 32
"""Steps from one exchange of torchft's islands to the next, as in the preset ``islands``."""


@dataclass(frozen=True)
class Peer:
    """A system that is not ours, which ``module:function`` builds on a rank; its communication repeats after ``cycle``
    steps."""

    builder: str
    summary: str
    package: str | None = None
    options: tuple[tuple[str, Any], ...] = ()
    kind: SystemKind = SystemKind.PEER
    cycle: int = 1


def _torch(name: str, summary: str, kind: SystemKind = SystemKind.PEER) -> Peer:
    return Peer(f"thinwire_bench.peers.pytorch:{name}", summary, kind=kind)


def _torchft(name: str, summary: str) -> Peer:
    builder = f"thinwire_bench.peers.torchft_islands:{name}"
    options = (("every", EVERY),)
    return Peer(builder, summary, package="torchft", options=options, kind=SystemKind.CHANGED, cycle=EVERY)


def _deepspeed(stage: int, summary: str) -> Peer:
    builder = "thinwire_bench.peers.deepspeed_zero:deepspeed"
    return Peer(builder, summary, package="deepspeed", options=(("stage", stage),))


PEERS: Final[Mapping[str, Peer]] = {
    REFERENCE: _torch("local", "the same ranks, computing without communication: the bound", SystemKind.BOUND),
    "ddp": _torch("ddp", "DistributedDataParallel"),
    "ddp-bf16": _torch("ddp_bf16_hook", "DistributedDataParallel in fp32 with its bf16 hook"),
    "powersgd": _torch("ddp_powersgd", "DistributedDataParallel with PowerSGD, rank 4", SystemKind.CHANGED),
    "zero1": _torch("zero1", "DistributedDataParallel with ZeroRedundancyOptimizer"),
    "fsdp2": _torch("fsdp2", "fully_shard over all ranks"),
    "hsdp": _torch("hsdp", "fully_shard inside a node, replicas across nodes"),
    "hpz": _torch("hpz", "fully_shard over all ranks, resharded inside the node after the forward"),
    "diloco": _torchft("diloco", "torchft's DiLoCo, an island for each rank, an exchange every 32 steps"),
    "local-sgd": _torchft("local_sgd", "torchft's LocalSGD, an island for each rank, an exchange every 32 steps"),
    "deepspeed1": _deepspeed(1, "DeepSpeed ZeRO-1"),
    "deepspeed2": _deepspeed(2, "DeepSpeed ZeRO-2"),
    "deepspeed3": _deepspeed(3, "DeepSpeed ZeRO-3"),
}


def peer_systems(names: Sequence[str], workload: Mapping[str, Any]) -> list[SystemSpec]:
    """Peers by name.

    Raises:
        SpecError: a name is unknown.
        UsageError: a peer's package is not installed.
    """
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise SpecError("--peers", [f"there is no peer {name!r}; valid are {', '.join(PEERS)}" for name in unknown])
    check_packages(names)
    return [_peer(name, workload) for name in names]


def check_packages(names: Iterable[str]) -> None:
    """Check that the packages of peers are installed; other names are passed over.

    Raises:
        UsageError: A package is not installed.
    """
    for name in (name for name in names if name in PEERS):
        package = PEERS[name].package
        if package is not None and importlib.util.find_spec(package) is None:
            raise UsageError(f"peer {name} needs the package {package}, which is not installed: run `make bench-peers`")


def plan_systems(names: Sequence[str], workload: Mapping[str, Any], *, nodes: int, ranks: int) -> list[SystemSpec]:
    """Plans by preset name or path, labelled ``tw:NAME`` so that a peer may have the same name.

    Args:
        names: Presets, or paths of ``.toml`` files.
        workload: Options of every builder.
        nodes: Nodes of the mesh.
        ranks: Ranks of each node.

    Raises:
        SpecError: a plan is invalid, or its mesh is another.
    """
    return [
        plan_system(Path(name).stem if name.endswith(".toml") else name, named_plan(name, nodes, ranks), workload)
        for name in names
    ]


def plan_system(name: str, plan: Plan, workload: Mapping[str, Any]) -> SystemSpec:
    """One plan, labelled ``tw:NAME``."""
    spec = SystemSpec(
        f"tw:{name}", "thinwire_bench.peers.plans:plan", {**workload, "plan": plan.to_toml()}, SystemKind.PLAN
    )
    islands = plan.islands
    if islands is None:
        return spec
    gap = islands.every // islands.fragments
    return replace(spec, kind=SystemKind.CHANGED, cycle=islands.every, gap=gap)


def named_plan(name: str, nodes: int, ranks: int) -> Plan:
    """A preset on a mesh, or the plan of a ``.toml`` file.

    Raises:
        SpecError: the plan is invalid, or its mesh is another.
    """
    plan = Plan.load(name) if name.endswith(".toml") else Plan.preset(name, nodes=nodes, local=ranks)
    whole = nodes * ranks if plan.islands is not None else plan.world
    if plan.ranks != whole or (plan.islands is None and (plan.mesh.nodes, plan.mesh.local) != (nodes, ranks)):
        islands = "" if plan.islands is None else f" with {plan.islands.count} islands"
        raise SpecError(
            name, f"mesh = {plan.mesh} (local x nodes){islands} is not that of --nodes {nodes} --ranks {ranks}"
        )
    return plan


def _peer(name: str, workload: Mapping[str, Any]) -> SystemSpec:
    peer = PEERS[name]
    options = {**workload, **dict(peer.options)}
    joined = peer.kind is not SystemKind.BOUND
    return SystemSpec(name, peer.builder, options, peer.kind, joined=joined, cycle=peer.cycle, gap=peer.cycle)
