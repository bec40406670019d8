"""Puts the ranks of a job in order at its start: a plan's ``topology`` becomes its ``placement``."""

from __future__ import annotations

import os
import platform
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from thinwire.agreement import Typed
from thinwire.collectives.group import Control
from thinwire.errors import MismatchError, SpecError, ThinwireError, UsageError
from thinwire.network.finding import FEWEST_NODES, Found, find_leaves
from thinwire.network.slurm import slurm_topology
from thinwire.program import least_crossing
from thinwire.spec import Plan
from thinwire.spec.machines.topology import TOPOLOGY_SOURCES, SwitchTree

WITH_PLAN: Final[Typed[tuple[str, str, bytes]]] = Typed(tuple[str, str, bytes])
"""Fingerprint and description of a rank's plan, and a message of its own. Ranks with different plans may meet while one
orders ranks and another shards, so that both begin alike."""

_READ: Final[Typed[tuple[str, SwitchTree | None, str]]] = Typed(tuple[str, SwitchTree | None, str])


@dataclass(frozen=True)
class Ordered:
    """A plan with its ranks in order.

    Attributes:
        plan: The plan with a ``placement`` in place of its ``topology``; without either, if the launcher's order is as
            good as any.
        hosts: Host of each node, in the order of the mesh; empty for a plan without a topology.
        sentence: What was read, and what the order does, for the log; empty for a plan without a topology.
    """

    plan: Plan
    hosts: tuple[str, ...] = ()
    sentence: str = ""


_known: weakref.WeakKeyDictionary[Control, dict[str, Ordered]] = weakref.WeakKeyDictionary()
"""Orders of each job by the plan's fingerprint, so that parts of a model that are sharded one by one agree."""


def host_name() -> str:
    """The name of this host: SLURM's in its jobs, because it may differ from the machine's own."""
    return os.environ.get("SLURMD_NODENAME") or platform.node()


def order_ranks(plan: Plan, control: Control, device: torch.device, members: Sequence[int] | None = None) -> Ordered:
    """Order the ranks by the plan's ``topology``, so that as few bytes as possible cross leaf switches.

    Every rank calls this. Rank 0 alone reads the topology, so that a thousand ranks do not ask SLURM's controller.

    Args:
        plan: The plan.
        control: The ranks.
        device: Device of tensors that pairs exchange.
        members: The same ranks in the order that the caller has given them, if any.

    Raises:
        SpecError: On every rank: the topology cannot be read, lacks a host, or cannot be found by timing, or the ranks
            have an order already.
        MismatchError: On every rank: ranks have different plans.
    """
    if plan.topology is None or plan.world != control.size:
        return Ordered(plan)  # ranks of another number are refused where the model is sharded
    if members is not None and list(members) != sorted(members):
        raise _unusable(
            plan,
            f"the mesh has an order of its own, {list(members)}: give its ranks in ascending order, or no topology",
        )
    orders = _known.setdefault(control, {})
    key = plan.fingerprint()
    if key not in orders:
        orders[key] = _ordered(plan, plan.topology, control, device)
    return orders[key]


def _ordered(plan: Plan, source: str, control: Control, device: torch.device) -> Ordered:
    hosts, topology, silent = _agreed(plan, source, control)
    of_node = _hosts_of_nodes(plan, hosts)
    if topology is not None:
        try:
            switches = topology.above(of_node)
        except SpecError as error:
            raise _unusable(plan, f"{error.what} {'; '.join(error.problems)}") from error
        read = f"leaf switches are those of {topology.source}"
    elif plan.mesh.nodes < FEWEST_NODES:
        sentence = f"{silent}pairs were not timed: any order of {plan.mesh.nodes} nodes is the same"
        return Ordered(plan.with_(topology=None), tuple(of_node), sentence)
    else:
        found = find_leaves(control, plan.mesh, device)
        switches = _found_switches(plan, found)
        read = f"{silent}leaf switches were found by timing pairs of nodes for {found.seconds:.0f} s"
    order, crossing, given = least_crossing(plan, switches)
    number = len(set(switches))
    placed = tuple(of_node[node] for node in order)
    if order == tuple(range(len(order))):
        effect = f"the launcher's order is kept, because none sends fewer bytes across leaves ({given:.0%})"
        placement = None
    else:
        effect = f"{crossing:.0%} of the bytes between nodes cross leaves, {given:.0%} in the launcher's order"
        local = plan.mesh.local
        placement = tuple(node * local + place for node in order for place in range(local))
    sentence = f"{read}: {number} above {len(of_node)} nodes; {effect}"
    return Ordered(plan.with_(topology=None, placement=placement), placed, sentence)


def _agreed(plan: Plan, source: str, control: Control) -> tuple[list[str], SwitchTree | None, str]:
    """The host of every rank, and what rank 0 has read; see :func:`_read`."""
    # Paths may differ from host to host, since only rank 0 reads the file.
    kind = source if source in TOPOLOGY_SOURCES else "file"
    mine = plan.with_(topology=kind).fingerprint(), plan.describe()

    def read() -> tuple[str, str, bytes]:
        found = _read(source) if control.rank == 0 else (None, "")
        return *mine, _READ.encode((host_name(), *found))

    everyone = control.agree(read, lambda problems: _unusable(plan, next(iter(problems.values()))), WITH_PLAN)
    for rank, other in enumerate(everyone):
        if other[0] != mine[0]:
            raise MismatchError(
                f"rank {rank} and rank {control.rank} have different plans: [{other[1]}; {other[0]}] against "
                f"[{mine[1]}; {mine[0]}]. Give every rank the same plan file"
            )
    read_by = [_READ.decode(other[2]) for other in everyone]
    _, switches, silent = read_by[0]
    return [host for host, _, _ in read_by], switches, silent


def _read(source: str) -> tuple[SwitchTree | None, str]:
    """Read the topology, on rank 0.

    Returns:
        The topology, or ``None`` if pairs are to be timed, and the beginning of a sentence that says why SLURM's is not
        used where ``auto`` looked for it.

    Raises:
        UsageError: It cannot be read; the message is one sentence without the name of the key.
    """
    try:
        if source == "slurm":
            return slurm_topology(), ""
        if source == "auto" and "SLURM_JOB_ID" in os.environ:
            try:
                return slurm_topology(), ""
            except UsageError as error:
                return None, f"{error}; so "
        return None if source in ("auto", "timed") else SwitchTree.read(Path(source)), ""
    except SpecError as error:
        raise UsageError(f"{error.what} {'; '.join(error.problems)}") from error


def _hosts_of_nodes(plan: Plan, hosts: Sequence[str]) -> list[str]:
    local = plan.mesh.local
    of_node = [hosts[start : start + local] for start in range(0, len(hosts), local)]
    for node, names in enumerate(of_node):
        if len(set(names)) > 1:
            raise _unusable(
                plan,
                f"ranks {node * local} to {node * local + local - 1} of node {node} run on "
                f"{', '.join(dict.fromkeys(names))}: start ranks host by host (srun --distribution=block)",
            )
    return [names[0] for names in of_node]


def _found_switches(plan: Plan, found: Found) -> list[tuple[str, ...]]:
    if not found.known:
        raise _unusable(
            plan,
            f"timing could not tell leaf switches: slow pairs of nodes take {found.spread:.1f} times as long as fast "
            "ones, but not by leaf; write a file (host and leaf in each line), or leave topology unset",
        )
    leaf_of = {node: f"leaf{number}" for number, leaf in enumerate(found.leaves) for node in leaf}
    return [(leaf_of[node],) for node in range(plan.mesh.nodes)]


def _unusable(plan: Plan, why: str) -> ThinwireError:
    return plan.unsuitable(f"topology = {plan.topology!r}: {why}")
