"""Compresses the axes of a device mesh, existing ones and new ones.

Only this module changes torch's tables of process groups. A :class:`CompressingGroup` takes the name of the
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
from thinwire.intercept.gate import DEVICES, MIN_NUMEL, AxisCodecs
from thinwire.intercept.group import CompressingGroup, all_groups
from thinwire.intercept.scope import on_entry
from thinwire.intercept.traffic import AxisTraffic
from thinwire.spec import CodecSpec
from thinwire.spec.plan_parts.policy import HybridPolicy

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
"""Role of a mesh axis by its usual names."""


class BackendOptions(NativeBackend.Options):
    """Options of the backend; made by :func:`axis_backend`."""

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

    The name alone, ``backend_override={"tp": "thinwire"}``, makes an axis without a codec, and :func:`compress_axis`
    sets one later. torch knows the name once this module is imported, for example by this function.

    Args:
        codec: Codec of all operations except those given below; see :func:`compress_axis`.
        gather: Codec of all-gathers.
        send: Codec of point-to-point messages.
        min_numel: Tensors with fewer values are sent unencoded.
        always: Encode outside training steps too.
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
    """Encode everything that is sent along an axis of a mesh during training steps, by any library.

    Call this on all ranks before you wrap models, because FSDP and DDP keep the group that they find. A second call
    changes the codecs. Mark steps with :func:`~thinwire.mark_steps` or :func:`~thinwire.step_scope`; backward passes
    need no mark. torch takes meshes of the same ranks and axis names for one: do not give them different codecs in one
    process.

    Args:
        mesh: Mesh of CPU or CUDA devices.
        axis: Name of one of its dimensions.
        codec: Codec of all operations except those given below, for example ``"zfp:24"`` or ``"int8:256"``; see
            :data:`thinwire.spec.codec.NOTATION`.
        gather: Codec of all-gathers.
        send: Codec of point-to-point messages.
        min_numel: Tensors with fewer values are sent unencoded.
        always: Encode outside training steps too, for axes that carry nothing else.

    Returns:
        The group of the axis. :meth:`CompressingGroup.traffic` reports what it sent.

    Raises:
        UsageError: The mesh has no such axis, or is of other devices.
        SpecError: A codec is misspelt.
    """
    if axis not in (axes := _axes_of(mesh)):
        raise UsageError(f"the mesh has no axis {axis!r}, valid are {', '.join(axes) or 'none'}")
    if mesh.device_type not in DEVICES:
        raise UsageError(
            f"axis {axis!r} cannot be compressed on {mesh.device_type} devices, valid are {' and '.join(DEVICES)}"
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
    """Compress every axis with the codecs of a policy; see :func:`compress_axis`.

    A data axis takes the policy's ``dp`` for reductions of gradients and its ``gather`` for parameters. The policy's
    ``scatter`` is for plans only, which know who owns optimizer states.

    Args:
        mesh: Mesh of CPU or CUDA devices.
        policy: For example ``"zhybrid:24-8"`` or ``"hybrid"``; see :data:`thinwire.spec.plan_parts.policy.POLICIES`.
        roles: ``"dp"``, ``"tp"`` or ``"pp"`` by axis; :data:`ROLES` by default.

    Returns:
        The groups by axis.

    Raises:
        UsageError: An axis has no known role, or the mesh has no axis for which a role is given.
        SpecError: No policy has that name.
    """
    chosen = policy if isinstance(policy, HybridPolicy) else HybridPolicy.parse(str(policy))
    roles, axes = ROLES if roles is None else roles, _axes_of(mesh)
    if strange := [axis for axis in roles if axis not in (*axes, *ROLES)]:
        raise UsageError(f"roles: the mesh has no axis {strange[0]!r}, valid are {', '.join(axes) or 'none'}")
    groups = {}
    for axis in axes:
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
    """Make a second group with the same ranks that encodes, for functions that take a process group as an argument.

    Call this on all ranks of the group, in the same order for each group.

    Args:
        group: Group that carries what is not encoded. It does not change.
        codec: Codec of all operations except those given below; see :func:`compress_axis`.
        axis: Name in reports; the group's description by default.
        gather: Codec of all-gathers.
        send: Codec of point-to-point messages.
        min_numel: Tensors with fewer values are sent unencoded.
        always: Encode outside training steps too.
    """
    if not isinstance(group, dist.ProcessGroup):
        raise UsageError(
            f"group = {group!r} is no process group of this rank: give torch.distributed.group.WORLD for all ranks"
        )
    codecs = AxisCodecs.of(codec, gather=gather, send=send)
    compressed = _wrapped(group, axis or str(group.group_desc), codecs, min_numel, always=always, owns_inner=False)
    _register(compressed, group, f"{group.group_name}/thinwire-{compressed.number}")
    return compressed


def axis_traffic(mesh: DeviceMesh | None = None, *, reset: bool = False) -> dict[str, AxisTraffic]:
    """Count what this rank has sent on each compressed axis, by operation and codec, and why tensors were not encoded.

    Args:
        mesh: Mesh whose axes are reported; by default all compressed groups that are alive.
        reset: Start again from zero.
    """
    groups: list[Any] = all_groups() if mesh is None else mesh.get_all_groups()
    traffic: dict[str, AxisTraffic] = {}
    for group in groups:
        if isinstance(group, CompressingGroup):
            name = group.axis if group.axis not in traffic else f"{group.axis}, group {group.group_name}"
            traffic[name] = group.traffic(reset=reset)
    return traffic


def _axes_of(mesh: DeviceMesh) -> tuple[str, ...]:
    if not isinstance(mesh, DeviceMesh):
        raise UsageError(f"mesh = {mesh!r} is no DeviceMesh: give one, as of init_device_mesh(device, shape)")
    return mesh.mesh_dim_names or ()


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
    """Replace ``group`` in torch's tables, under the same name; it stays there too if ``keep``, as the default group
    must."""
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
    compressed.registered_as = known_as
    world.pg_map[compressed] = world.pg_map[group]
    world.pg_names[compressed] = known_as
    world.pg_backend_config[compressed] = world.pg_backend_config[group]
    world.pg_group_ranks[compressed] = dict(world.pg_group_ranks[group])
    world.pg_to_tag[compressed] = f"ptd:{name}"
    for tag in ("", f"ptd:{name}"):
        world.tags_to_pg.setdefault(tag, []).append(compressed)
    c10d._register_process_group(known_as, compressed)


def _create(made: Any, options: Any) -> CompressingGroup:
    """Make a group of the backend for torch, on top of gloo."""
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
    """Raise if an exception has left a coalescing block open, because torch then drops the group's collectives."""
    for group in all_groups():
        left = c10d._world.pg_coalesce_state.pop(group, None)
        if left is not None:
            raise UsageError(
                f"an exception has left a coalescing block of axis {group.axis} open, with {len(left)} collectives "
                "that were never performed; it is closed now: repeat the step from the last state that is sound"
            )


dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])
on_entry(_check_coalescing)
