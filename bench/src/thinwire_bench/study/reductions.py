"""Ways to reduce-scatter encoded gradients, on real ranks, side by side: their error and what crosses nodes.

The ring and the single hop are here for comparison only: the ring encodes a sum anew at every rank it passes, the
single hop sends every rank's own message to every node. The two hops are those of training.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from thinwire import codecs
from thinwire.collectives.group import Meter, control
from thinwire.collectives.reduce_scatter import HopCodecs, reduce_scatter
from thinwire.collectives.topology import AxisGroup
from thinwire.program import Axis, Lane, Scope
from thinwire.program.stages import TRANSFERS
from thinwire.report import Sheet
from thinwire.spec import Factor, Plan
from thinwire.testing.ranks import RankPool
from thinwire.units import format_bytes
from thinwire_bench.codecs.data import gradients_by_rank

_TIMEOUT: Final = 300.0

_Partial = tuple[float, int]
"""Squared error of a rank's piece, and bytes that the rank sent to other nodes."""


@dataclass(frozen=True)
class Way:
    """A way to reduce.

    Attributes:
        algorithm: A key of :data:`ALGORITHMS`.
        inside: Codec of messages inside a node; algorithms other than two hops use it for all messages.
        across: Codec of messages between nodes, with two hops.
    """

    algorithm: str
    inside: str
    across: str

    @property
    def codec(self) -> str:
        """Description of the codecs."""
        return self.inside if self.inside == self.across else f"{self.inside}, {self.across} across"


@dataclass(frozen=True)
class Reduced:
    """The error and the bytes of one way to reduce.

    Attributes:
        way: Algorithm and codecs.
        snr_db: Signal-to-noise ratio of the mean gradient, in dB.
        across_bytes: Bytes that a node sent to others, as counted; mean over nodes.
        predicted_bytes: The same by the formula.
    """

    way: Way
    snr_db: float
    across_bytes: float
    predicted_bytes: float


def ring(mine: Tensor, local: int, way: Way) -> tuple[int, Tensor, int]:
    """Each piece goes once around all ranks, which add theirs: it is encoded anew at each.

    Args:
        mine: This rank's gradient, fp32.
        local: Ranks per node.
        way: Algorithm and codecs.

    Returns:
        Number and sum of the piece that ends at this rank, and the bytes it sent to another node.
    """
    me, world = dist.get_rank(), dist.get_world_size()
    codec = codecs.get(way.inside)
    pieces = mine.view(world, -1)
    after, before = (me + 1) % world, (me - 1) % world
    travelling, crossed = pieces[me], 0
    for step in range(1, world):
        message = codec.encode(travelling)
        received = torch.empty_like(message)
        _exchange([(after, message)], [(before, received)])
        crossed += message.numel() if after // local != me // local else 0
        travelling = codec.decode_add(received, pieces[(me - step) % world].clone())
    return after, travelling, crossed


def one_hop(mine: Tensor, local: int, way: Way) -> tuple[int, Tensor, int]:
    """Every rank sends each of the others its piece; arguments and result as in :func:`ring`."""
    me, world = dist.get_rank(), dist.get_world_size()
    codec = codecs.get(way.inside)
    pieces = mine.view(world, -1)
    others = [rank for rank in range(world) if rank != me]
    messages = {rank: codec.encode(pieces[rank]) for rank in others}
    received = {rank: torch.empty_like(messages[rank]) for rank in others}
    _exchange(list(messages.items()), list(received.items()))
    total = pieces[me].clone()
    for rank in others:
        codec.decode_add(received[rank], total)
    return me, total, sum(messages[rank].numel() for rank in others if rank // local != me // local)


def two_hops(mine: Tensor, local: int, way: Way) -> tuple[int, Tensor, int]:
    """Inside the node, then across nodes, as thinwire reduces; arguments and result as in :func:`ring`."""
    world = dist.get_world_size()
    mesh = Factor(local=local, nodes=world // local)
    plan = Plan(mesh=mesh, params=mesh, grads=mesh, optimizer=mesh)
    meter = Meter()
    group = AxisGroup(plan, Axis.PARAMS, Lane.SYNC, control().rank, torch.device("cpu"), meter, TRANSFERS)
    total = torch.empty(mine.numel() // world)
    at_hops = HopCodecs(codecs.get(way.inside), codecs.get(way.across))
    reduce_scatter(group, mine.clone(), total, codecs=at_hops).perform()
    return group.index, total, meter.take()[Lane.SYNC][Scope.ACROSS]


ALGORITHMS: Final[dict[str, Callable[[Tensor, int, Way], tuple[int, Tensor, int]]]] = {
    "ring": ring,
    "1 hop": one_hop,
    "2 hops": two_hops,
}


def study(nodes: int, local: int, ways: Sequence[Way], report: Callable[[str], None]) -> list[Reduced]:
    """Reduce the gradients of a small model in several ways.

    Args:
        nodes: Nodes of the mesh.
        local: Ranks per node.
        ways: Algorithms and codecs to compare.
        report: Called with a line of text before anything that takes long.

    Returns:
        One result for each way.
    """
    world = nodes * local
    gradients = torch.stack(gradients_by_rank(world, report))
    gradients = gradients[:, : gradients.shape[1] // (256 * world) * 256 * world].contiguous()
    signal = float(gradients.sum(0).double().square().sum())
    pool = RankPool(world)
    try:
        with tempfile.TemporaryDirectory() as directory:
            path = str(Path(directory) / "gradients.safetensors")
            save_file({"gradients": gradients}, path)
            report(f"reducing {gradients.shape[1]:,} values over {nodes} nodes of {local} ranks")
            partials: list[list[_Partial]] = pool.run(_measure, path, local, list(ways), timeout=_TIMEOUT)
    finally:
        pool.close()
    results = []
    for way, of_ranks in zip(ways, zip(*partials, strict=True), strict=True):
        error = sum(partial[0] for partial in of_ranks)
        crossed = sum(partial[1] for partial in of_ranks) / nodes
        snr = math.inf if error == 0 else 10 * math.log10(signal / error)
        results.append(Reduced(way, snr, crossed, predicted_bytes(way, gradients.shape[1], nodes, local)))
    return results


def predicted_bytes(way: Way, numel: int, nodes: int, local: int) -> float:
    """What one node sends to others, in bytes: with Z ranks, N of them on a node, and M bytes of a whole encoded vector

    - ring: ``(Z - 1) M / Z``, as one of its ranks borders on another node;
    - one hop: ``N (Z - N) M / Z``;
    - two hops: ``(Z - N) M / Z``.
    """
    world = nodes * local
    if nodes == 1:
        return 0.0
    piece: int = codecs.get(way.across).max_wire_bytes(numel // world, torch.float32)
    messages = {"ring": world - 1, "1 hop": local * (world - local), "2 hops": world - local}[way.algorithm]
    return float(messages * piece)


def sheet(results: Sequence[Reduced], nodes: int, local: int) -> Sheet:
    """The comparison as a table."""
    rows = [
        [
            reduced.way.algorithm,
            reduced.way.codec,
            f"{reduced.snr_db:.1f}",
            format_bytes(reduced.across_bytes),
            format_bytes(reduced.predicted_bytes),
        ]
        for reduced in results
    ]
    columns = ["algorithm", "codec", "SNR in dB", "sent by a node", "predicted"]
    return Sheet(f"Reduce-scatter over {nodes} nodes of {local} ranks", columns, 2, rows)


def _measure(path: str, local: int, ways: Sequence[Way]) -> list[_Partial]:
    """On one rank: squared error of its piece and bytes to other nodes, for each way."""
    gradients = load_file(path)["gradients"]
    pieces = gradients.double().sum(0).view(dist.get_world_size(), -1)
    results = []
    for way in ways:
        index, total, crossed = ALGORITHMS[way.algorithm](gradients[dist.get_rank()].clone(), local, way)
        results.append((float((total.double() - pieces[index]).square().sum()), crossed))
    return results


def _exchange(outgoing: Sequence[tuple[int, Tensor]], incoming: Sequence[tuple[int, Tensor]]) -> None:
    """Send and receive at once."""
    requests = [dist.irecv(tensor, src=rank) for rank, tensor in incoming]
    requests += [dist.isend(tensor, dst=rank) for rank, tensor in outgoing]
    for request in requests:
        if request is not None:
            request.wait()
