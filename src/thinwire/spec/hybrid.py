"""Policies for 3-D parallelism: one name that gives every parallel dimension its codec.

The four of arXiv 2409.02423 are :func:`~thinwire.spec.policy.policy_codecs`; here each is laid out by dimension, as
tensor and pipeline parallelism, the data axis and ZeRO-1 use it. Beside them stands ours, ``hybrid``: gradients are
compressed aggressively, and only once; activations, parameters and optimizer shards need precision. It keeps that
discipline and takes block quantisation for ZFP, which says more per bit: on N(0, 1), ``zfp:8`` has 25 dB,
``int6:256,hadamard`` 31 dB at 6.1 bits and ``int8:256`` 43 dB at 8.1 bits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from thinwire.errors import SpecError
from thinwire.spec.codec import CodecSpec
from thinwire.spec.policy import NAMES, policy_codecs

__all__ = ["AXES", "POLICIES", "STUDIED", "HybridPolicy"]

AXES = ("dp", "gather", "spread", "tp", "pp")
"""The fields of :class:`HybridPolicy` that hold a codec."""

POLICIES = ("none", *NAMES, "hybrid", "hybrid:A-B")
"""What a policy may be called."""

STUDIED = (
    "none",
    "naive-zfp:8",
    "naive-zfp:16",
    "naive-mpc",
    "mzhybrid:8",
    "mzhybrid:16",
    "zhybrid:16-8",
    "zhybrid:24-8",
    "hybrid",
)
"""The published policies with the rates of the paper, between no codec at all and ours."""

_BITS = re.compile(r"([2-8])-([2-8])")


@dataclass(frozen=True, slots=True)
class HybridPolicy:
    """The codec of every parallel dimension.

    Attributes:
        name: as it was written, one of :data:`POLICIES`.
        dp: gradients across data-parallel ranks, reduced in any way (all-reduce, reduce-scatter).
        gather: ZeRO's all-gather of parameters.
        spread: what ZeRO-1 and -2 send after a step: updated parameters of the optimizer's shards.
        tp: tensor parallelism: all-reduce, all-gather and reduce-scatter of activations and their gradients.
        pp: messages between pipeline stages, forward and backward.
    """

    name: str
    dp: CodecSpec
    gather: CodecSpec
    spread: CodecSpec
    tp: CodecSpec
    pp: CodecSpec

    @classmethod
    def parse(cls, name: str) -> Self:
        """The policy of a name.

        Args:
            name: one of :data:`POLICIES`; without numbers ``naive-zfp`` and ``mzhybrid`` mean rate 8, ``zhybrid``
                24-8. ``hybrid:A-B`` gives activations, parameters and optimizer shards A bits a value, gradients B
                bits; ``hybrid`` is 8-6.

        Raises:
            SpecError: if no policy has that name.
        """
        family, _, bits = name.partition(":")
        if name == "none":
            dense = gradients = CodecSpec()
        elif family == "hybrid":
            match = _BITS.fullmatch(bits or "8-6")
            if match is None:
                raise SpecError("policy", [f"{name!r} is not a policy: write hybrid:A-B, A and B from 2 to 8 bits"])
            dense = CodecSpec(f"int{match[1]}:256")
            # A rotated block has no outliers, which gradients are full of.
            gradients = CodecSpec(f"int{match[2]}:256,hadamard")
        else:
            try:
                published = policy_codecs(name)
            except SpecError as error:
                raise SpecError("policy", [_with_ours(error.problems[0])]) from None
            dense, gradients = published["tp"], published["reduce_inter"]
        return cls(name, dp=gradients, gather=dense, spread=dense, tp=dense, pp=dense)

    def codec(self, axis: str) -> CodecSpec:
        """The codec of one of :data:`AXES`.

        Raises:
            SpecError: if there is no such axis.
        """
        if axis not in AXES:
            raise SpecError("axis", [f"{axis!r} is not a parallel dimension: valid are {', '.join(AXES)}"])
        codec: CodecSpec = getattr(self, axis)
        return codec

    def wire(self) -> dict[str, CodecSpec]:
        """The same as fields of :class:`~thinwire.spec.Wire`, for a plan: ``Plan(..., wire=Wire(**policy.wire()))``."""
        return {
            "gather": self.gather,
            "spread": self.spread,
            "tp": self.tp,
            "pp": self.pp,
            "reduce_intra": self.dp,
            "reduce_inter": self.dp,
        }

    def __str__(self) -> str:
        return self.name


def _with_ours(problem: str) -> str:
    """A complaint that lists the policies of the paper, listing all of them."""
    return problem.replace(", ".join(NAMES), ", ".join(POLICIES))
