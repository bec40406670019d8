"""How long each part of a step takes alone on a cluster, from the alpha-beta figures of published hardware.

``cost/measured.py`` answers the same questions from a profile.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from thinwire.cost.blocks import ModelPart
from thinwire.cost.kernel_table import TabledKernels
from thinwire.cost.kernels import Kernels
from thinwire.errors import SpecError
from thinwire.program import Kind, Scope
from thinwire.program.wire import ITEMSIZE, Encoding
from thinwire.spec import ClusterSpec, CodecSpec, Fabric, Link, Plan, Route, seen_by
from thinwire.spec.codec import typical_ratio
from thinwire.spec.machines.kernels import KernelTable, this_host
from thinwire.spec.profile import Handling

HOST_UPDATE_BYTES = 28
"""Bytes per element that AdamW moves on a processor: master, moments and gradient in, master and moments out."""

Basis = Literal["measured here", "measured elsewhere", "extrapolated"]
"""What a prediction rests on: measurements of this cluster, of others with the same accelerator, or neither."""


@dataclass(frozen=True, slots=True)
class Work:
    """A codec's work on messages.

    Attributes:
        codec: The codec.
        dtype: Dtype of the values, ``"bfloat16"``, ``"float16"`` or ``"float32"``.
        encoded: Number of values to encode.
        decoded: Number of values to decode.
        feedback: Whether encoding keeps the rounding errors (error feedback).
    """

    codec: CodecSpec
    dtype: str
    encoded: float
    decoded: float
    feedback: bool = False


@dataclass(frozen=True, slots=True)
class Beside:
    """How computation and a transfer slow each other down while both run.

    Attributes:
        compute: Factor by which computation and codecs take longer; 1 is no slowdown.
        transfer: Factor by which the transfer takes longer.
        delay: Seconds that a transfer of next to nothing takes while the processor is busy; they count the less, the
            longer a transfer lasts.
        load: Share of computation's processor that the transfer uses while it runs.
    """

    compute: float = 1.0
    transfer: float = 1.0
    delay: float = 0.0
    load: float = 0.0


ALONE = Beside()
"""No slowdown."""


class Rates(ABC):
    """Seconds of every part of a step, each alone on its resource, while all ranks of the cluster do the same.

    Attributes:
        handling: Seconds that the runtime itself takes for each step and stage.
        slowing: What a second of computation beside a transfer costs both, at least; 0: nothing is known of it.
        noise: Relative difference below which two steps cannot be told apart.
    """

    handling: Handling
    slowing = 0.0
    noise = 0.01

    @abstractmethod
    def hop(self, kind: Kind, scope: Scope, ranks: int, sent: int, *, encoded: bool, stride: int = 1) -> float:
        """Seconds of one hop of a collective, as :class:`thinwire.program.Hop` describes it."""

    def spine_load(self, kind: Kind, scope: Scope, ranks: int, stride: int) -> float:
        """Busy seconds of the spine over those of a node's cards, for such a hop; 0 if it does not cross the spine, or
        nothing is known of it."""
        del kind, scope, ranks, stride
        return 0.0

    @abstractmethod
    def codec(self, work: Work) -> float:
        """Seconds of encoding and decoding."""

    @abstractmethod
    def computing(self, part: ModelPart, plan: Plan, seq: int) -> tuple[float, float]:
        """Seconds of the forward and of the backward of one part on one micro-batch, without recomputation."""

    @abstractmethod
    def update(self, numel: int) -> float:
        """Seconds of the optimizer on ``numel`` elements of a shard."""

    @abstractmethod
    def host_update(self, numel: int) -> float:
        """Seconds of the optimizer on ``numel`` elements of a shard, on the host's processor."""

    @abstractmethod
    def host_copy(self, nbytes: int, *, down: bool) -> float:
        """Seconds of a copy from the host's memory to the device's, or ``down``, back."""

    @abstractmethod
    def touch(self, numel: float) -> float:
        """Seconds of copying ``numel`` gradients between buffers: packing buckets, delivering sums."""

    @abstractmethod
    def beside(self, kind: Kind, scope: Scope, ranks: int, sent: int, *, encoded: bool) -> Beside:
        """How such a transfer and computation slow each other down (gamma)."""

    @abstractmethod
    def computing_basis(self, part: ModelPart, plan: Plan, seq: int) -> Basis:
        """What the seconds of the forward and the backward of a part rest on."""

    @property
    def on_processors(self) -> bool:
        """Whether ranks compute on processors, without accelerators."""
        return False

    @property
    def views(self) -> tuple[Rates, ...]:
        """The rates as ranks of every group of unlike nodes see them; one if all ranks see the same."""
        return (self,)

    def on(self, cluster: ClusterSpec) -> Rates:
        """The rates on another cluster: published figures follow it, measurements are kept."""
        del cluster
        return self

    @property
    def of_others(self) -> Rates:
        """The rates with computation as other frameworks perform it."""
        return self


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of nominal rates that software reaches, used in the absence of a profile.

    Attributes:
        compute: Share of peak FLOP/s that large matrix products reach.
        inside: Share of the links inside a node that collectives of large messages reach.
        nic: Share of the network cards that collectives of large messages reach.
        memory: Share of memory bandwidth that element-wise kernels reach.
        beside: Factor by which computation and transfers take longer when both run (gamma).
        step: Fixed seconds per step.
        attention: Share of peak FLOP/s that a fused kernel of attention reaches, counted without the masked half;
            ``None``: attention is not fused, and its scores pass through memory.
        passes: Times that kernels between matrix products read and write what fused kernels would read and write once.
        update_bytes: Bytes that the optimizer moves per element.
    """

    compute: float = 0.80
    inside: float = 0.75
    nic: float = 0.80
    memory: float = 0.70
    beside: float = 1.06
    step: float = 0.01
    attention: float | None = 0.35
    passes: float = 1.0
    update_bytes: float = 30.0


class NominalRates(Rates):
    """Rates from a cluster's published figures.

    Of unlike nodes, they are those of a rank of one group. Ranks of a synchronous step wait for each other. Each
    computes, and sends inside its node, at its own rate; a collective goes at the slowest member and link of its group.
    The simulator plays the step as a rank of each group sees it (``views``), and the slowest of them is the step.
    Whatever is estimated at the rates of one is a bound: no step is shorter than it is for one of its ranks.

    Args:
        cluster: The cluster.
        plan_dtype: Compute dtype; a cluster without a peak for ``bfloat16`` is given that of ``float16``.
        efficiency: Shares of the nominal rates that software reaches.
        group: Number of the group of unlike nodes; ``None``: the one that computes slowest.

    Attributes:
        handling: The fixed seconds of a step: hosts prepare operations while accelerators compute.
        slowing: The efficiency's gamma.

    Raises:
        SpecError: The nodes have no peak for the dtype, or a file with times of kernels cannot be read.
    """

    def __init__(
        self,
        cluster: ClusterSpec,
        plan_dtype: str = "bfloat16",
        efficiency: Efficiency | None = None,
        group: int | None = None,
    ) -> None:
        self._whole, self._efficiency, self._dtype = cluster, efficiency or Efficiency(), plan_dtype
        if cluster.groups:
            numbers = range(len(cluster.groups))
            group = min(numbers, key=lambda number: _peak(cluster, number)) if group is None else group
            cluster = seen_by(cluster, group)
        self._cluster, self._fabric = cluster, Fabric(self._whole, group)
        self.handling = Handling(step=self._efficiency.step)
        self.slowing = min(1.0, self._efficiency.beside - 1)
        peaks = cluster.peak_flops
        half = peaks.get("bfloat16", peaks.get("float16"))
        peak = half if plan_dtype in {"bfloat16", "float16"} else peaks.get(plan_dtype)
        if peak is None:
            raise SpecError(
                f"cluster {cluster.name or ''}".strip(),
                f"peak_flops has no figure for {plan_dtype}; it has {', '.join(peaks)}",
            )
        self._memory = cluster.memory_bandwidth / 8 * self._efficiency.memory
        share = self._efficiency
        self._kernels = Kernels(peak, share.compute, self._memory, share.attention, share.passes)
        self._table: TabledKernels | None = None
        if cluster.kernels is not None:
            self._kernels = self._table = TabledKernels(KernelTable.read(cluster.kernels), peak, self._memory)

    def on(self, cluster: ClusterSpec) -> NominalRates:
        """Rates of the same kind for another cluster."""
        return NominalRates(cluster, self._dtype, self._efficiency)

    @cached_property
    def views(self) -> tuple[Rates, ...]:
        """One for each group of unlike nodes."""
        numbers = range(len(self._whole.groups))
        return tuple(NominalRates(self._whole, self._dtype, self._efficiency, n) for n in numbers) or (self,)

    def hop(self, kind: Kind, scope: Scope, ranks: int, sent: int, *, encoded: bool, stride: int = 1) -> float:
        """The latency of ``ranks - 1`` rounds, plus the bytes over this rank's part of the links.

        Across nodes, all ranks of a node send at the same time, each in a group of its own. They share the node's cards
        (the NIC contention that AMSP's sums leave out), and they share the spine with all other transfers across it.
        """
        del encoded
        way: Link | Route
        if scope is Scope.INSIDE:
            way, share = self._cluster.links.inside, self._efficiency.inside
        else:
            way = self._route(kind, ranks, stride)
            share = self._efficiency.nic / self._cluster.gpus_per_node
        return way.latency * (ranks - 1) + 8 * sent / (way.bandwidth * share)

    def spine_load(self, kind: Kind, scope: Scope, ranks: int, stride: int) -> float:
        """As the cluster's leaves and spine imply."""
        return 0.0 if scope is Scope.INSIDE else self._route(kind, ranks, stride).load

    def _route(self, kind: Kind, ranks: int, stride: int) -> Route:
        """The route of a hop across nodes. Reductions send from each rank to each other; others go around a ring."""
        return self._fabric.route(ranks, stride, exchange=kind is Kind.REDUCE_SCATTER)

    def codec(self, work: Work) -> float:
        """At its declared speed, if another package adds the codec. Built-in codecs are bound by memory: they read and
        write values and messages once each."""
        values = work.encoded + work.decoded
        if work.codec.plugin is not None:
            return declared_seconds(work.codec, work.dtype, values)
        return values * (ITEMSIZE[work.dtype] + wire_bytes_per_value(work.codec, work.dtype)) / self._memory

    def computing(self, part: ModelPart, plan: Plan, seq: int) -> tuple[float, float]:
        """The kernels of the part, each by its shape; in the backward, a matrix has two products, of other shapes than
        in the forward."""
        return self._kernels.computing(part, plan.micro_batch, seq)

    def update(self, numel: int) -> float:
        """As measured; bound by memory bandwidth if it was not."""
        return self._each("update", numel, self._efficiency.update_bytes)

    def host_update(self, numel: int) -> float:
        """Bound by the host's memory, of which a rank has what its copies in both directions take."""
        return numel * HOST_UPDATE_BYTES * 8 / (2 * self._cluster.links.host.bandwidth)

    def host_copy(self, nbytes: int, *, down: bool) -> float:
        """The latency, plus the bytes over the link, which carries both directions at once."""
        del down
        link = self._cluster.links.host
        return link.latency + 8 * nbytes / link.bandwidth

    def touch(self, numel: float) -> float:
        """As measured; bound by memory bandwidth if it was not: fp32 on one side, bf16 on the other."""
        return self._each("copy", numel, 6)

    def _each(self, kernel: str, numel: float, nbytes: float) -> float:
        """Seconds of a kernel that moves ``nbytes`` bytes of each element."""
        measured = None if self._table is None else self._table.per_element(kernel, numel)
        return numel * nbytes / self._memory if measured is None else measured

    @property
    def has_kernels(self) -> bool:
        """Whether times of kernels were measured."""
        return self._table is not None

    def computing_basis(self, part: ModelPart, plan: Plan, seq: int) -> Basis:
        """What the seconds of a part rest on."""
        if self._table is None or not self._table.covers(part, plan.micro_batch, seq):
            return "extrapolated"
        return "measured here" if self._table.table.host == this_host() else "measured elsewhere"

    def beside(self, kind: Kind, scope: Scope, ranks: int, sent: int, *, encoded: bool) -> Beside:
        """The efficiency's gamma, whatever the transfer."""
        del kind, scope, ranks, sent, encoded
        return Beside(self._efficiency.beside, self._efficiency.beside)


def _peak(cluster: ClusterSpec, number: int) -> float:
    peaks = cluster.groups[number].peak_flops or cluster.peak_flops
    return max(peaks.get(dtype, 0.0) for dtype in cluster.peak_flops)


def declared_seconds(codec: CodecSpec, dtype: str, values: float) -> float:
    """Seconds that a codec of another package takes to encode or decode ``values`` values at its declared speed.

    Raises:
        SpecError: The codec declares no speed.
    """
    assert codec.plugin is not None
    speed = codec.plugin.bytes_per_second
    if speed is None:
        raise SpecError(
            "codec",
            f"{codec} has no price: it declares no bytes_per_second and the profile has no measurement of it; "
            f"run `thinwire profile`, which measures {', '.join(codec.plugin.examples)}, and plan with its file, "
            "or declare the speed",
        )
    return values * ITEMSIZE[dtype] / speed


def wire_bytes_per_value(codec: CodecSpec, dtype: str) -> float:
    """Bytes per value of a long message; for variable-length codecs, the typical figure."""
    typical = typical_ratio(codec, dtype)
    return ITEMSIZE[dtype] / typical if typical else largest_bytes_per_value(codec, dtype)


def largest_bytes_per_value(codec: CodecSpec, dtype: str) -> float:
    """Upper bound of the bytes per value of a long message, which is the figure that a program uses."""
    numel = 1 << 20
    return Encoding(codec, dtype).message(numel) / numel
