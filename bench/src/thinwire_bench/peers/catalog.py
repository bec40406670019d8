"""Which systems and models there are, by name; imports no torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from thinwire.errors import SpecError, UsageError
from thinwire.spec import Plan
from thinwire_bench.peers.interface import SystemKind, SystemSpec

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


def _torch(label: str, name: str, kind: SystemKind = SystemKind.PEER) -> SystemSpec:
    return SystemSpec(label, f"thinwire_bench.peers.pytorch:{name}", kind=kind, joined=kind is not SystemKind.BOUND)


def _torchft(label: str, name: str) -> SystemSpec:
    builder = f"thinwire_bench.peers.torchft_islands:{name}"
    return SystemSpec(label, builder, {"every": EVERY}, SystemKind.CHANGED, cycle=EVERY, gap=EVERY)


def _deepspeed(stage: int) -> SystemSpec:
    return SystemSpec(f"deepspeed{stage}", "thinwire_bench.peers.deepspeed_zero:deepspeed", {"stage": stage})


_SYSTEMS: Final = (
    _torch("local", "local", SystemKind.BOUND),
    _torch("ddp", "ddp"),
    _torch("ddp-bf16", "ddp_bf16_hook"),
    _torch("powersgd", "ddp_powersgd", SystemKind.CHANGED),
    _torch("zero1", "zero1"),
    _torch("fsdp2", "fsdp2"),
    _torch("hsdp", "hsdp"),
    _torch("hpz", "hpz"),
    _torchft("diloco", "diloco"),
    _torchft("local-sgd", "local_sgd"),
    *map(_deepspeed, (1, 2, 3)),
)

PEERS: Final[Mapping[str, SystemSpec]] = {system.label: system for system in _SYSTEMS}
"""Systems that are not ours by label, without a workload; their builders say what they are."""

_PACKAGES: Final = {
    "thinwire_bench.peers.torchft_islands": "torchft",
    "thinwire_bench.peers.deepspeed_zero": "deepspeed",
}
"""What is to be installed for the systems of a module."""


def peer_systems(names: Sequence[str], workload: Mapping[str, Any]) -> list[SystemSpec]:
    """Peers by name.

    Raises:
        SpecError: a name is unknown.
        UsageError: a peer's package is not installed.
    """
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise SpecError("--peers", [f"there is no peer {name!r}; valid are {', '.join(PEERS)}" for name in unknown])
    systems = [replace(PEERS[name], options={**workload, **PEERS[name].options}) for name in names]
    for system in systems:
        package = _PACKAGES.get(system.builder.split(":")[0])
        if package is not None and importlib.util.find_spec(package) is None:
            raise UsageError(
                f"peer {system.label} needs the package {package}, which is not installed: run `make bench-peers`"
            )
    return systems


def plan_systems(names: Sequence[str], workload: Mapping[str, Any], *, nodes: int, ranks: int) -> list[SystemSpec]:
    """Plans by preset name or path of a ``.toml`` file, on a mesh of nodes with some ranks each, labelled ``tw:NAME``
    so that a peer may have the same name.

    Raises:
        SpecError: a plan is invalid, or its mesh is another.
    """
    stems = [Path(name).stem if name.endswith(".toml") else name for name in names]
    plans = [_named_plan(name, nodes, ranks) for name in names]
    return [plan_system(stem, plan, workload) for stem, plan in zip(stems, plans, strict=True)]


def plan_system(name: str, plan: Plan, workload: Mapping[str, Any]) -> SystemSpec:
    """One plan, labelled ``tw:NAME``."""
    options = {**workload, "plan": plan.to_toml()}
    spec = SystemSpec(f"tw:{name}", "thinwire_bench.peers.plans:plan", options, SystemKind.PLAN)
    if (islands := plan.islands) is None:
        return spec
    return replace(spec, kind=SystemKind.CHANGED, cycle=islands.every, gap=islands.every // islands.fragments)


def _named_plan(name: str, nodes: int, ranks: int) -> Plan:
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
