"""How long the parts of a step take on a cluster, each alone: the alpha-beta figures of published hardware.

``cost/measured.py`` gives the same answers from a profile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from thinwire.cost.anatomy import ModelPart
from thinwire.errors import SpecError
from thinwire.program import Kind, Scope
from thinwire.program.wire import ITEMSIZE
from thinwire.spec import ClusterSpec, CodecSpec, Fabric, Link, Plan, Route
from thinwire.spec.codec import typical_ratio

__all__ = [
    "ALONE",
    "Beside",
    "Efficiency",
    "NominalRates",
    "Rates",
    "Work",
    "declared_seconds",
    "hop_route",
    "largest_bytes_per_value",
    "wire_bytes_per_value",
]


@dataclass(frozen=True, slots=True)
class Work:
    """A codec's work on messages.

    Attributes:
        codec: which.
        dtype: of the values, ``"bfloat16"`` or ``"float32"``.
        encoded: values encoded.
        decoded: values decoded.
        feedback: whether encoding keeps what is lost (error feedback).
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
        compute: how many times longer computation and codecs take; 1 is not at all.
        transfer: how many times longer the transfer takes.
        delay: seconds by which the transfer begins late, because the processor is taken.
        load: share of computation's processor that the transfer takes while it is under way.
    """

    compute: float = 1.0
    transfer: float = 1.0
    delay: float = 0.0
    load: float = 0.0


ALONE = Beside()
"""Nothing is slowed."""


class Rates(Protocol):
    """Seconds of everything a step consists of, each alone on its resource, all ranks of the cluster at it at once."""

    def hop(self, kind: Kind, scope: Scope, ranks: int, sent: int, *, encoded: bool, stride: int = 1) -> float:
        """One exchange of a collective, as :class:`thinwire.program.Hop` describes it."""
        ...

    def spine_load(self, kind: Kind, scope: Scope, ranks: int, stride: int) -> float:
        """How many times longer such a hop keeps the spine busy than the cards of a node; 0 where it crosses none."""
        ...

    def codec(self, work: Work) -> float:
        """Encoding and decoding."""
        ...

    def forward(self, part: ModelPart, plan: Plan, seq: int) -> float:
        """The forward of one part on one micro-batch."""
        ...

    def backward(self, part: ModelPart, plan: Plan, seq: int) -> float:
        """Its backward, without recomputation."""
        ...

    def update(self, numel: int) -> float:
        """The optimizer on so many elements of a shard."""
        ...

    def touch(self, numel: float) -> float:
        """Copying so many gradients from one buffer to another: packing buckets, delivering sums."""
        ...

    @property
    def step(self) -> float:
        """Fixed time of a step."""
        ...

    def beside(self, kind: Kind, scope: Scope, ranks: int, sent: int, *, encoded: bool) -> Beside:
        """What such a transfer and computation do to each other (gamma)."""
        ...

    @property
    def least_slowing(self) -> float:
        """How many times longer computation takes beside the transfer that disturbs it least."""
        ...

    @property
    def extrapolated(self) -> bool:
        """Whether any answer so far lies outside of what was measured."""
        ...


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of nominal rates that software reaches, where no profile says better.

    Attributes:
        compute: of peak FLOP/s, in the matrix products of a transformer of usual widths.
        inside: of the links inside a node, by collectives of large messages.
        nic: of the network cards, likewise.
        memory: of memory bandwidth, by element-wise kernels.
        beside: how many times longer computation and transfers take when both run (gamma).
        step: seconds of a step that belong to nothing else.
    """

    compute: float = 0.68
    inside: float = 0.75
    nic: float = 0.80
    memory: float = 0.70
    beside: float = 1.06
    step: float = 0.01


_ADAM_BYTES = 30
"""Bytes that AdamW moves per element: master, two moments and gradient read, the first three and bf16 written."""


class NominalRates:
    """Rates from a cluster's published figures.

    Args:
        cluster: the cluster.
        plan_dtype: compute dtype; a cluster without a peak for ``bfloat16`` computes it as ``float16``.
        efficiency: shares of the nominal rates.

    Raises:
        SpecError: if the cluster has no peak for the dtype.
    """

    extrapolated = True

    def __init__(
        self, cluster: ClusterSpec, plan_dtype: str = "bfloat16", efficiency: Efficiency | None = None
    ) -> None:
        self._cluster, self._efficiency = cluster, efficiency or Efficiency()
        self._fabric = Fabric(cluster)
        peaks = cluster.peak_flops
        half = peaks.get("bfloat16", peaks.get("float16"))
        peak = half if plan_dtype in {"bfloat16", "float16"} else peaks.get(plan_dtype)
        if peak is None:
            raise SpecError(
                f"cluster {cluster.name or ''}".strip(),
                [f"peak_flops has no figure for {plan_dtype}; it has {', '.join(peaks)}"],
            )
        self._flops = peak * self._efficiency.compute
        self._memory = cluster.memory_bandwidth / 8 * self._efficiency.memory

    def hop(self, kind: Kind, scope: Scope, ranks: int, sent: int, *, encoded: bool, stride: int = 1) -> float:
        """Latency of ``ranks - 1`` rounds, and the bytes over this rank's part of the links.

        Across nodes every rank of a node sends at the same time, each in a group of its own: they share the node's
        cards (the NIC contention that AMSP's sums leave out), and the spine with all that cross it.
        """
        del encoded
        way: Link | Route
        if scope is Scope.INSIDE:
            way, share = self._cluster.links.inside, self._efficiency.inside
        else:
            way, share = self._route(kind, ranks, stride), self._efficiency.nic / self._cluster.gpus_per_node
        return way.latency * (ranks - 1) + 8 * sent / (way.bandwidth * share)

    def spine_load(self, kind: Kind, scope: Scope, ranks: int, stride: int) -> float:
        """Of the cluster's leaves and spine."""
        return 0.0 if scope is Scope.INSIDE else self._route(kind, ranks, stride).load

    def _route(self, kind: Kind, ranks: int, stride: int) -> Route:
        return hop_route(self._fabric, kind, ranks, stride)

    def codec(self, work: Work) -> float:
        """At its declared speed, if another package adds the codec. Built-in codecs are bound by memory: they read and
        write values and messages once each."""
        if work.codec.plugin is not None:
            return declared_seconds(work.codec, work.dtype, work.encoded + work.decoded)
        return (
            (work.encoded + work.decoded)
            * (ITEMSIZE[work.dtype] + wire_bytes_per_value(work.codec, work.dtype))
            / self._memory
        )

    def forward(self, part: ModelPart, plan: Plan, seq: int) -> float:
        """FLOPs at the usual share of the peak; what has no matrix costs nothing."""
        return part.forward_flops(plan.micro_batch * seq, seq) / self._flops

    def backward(self, part: ModelPart, plan: Plan, seq: int) -> float:
        """Twice the forward."""
        return 2 * self.forward(part, plan, seq)

    def update(self, numel: int) -> float:
        """Bound by memory."""
        return numel * _ADAM_BYTES / self._memory

    def touch(self, numel: float) -> float:
        """Bound by memory: fp32 on one side, bf16 on the other."""
        return 6 * numel / self._memory

    @property
    def step(self) -> float:
        """The efficiency's."""
        return self._efficiency.step

    def beside(self, kind: Kind, scope: Scope, ranks: int, sent: int, *, encoded: bool) -> Beside:
        """The efficiency's gamma, whatever the transfer."""
        del kind, scope, ranks, sent, encoded
        return Beside(self._efficiency.beside, self._efficiency.beside)

    @property
    def least_slowing(self) -> float:
        """The efficiency's gamma."""
        return self._efficiency.beside


def hop_route(fabric: Fabric, kind: Kind, ranks: int, stride: int) -> Route:
    """What a hop across nodes gets: parts of sums go from each rank to each, all else around rings."""
    return fabric.route(ranks, stride, exchange=kind is Kind.REDUCE_SCATTER)


def declared_seconds(codec: CodecSpec, dtype: str, values: float) -> float:
    """How long a codec of another package takes to encode or decode so many values, by the speed that it declares.

    Raises:
        SpecError: if it declares none.
    """
    assert codec.plugin is not None
    speed = codec.plugin.bytes_per_second
    if speed is None:
        raise SpecError(
            "codec",
            [
                f"{codec} has no price: it declares no bytes_per_second and the profile has no measurement of it; "
                f"run `thinwire profile`, which measures {', '.join(codec.plugin.examples)}, and plan with its file, "
                "or declare the speed"
            ],
        )
    return values * ITEMSIZE[dtype] / speed


def wire_bytes_per_value(codec: CodecSpec, dtype: str) -> float:
    """Bytes of a long message per value; for codecs of variable length, as they usually come out."""
    typical = typical_ratio(codec, dtype)
    return ITEMSIZE[dtype] / typical if typical else largest_bytes_per_value(codec, dtype)


def largest_bytes_per_value(codec: CodecSpec, dtype: str) -> float:
    """Bytes of a long message per value at most, which is what a program counts."""
    numel = 1 << 20
    return codec.max_wire_bytes(numel, dtype) / numel
