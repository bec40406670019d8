"""Compressing the axes of a device mesh, the ones it has and the ones it is made with.

This is the one place that touches torch's tables of process groups: a :class:`CompressingGroup` takes the name of the
group it replaces, so that every mesh, sub-mesh and DTensor that looks the group up by name finds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend as NativeBackend
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from thinwire.errors import UsageError
from thinwire.intercept.gate import MIN_NUMEL, AxisCodecs
from thinwire.intercept.group import CompressingGroup, all_groups
from thinwire.intercept.scope import on_entry
from thinwire.intercept.traffic import AxisTraffic
from thinwire.spec import CodecSpec
from thinwire.spec.policy import HybridPolicy

__all__ = [
    "BACKEND",
    "ROLES",
    "BackendOptions",
    "axis_traffic",
    "axis_backend",
    "compress_axis",
    "compress_group",
    "compress_mesh",
]

BACKEND = "thinwire"
"""Name of the backend, for ``backend_override`` and ``init_process_group``."""

ROLES = {
    "dp": "dp",
    "ddp": "dp",
    "dp_replicate": "dp",
    "dp_shard": "dp",
    "fsdp": "dp",
    "replicate": "dp",
    "shard": "dp",
    "tp": "tp",
    "pp": "pp",
}
"""What the axes of a mesh are for, by their usual names."""


class BackendOptions(NativeBackend.Options):
    """Options of the backend; made by :func:`axis_backend`.

    Attributes:
        codecs: of the axis.
        min_numel: tensors with fewer values travel as they are.
        always: encode outside training steps too.
    """

    def __init__(self, codecs: AxisCodecs, min_numel: int, *, always: bool) -> None:
        super().__init__(BACKEND, c10d._get_default_timeout(dist.Backend("gloo")))
        self.codecs, self.min_numel, self.always = codecs, min_numel, always


def axis_backend(
    codec: str | CodecSpec = "none",
    *,
    gather: str | CodecSpec | None = None,
    send: str | CodecSpec | None = None,
    min_numel: int = MIN_NUMEL,
    always: bool = False,
) -> tuple[str, BackendOptions]:
    """The backend of an axis, for ``init_device_mesh(..., backend_override={"tp": thinwire.axis_backend("zfp:24")})``.

    The name alone, ``backend_override={"tp": "thinwire"}``, makes an axis without a codec; :func:`compress_axis` gives
    it one. It is known to torch once this module is loaded, for example by this function.

    Args:
        codec: see :func:`compress_axis`, as for the rest.
        gather: of all-gathers, if another.
        send: of point-to-point messages, if another.
        min_numel: tensors with fewer values travel as they are.
        always: encode outside training steps too.
    """
    return BACKEND, BackendOptions(AxisCodecs.of(codec, gather=gather, send=send), min_numel, always=always)


def compress_axis(
    mesh: DeviceMesh,
    axis: str,
    codec: str | CodecSpec,
    *,
    gather: str | CodecSpec | None = None,
    send: str | CodecSpec | None = None,
    min_numel: int = MIN_NUMEL,
    always: bool = False,
) -> CompressingGroup:
    """Encode what is sent along an axis of a mesh during training steps, whoever sends it.

    Called on all ranks, before models are wrapped: FSDP and DDP keep the group they find. Called again, it changes the
    codecs. Steps are marked with :func:`~thinwire.mark_steps` or :func:`~thinwire.step_scope`; backward passes need no
    mark.

    Args:
        mesh: of CPU devices.
        axis: name of one of its dimensions.
        codec: of reductions, and of everything else unless said; ``"zfp:24"``, ``"int8:256"``, see
            :data:`thinwire.spec.codec.NOTATION`.
        gather: of all-gathers, if another.
        send: of point-to-point messages, if another.
        min_numel: tensors with fewer values travel as they are.
        always: encode outside training steps too, for axes on which nothing else is sent.

    Returns:
        The axis's group; :meth:`CompressingGroup.traffic` says what it did.

    Raises:
        UsageError: if the mesh has no such axis, or is not of CPU devices.
        SpecError: if a codec is misspelt.
    """
    if axis not in (mesh.mesh_dim_names or ()):
        raise UsageError(f"the mesh has no axis {axis!r}, valid are {', '.join(mesh.mesh_dim_names or ()) or 'none'}")
    if mesh.device_type != "cpu":
        raise UsageError(
            f"the mesh is of {mesh.device_type} devices: only tensors on the CPU can be encoded on their way so far"
        )
    codecs = AxisCodecs.of(codec, gather=gather, send=send)
    group = mesh.get_group(axis)
    if isinstance(group, CompressingGroup):
        group.configure(codecs, min_numel=min_numel, always=always)
        group.axis = axis
        return group
    is_default = group is dist.group.WORLD
    compressed = _wrapped(group, axis, codecs, min_numel, always=always, owns_inner=not is_default)
    _take_over(group, compressed, keep=is_default)
    root = mesh._get_root_mesh()
    for registry in (root._pg_registry, mesh._pg_registry):
        if group.group_name in registry:
            registry[group.group_name] = compressed
    return compressed


def compress_mesh(
    mesh: DeviceMesh, policy: str | HybridPolicy, roles: Mapping[str, str] | None = None
) -> dict[str, CompressingGroup]:
    """:func:`compress_axis` for every axis, with the codecs of a policy.

    A data axis takes the policy's ``dp`` for reductions of gradients and its ``gather`` for parameters.

    Args:
        mesh: of CPU devices.
        policy: for example ``"zhybrid:24-8"`` or ``"hybrid"``; see :data:`thinwire.spec.policy.POLICIES`.
        roles: ``"dp"``, ``"tp"`` or ``"pp"`` by axis; by default as :data:`ROLES` reads the axes' names.

    Returns:
        The groups by axis.

    Raises:
        UsageError: if an axis has no known role.
        SpecError: if no policy has that name.
    """
    chosen = HybridPolicy.parse(policy) if isinstance(policy, str) else policy
    roles = ROLES if roles is None else roles
    groups = {}
    for axis in mesh.mesh_dim_names or ():
        role = roles.get(axis)
        if role not in ("dp", "tp", "pp"):
            raise UsageError(
                f"what is the axis {axis!r} for? say it with roles={{{axis!r}: ...}}, valid are 'dp', 'tp' and 'pp'"
            )
        if role == "dp":
            groups[axis] = compress_axis(mesh, axis, chosen.dp, gather=chosen.gather)
        else:
            groups[axis] = compress_axis(mesh, axis, chosen.codec(role))
    return groups


def compress_group(
    group: dist.ProcessGroup,
    codec: str | CodecSpec,
    *,
    axis: str = "",
    gather: str | CodecSpec | None = None,
    send: str | CodecSpec | None = None,
    min_numel: int = MIN_NUMEL,
    always: bool = False,
) -> CompressingGroup:
    """A group that encodes, beside one that goes on as it is; for whoever takes a process group as an argument.

    Called on all ranks of the group, in the same order for each.

    Args:
        group: carries what is not encoded.
        codec: see :func:`compress_axis`, as for the rest.
        axis: name for reports; by default the group's description.
        gather: of all-gathers, if another.
        send: of point-to-point messages, if another.
        min_numel: tensors with fewer values travel as they are.
        always: encode outside training steps too.
    """
    codecs = AxisCodecs.of(codec, gather=gather, send=send)
    compressed = _wrapped(group, axis or str(group.group_desc), codecs, min_numel, always=always, owns_inner=False)
    _register(compressed, group, f"{group.group_name}/thinwire-{compressed.number}")
    return compressed


def axis_traffic(mesh: DeviceMesh | None = None, *, reset: bool = False) -> dict[str, AxisTraffic]:
    """What this rank has sent on every compressed axis: bytes by operation and codec, and why tensors were not encoded.

    Args:
        mesh: its axes; by default those of all compressed groups that are alive.
        reset: count from zero again.
    """
    groups: list[Any] = all_groups() if mesh is None else mesh.get_all_groups()
    told: dict[str, AxisTraffic] = {}
    for group in groups:
        if isinstance(group, CompressingGroup):
            name = group.axis if group.axis not in told else f"{group.axis}, group {group.group_name}"
            told[name] = group.traffic(reset=reset)
    return told


def _wrapped(
    group: dist.ProcessGroup, axis: str, codecs: AxisCodecs, min_numel: int, *, always: bool, owns_inner: bool
) -> CompressingGroup:
    ranks = dist.get_process_group_ranks(group)
    compressed = CompressingGroup(
        group, axis=axis, ranks=ranks, codecs=codecs, min_numel=min_numel, always=always, owns_inner=owns_inner
    )
    compressed._set_group_desc(group.group_desc)
    return compressed


def _take_over(group: dist.ProcessGroup, compressed: CompressingGroup, *, keep: bool) -> None:
    """Make ``compressed`` what torch finds under the name of ``group``.

    Args:
        group: the group.
        compressed: takes its place.
        keep: leave the group itself in torch's tables: it is the default group, which others use for other things.
    """
    name = group.group_name
    c10d._unregister_process_group(name)
    _register(compressed, group, name)
    if keep:
        return
    world = c10d._world
    for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag):
        table.pop(group, None)
    for groups in world.tags_to_pg.values():
        groups[:] = [other for other in groups if other is not group]


def _register(compressed: CompressingGroup, group: dist.ProcessGroup, name: str) -> None:
    world, known_as = c10d._world, c10d.GroupName(name)
    compressed._set_group_name(known_as)
    world.pg_map[compressed] = world.pg_map[group]
    world.pg_names[compressed] = known_as
    world.pg_backend_config[compressed] = world.pg_backend_config[group]
    world.pg_group_ranks[compressed] = dict(world.pg_group_ranks[group])
    world.pg_to_tag[compressed] = f"ptd:{name}"
    for tag in ("", f"ptd:{name}"):
        world.tags_to_pg.setdefault(tag, []).append(compressed)
    c10d._register_process_group(known_as, compressed)


def _create(made: Any, options: Any) -> CompressingGroup:
    """A group of the backend, for torch: gloo below."""
    if options is not None and not isinstance(options, BackendOptions):
        raise UsageError(
            f"the backend {BACKEND} takes the options that thinwire.axis_backend(codec) makes, "
            f"not {type(options).__name__}"
        )
    inner = dist.ProcessGroup(made.store, made.group_rank, made.group_size)
    gloo = dist.ProcessGroupGloo(made.store, made.group_rank, made.group_size, timeout=made.timeout)
    gloo._set_sequence_number_for_group()
    inner._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    inner._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return CompressingGroup(
        inner,
        axis="",
        ranks=list(made.global_ranks_in_group) or list(range(made.group_size)),
        codecs=AxisCodecs() if options is None else options.codecs,
        min_numel=MIN_NUMEL if options is None else options.min_numel,
        always=options is not None and options.always,
    )


def _check_coalescing() -> None:
    """An exception inside a coalescing block leaves it open, and then torch silently drops collectives of the group."""
    for group in all_groups():
        left = c10d._world.pg_coalesce_state.pop(group, None)
        if left is not None:
            raise UsageError(
                f"an exception has left a coalescing block of axis {group.axis} open, with {len(left)} collectives "
                "that were never performed; it is closed now: repeat the step from the last state that is sound"
            )


def _register_backend() -> None:
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])
    on_entry(_check_coalescing)


_register_backend()
