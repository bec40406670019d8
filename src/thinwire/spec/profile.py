"""The profile of a cluster: measurements that ``thinwire profile`` writes and the planner reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field

from thinwire.spec.base import Bytes, Count, Depth, Positive, Share, Spec
from thinwire.spec.machines.measured import Measured, Timing
from thinwire.spec.plan import Dtype

NonNegative = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]


class CollectiveRow(Timing):
    """Times of one collective on the slowest rank, for one message size and one group shape."""

    former_keys: ClassVar[Mapping[str, str]] = {"samples": ""}

    kind: Literal["all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "send"] = Field(
        description="name of the collective"
    )
    local: Count = Field(description="ranks of a group on each node")
    nodes: Count = Field(description="nodes that a group spans")
    groups: Literal["all", "one"] = Field(
        default="all",
        description="all: every disjoint group of the cluster runs at once, as in training; one: a single group runs",
    )
    sent: Bytes = Field(description="bytes that one rank sends")
    processor: NonNegative = Field(
        default=0.0, description="seconds of processor time per rank, if processors send; mean over the ranks"
    )


class CodecRow(Timing):
    """Times of a codec on one message while all ranks of a node encode or decode at once."""

    codec: str = Field(description="name of the codec, as in a plan")
    dtype: Dtype = Field(description="data type of the values")
    work: Literal["encode", "decode", "feedback"] = Field(
        description="direction; feedback: encoding that keeps the rounding errors (error feedback)"
    )
    numel: Count = Field(description="number of values in the message")


def profiled_kind(kind: str, *, encoded: bool) -> str:
    """Name under which a profile has a hop: encoded gradients are only exchanged, and summed once decoded."""
    return "all_to_all" if encoded and kind == "reduce_scatter" else str(kind)


class ComputeRow(Spec):
    """Times of one part of a model on one micro-batch while all ranks of a node compute at once."""

    part: Literal["block", "head", "embedding"] = Field(description="part of the model; head includes the loss")
    hidden: Count = Field(description="width of the residual stream")
    ffn: Count = Field(description="width of the feed-forward network")
    heads: Count = Field(description="attention heads")
    kv_heads: Count = Field(description="key and value heads")
    vocab: Count = Field(description="tokens in the vocabulary")
    seq: Count = Field(description="tokens per sequence")
    micro_batch: Count = Field(description="sequences per micro-batch")
    dtype: Dtype = Field(description="compute dtype")
    forward: Positive = Field(description="median seconds of the forward")
    backward: Positive = Field(description="median seconds of the backward")
    flops: NonNegative = Field(description="floating-point operations of the forward")
    plain: Positive = Field(
        default=1.0,
        description="share of these seconds that the part takes in other frameworks: without the sums of gradients in "
        "fp32 and the hooks of thinwire's runtime; 1: not measured",
    )


class OverlapRow(Spec):
    """How much computation and transfers slow each other down when they overlap.

    A transfer that overlaps with computation takes ``hypot(transfer * alone, delay)`` seconds.
    """

    scope: Literal["inside", "across"] = Field(description="links of the transfers: inside a node or across nodes")
    sent: Bytes = Field(description="bytes that one rank sends in the largest measured transfer")
    compute: Annotated[float, Field(strict=True, ge=1)] = Field(
        description="factor by which computation takes longer during a transfer"
    )
    transfer: Annotated[float, Field(strict=True, ge=1)] = Field(
        description="factor by which a transfer takes longer during computation"
    )
    delay: NonNegative | None = Field(
        default=None,
        description="seconds that a transfer of next to nothing takes during computation; null: only one size was "
        "measured, and transfer covers the whole slowdown",
    )
    hidden: Count | None = Field(
        default=None, description="hidden width of the model that computed; null: not recorded"
    )


class StepRow(Spec):
    """A step that was predicted from the profile and then measured, in a race."""

    plan: str = Field(description="fingerprint of the plan")
    predicted: Positive = Field(description="predicted seconds")
    seconds: Positive = Field(description="median seconds of the measured steps")


class Handling(Spec):
    """How long the runtime itself holds the processor, beyond computation, transfers and codecs' work. For a stage of a
    collective it prepares buffers and wakes threads; for a step it runs the optimizer's code and checks. All 0 on an
    accelerator."""

    step: NonNegative = Field(default=0.0, description="seconds for each step")
    reduce: NonNegative = Field(default=0.0, description="seconds for each hop of a reduction")
    gather: NonNegative = Field(default=0.0, description="seconds for each hop that gathers")
    codec: NonNegative = Field(default=0.0, description="seconds for each turn of a codec")


class Profile(Measured):
    """All measurements of one cluster."""

    what: ClassVar[str] = "a profile"
    made_by: ClassVar[str] = "thinwire profile --out"

    backend: str = Field(description="torch.distributed backend")
    nodes: Count = Field(description="number of nodes")
    gpus_per_node: Count = Field(description="ranks per node")
    memory: Bytes = Field(description="bytes that one rank may use")
    base_memory: Depth = Field(description="bytes that the rank that uses most has in use before it holds a model")
    memory_margin: Share = Field(
        default=0.03,
        description="share of its predicted memory that a rank may need in addition: the most that plans in the lab "
        "needed, or that a run to which the profile was refitted needed",
    )
    update_seconds: NonNegative = Field(description="seconds that the optimizer takes per element of a shard")
    touch_seconds: NonNegative = Field(
        default=0.0,
        description="seconds per element to copy fp32 to bf16 or back while all ranks of a node copy at once",
    )
    up_seconds: NonNegative = Field(
        default=0.0, description="seconds per byte to copy from the host's memory to the device; 0: not measured"
    )
    down_seconds: NonNegative = Field(
        default=0.0, description="seconds per byte to copy from the device to the host's memory; 0: not measured"
    )
    host_update_seconds: NonNegative = Field(
        default=0.0, description="seconds that the optimizer takes per element on the host's processor; 0: not measured"
    )
    step_seconds: NonNegative = Field(description="fixed seconds per step: data, hooks and the control exchange")
    handling: Handling = Field(
        default=Handling(), description="what the runtime itself takes of the processor; all 0 in older profiles"
    )
    crowding: NonNegative = Field(
        default=0.0,
        description="seconds by which computation is delayed for each second of processor time that its rank spends on "
        "other work: 0 if another core is free or an accelerator computes, 1 if that work uses the computing core, "
        "more if ranks share cores",
    )
    collectives: tuple[CollectiveRow, ...] = Field(
        default=(), description="times of collectives by group shape and size"
    )
    library: tuple[CollectiveRow, ...] = Field(
        default=(),
        description="times of the library calls that other frameworks make: one call over the whole group of ranks, "
        "sums and copies included, values in bfloat16",
    )
    codecs: tuple[CodecRow, ...] = Field(default=(), description="times of codecs by message size")
    compute: tuple[ComputeRow, ...] = Field(default=(), description="times of parts of models")
    overlap: tuple[OverlapRow, ...] = Field(
        default=(), description="how much computation and transfers slow each other down"
    )
    steps: tuple[StepRow, ...] = Field(
        default=(), description="steps that were predicted from these rows and measured, which say how wrong they are"
    )

    def paced(self, pace: float, *, transfers: bool = False, codecs: bool = True) -> Self:
        """The profile of the same cluster with processors that take ``pace`` times as long.

        Args:
            pace: Factor above 0.
            transfers: Whether transfers are processor work too, as on links without a rate limit.
            codecs: Whether codecs keep that pace as well.
        """

        def sent(rows: tuple[CollectiveRow, ...]) -> tuple[CollectiveRow, ...]:
            busy = (row.with_(processor=row.processor * pace) for row in rows)
            return tuple(row.scaled(pace) if transfers else row for row in busy)

        return self.with_(
            **{name: getattr(self, name) * pace for name in type(self).model_fields if name.endswith("_seconds")},
            compute=tuple(row.with_(forward=row.forward * pace, backward=row.backward * pace) for row in self.compute),
            codecs=tuple(row.scaled(pace) if codecs else row for row in self.codecs),
            collectives=sent(self.collectives),
            library=sent(self.library),
            handling=Handling(**{name: seconds * pace for name, seconds in self.handling.to_dict().items()}),
        )

    def of_others(self) -> Self:
        """The profile of the same cluster with computation as other frameworks perform it, without this runtime."""
        return self.with_(
            handling=Handling(),
            compute=tuple(
                row.with_(forward=row.forward * row.plain, backward=row.backward * row.plain, plain=1.0)
                for row in self.compute
            ),
        )
