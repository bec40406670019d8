"""Compression policies: one name that gives every parallel dimension its codec.

Gradients across data-parallel ranks are taken to be close to low rank and get few bits; parameters, activations and
optimizer shards are dense and need precision. From that split arXiv 2409.02423 builds four families with ZFP and MPC.
Beside them stands ours, ``hybrid``: it keeps the split and takes block quantisation for ZFP, which says more per bit:
on N(0, 1), ``zfp:8`` has 25 dB, ``int6:256,hadamard`` 31 dB at 6.1 bits and ``int8:256`` 43 dB at 8.1 bits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from thinwire.errors import SpecError
from thinwire.spec.codec import CodecSpec

__all__ = ["AXES", "POLICIES", "STUDIED", "HybridPolicy"]

AXES = ("dp", "gather", "spread", "tp", "pp")
"""The fields of :class:`HybridPolicy` that hold a codec."""

POLICIES = {
    "none": ("none", "none"),
    "naive-zfp": ("zfp:8", "zfp:8"),
    "naive-zfp:RATE": ("zfp:RATE", "zfp:RATE"),
    "naive-mpc": ("mpc", "mpc"),
    "mzhybrid": ("mpc", "zfp:8"),
    "mzhybrid:RATE": ("mpc", "zfp:RATE"),
    "zhybrid": ("zfp:24", "zfp:8"),
    "zhybrid:A-B": ("zfp:A", "zfp:B"),
    # A rotated block has no outliers, which gradients are full of.
    "hybrid": ("int8:256", "int6:256,hadamard"),
    "hybrid:A-B": ("intA:256", "intB:256,hadamard"),
}
"""What a policy may be called, capitals standing for bits per value: its codecs of dense data and of gradients."""

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

_NUMBER = re.compile(r"\d+(\.\d+)?")


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
            name: one of :data:`POLICIES` with numbers for the capitals: ``"zhybrid:24-8"``, ``"hybrid"``.

        Raises:
            SpecError: if no policy has that name, or a number in it fits no codec.
        """
        dense, gradients = _codecs(name)
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
        """The same as fields of :class:`~thinwire.spec.Wire`, which fills them in from its ``policy``."""
        return {
            "gather": self.gather,
            "reduce_intra": self.dp,
            "reduce_inter": self.dp,
            "spread": self.spread,
            "tp": self.tp,
            "pp": self.pp,
        }

    def __str__(self) -> str:
        return self.name


def _codecs(name: str) -> tuple[CodecSpec, CodecSpec]:
    """The codecs of dense data and of gradients under a policy."""
    family, colon, text = name.partition(":")
    numbers = text.split("-") if colon else []
    for form, (dense, gradients) in POLICIES.items():
        form_family, form_colon, form_text = form.partition(":")
        capitals = form_text.split("-") if form_colon else []
        if (family, len(numbers)) != (form_family, len(capitals)) or not all(map(_NUMBER.fullmatch, numbers)):
            continue
        for capital, number in zip(capitals, numbers, strict=True):
            dense, gradients = dense.replace(capital, number), gradients.replace(capital, number)
        try:
            return CodecSpec(dense), CodecSpec(gradients)
        except SpecError as error:
            raise SpecError("policy", [f"{name!r} is not a policy: {error.problems[0]}"]) from None
    raise SpecError("policy", [f"{name!r} is not a policy: valid are {', '.join(POLICIES)}"])
