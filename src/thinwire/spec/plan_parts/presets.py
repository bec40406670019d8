"""Classic systems as plans. Each preset takes the mesh and scales with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal

from thinwire.errors import SpecError
from thinwire.spec.factor import Factor

_Part = Literal["one", "mesh", "group", "node", "half node", "few nodes"]


@dataclass(frozen=True)
class Preset:
    """A recipe for a plan.

    Args:
        summary: one line for documentation.
        factors: P, G and OS.
        has_secondary: whether the group is the factor of a secondary parameter shard.
        wire: the plan's ``wire`` table.
        islands: the plan's ``islands`` table without the count; then the group is the mesh of one island.
    """

    summary: str
    factors: tuple[_Part, _Part, _Part]
    has_secondary: bool = False
    wire: dict[str, Any] = field(default_factory=dict)
    islands: dict[str, Any] | None = None

    @property
    def takes_group(self) -> bool:
        """Whether a caller may choose the group; one node is the default."""
        return "group" in self.factors or self.has_secondary or self.islands is not None


def largest_divisor(number: int, at_most: int) -> int:
    """The largest divisor of ``number`` that is not above ``at_most``; 1 at least."""
    return max((d for d in range(1, min(number, at_most) + 1) if number % d == 0), default=1)


def _parts(mesh: Factor, group: Factor) -> dict[_Part, Factor]:
    """What factors can be, on a mesh."""
    return {
        "one": Factor(),
        "mesh": mesh,
        "group": group,
        "node": Factor(local=mesh.local),
        "half node": Factor(local=largest_divisor(mesh.local, mesh.local // 2)),
        "few nodes": Factor(local=mesh.local, nodes=largest_divisor(mesh.nodes, 4)),
    }


_INT4_GRADIENTS = {"gather": "int8:256", "reduce_intra": "int4:256", "reduce_inter": "int4:256"}
_INT8_GRADIENTS = {"gather": "int8:256", "reduce_intra": "int8:256", "reduce_inter": "int8:256"}
_THINWIRE = {
    "spread": "int8:256",
    "spread_difference": True,
    "reduce_intra": "int8:256",
    "reduce_inter": "int4:256",
    "error_feedback": True,
}
_INT4_CHANGES = {"codec": "int4:256", "error_feedback": True}

ENGINES = ("thinwire", "amsp")
"""Systems as which the runtime can perform a preset's factors."""


def engine_fields(engine: str, *, recompute: bool) -> dict[str, Any]:
    """The fields of a plan that perform its factors as a system does.

    AMSP's (arXiv 2311.00257, section V-C) deals whole tensors to ranks, gathers module by module, reduces a module's
    gradients under its input gradient, adds in bf16, and synchronises 512 MiB at once. Its backward gathers one module
    ahead, or with recomputation all modules of the next block.

    Args:
        engine: One of :data:`ENGINES`.
        recompute: Whether blocks are recomputed in the backward.

    Raises:
        SpecError: there is no such engine.
    """
    if engine not in ENGINES:
        raise SpecError("plan", f"engine = {engine!r} is unknown; valid are {', '.join(ENGINES)}")
    if engine == "thinwire":
        return {}
    return {
        "partition": "inter",
        "granularity": "module",
        "backward_prefetch": "block" if recompute else "module",
        "overlap": {"input_gradient": True},
        "accumulate_dtype": "bfloat16",
        "bucket_bytes": 512 << 20,
    }


_ZERO1: Final = ("one", "one", "mesh")
_ZERO3: Final = ("mesh", "mesh", "mesh")

PRESETS: dict[str, Preset] = {
    "ddp": Preset("everything on every rank", ("one", "one", "one")),
    "zero1": Preset("OS over all ranks", _ZERO1),
    "zero2": Preset("G and OS over all ranks", ("one", "mesh", "mesh")),
    "zero3": Preset("P, G and OS over all ranks", _ZERO3),
    "zero1-node": Preset("OS inside a node, replicas across nodes (AMSP, 7B)", ("one", "one", "group")),
    "amsp-13b": Preset("P and G over half a node, OS over a node (AMSP, 13B)", ("half node", "half node", "node")),
    "amsp-30b": Preset("P and G over a node, OS over up to four nodes (AMSP, 30B)", ("node", "node", "few nodes")),
    "mics": Preset("P, G and OS over a group, replicas across groups (MiCS)", ("group", "group", "group")),
    "hsdp": Preset("the same as mics, by PyTorch's name (HSDP)", ("group", "group", "group")),
    "hpz": Preset("zero3 with a secondary parameter shard inside a node (ZeRO++ hpZ)", _ZERO3, has_secondary=True),
    "zeropp": Preset(
        "hpz with INT8 gathers (qwZ) and INT4 gradients (qgZ): ZeRO++",
        _ZERO3,
        has_secondary=True,
        wire=_INT4_GRADIENTS,
    ),
    "zeropp-8bit": Preset("zeropp with INT8 gradients", _ZERO3, has_secondary=True, wire=_INT8_GRADIENTS),
    "thinwire": Preset(
        "zero1-node, gradients INT8 inside a node and INT4 across, error feedback, differences spread in INT8",
        ("one", "one", "group"),
        wire=_THINWIRE,
    ),
    "islands": Preset(
        "OS over an island; islands exchange the change of their parameters, exactly, every 32 steps (DiLoCo)",
        _ZERO1,
        islands={"every": 32},
    ),
    "islands-4bit": Preset(
        "islands with changes in INT4 and error feedback", _ZERO1, islands={"every": 32, **_INT4_CHANGES}
    ),
    "islands-streaming": Preset(
        "islands-4bit with four fragments, whose exchanges stay under way for five steps (Streaming DiLoCo)",
        _ZERO1,
        islands={"every": 32, **_INT4_CHANGES, "fragments": 4, "delay": 5, "blend": 0.5},
    ),
}


def preset_fields(name: str, *, nodes: int, local: int, group: Factor | str | None) -> dict[str, Any]:
    """The fields in which preset ``name`` differs from a plan's defaults.

    Raises:
        SpecError: if the name or the mesh is invalid, or the preset takes no group.
    """
    what = f"preset {name!r}"
    preset = PRESETS.get(name) if isinstance(name, str) else None
    if preset is None:
        raise SpecError(what, f"there is no preset {name!r}; valid are {', '.join(PRESETS)}")
    if group is not None and not preset.takes_group:
        takers = ", ".join(key for key, value in PRESETS.items() if value.takes_group)
        raise SpecError(what, f"{name} takes no group (group = {group}); those that do: {takers}")
    mesh = Factor.parse({"local": local, "nodes": nodes}, what)
    chosen = Factor(local=mesh.local) if group is None else _group(group, what)
    count = None
    if preset.islands is not None:
        mesh, count = chosen, _islands(mesh, chosen, what)
    parts = _parts(mesh, chosen)
    params, grads, optimizer = (parts[part] for part in preset.factors)
    fields: dict[str, Any] = {"mesh": mesh, "params": params, "grads": grads, "optimizer": optimizer}
    if preset.has_secondary:
        fields["secondary"] = chosen
    if preset.wire:
        fields["wire"] = dict(preset.wire)
    if preset.islands is not None:
        fields["islands"] = {"count": count, **preset.islands}
    return fields


def _islands(mesh: Factor, island: Factor, what: str) -> int:
    if not island.divides(mesh) or not island.fills_node(mesh):
        raise SpecError(
            what,
            f"group = {island} is the mesh of one island: it should divide {mesh} on both axes, and use all "
            f"{mesh.local} ranks of a node if it has several nodes",
        )
    return island.quotient(mesh).ranks


def _group(group: Factor | str, what: str) -> Factor:
    if isinstance(group, Factor):
        return group
    fields = Factor.from_text(group) if isinstance(group, str) else None
    if fields is None:
        raise SpecError(what, f"group = {group!r} should be a Factor, or text such as '4x2' (local x nodes)")
    return Factor.parse(fields, what)
