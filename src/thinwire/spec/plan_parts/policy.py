"""Compression policies: one name chooses the codec of every parallel dimension.

A policy assumes that data-parallel gradients are close to low rank and need few bits, while parameters, activations and
optimizer shards are dense and need precision. A reduce-scatter to the owners of optimizer states beside an all-reduce
counts as dense in the published policies; alone, it takes the place of the all-reduce (``Plan.prepare``). arXiv
2409.02423 builds four families on this assumption, with ZFP and MPC. We add a fifth, ``hybrid``, which replaces ZFP
with block quantization. Block quantization is more precise at the same size: on N(0, 1), ``zfp:8`` reaches 25 dB,
``int6:256,hadamard`` 31 dB at 6.1 bits and ``int8:256`` 43 dB at 8.1 bits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from thinwire.errors import SpecError
from thinwire.spec.codec import CodecSpec

AXES = ("dp", "scatter", "gather", "spread", "tp", "pp", "ep", "cp")
"""The fields of :class:`HybridPolicy` that hold a codec."""

POLICIES = {
    "none": ("none", "none", "none"),
    "naive-zfp": ("zfp:8", "zfp:8", "zfp:8"),
    "naive-zfp:RATE": ("zfp:RATE", "zfp:RATE", "zfp:RATE"),
    "naive-mpc": ("mpc", "mpc", "mpc"),
    "mzhybrid": ("mpc", "mpc", "zfp:8"),
    "mzhybrid:RATE": ("mpc", "mpc", "zfp:RATE"),
    "zhybrid": ("zfp:24", "zfp:24", "zfp:8"),
    "zhybrid:A-B": ("zfp:A", "zfp:A", "zfp:B"),
    # Gradients have many outliers; the Hadamard rotation spreads each of them over its block.
    "hybrid": ("int8:256", "int6:256,hadamard", "int6:256,hadamard"),
    "hybrid:A-B": ("intA:256", "intB:256,hadamard", "intB:256,hadamard"),
}
"""Codecs by policy name: of dense data, of a reduce-scatter of gradients beside an all-reduce, and of all other
gradients. RATE, A and B stand for bits per value."""

_CAPITALS = re.compile("RATE|A|B")
_NUMBER = r"(\d+(?:\.\d+)?)"


@dataclass(frozen=True, slots=True)
class HybridPolicy:
    """The codec of every parallel dimension.

    Attributes:
        name: The name as the user wrote it; its form is a key of :data:`POLICIES`.
        dp: Codec of gradients across data-parallel ranks.
        scatter: Codec of gradients that are reduced to the owners of their optimizer states beside an all-reduce.
        gather: Codec of ZeRO's all-gather of parameters.
        spread: Codec of the updated parameters that ZeRO-1 and ZeRO-2 send from optimizer shards after a step.
        tp: Codec of activations and their gradients in tensor parallelism (all-reduce, all-gather, reduce-scatter).
        pp: Codec of messages between pipeline stages, forward and backward.
        ep: Codec of tokens on their way to experts on other ranks and back.
        cp: Codec of keys and values that ranks gather which share sequences, and of their gradients.
    """

    name: str
    dp: CodecSpec
    scatter: CodecSpec
    gather: CodecSpec
    spread: CodecSpec
    tp: CodecSpec
    pp: CodecSpec
    ep: CodecSpec
    cp: CodecSpec

    @classmethod
    def parse(cls, name: str) -> Self:
        """Parse the name of a policy.

        Args:
            name: A key of :data:`POLICIES` with numbers in place of RATE, A and B, for example ``"zhybrid:24-8"``.

        Raises:
            SpecError: No policy has that name, or no codec accepts one of its numbers.
        """
        dense, scatter, gradients = _codecs(name)
        every = dict.fromkeys(("gather", "spread", "tp", "pp", "ep", "cp"), dense)
        return cls(name, dp=gradients, scatter=scatter, **every)

    def codec(self, axis: str) -> CodecSpec:
        """The codec of one of :data:`AXES`.

        Raises:
            SpecError: There is no such axis.
        """
        if axis not in AXES:
            raise SpecError("axis", f"{axis!r} is not a parallel dimension: valid are {', '.join(AXES)}")
        codec: CodecSpec = getattr(self, axis)
        return codec

    def wire(self) -> dict[str, CodecSpec]:
        """The policy as fields of :class:`~thinwire.spec.Wire`, which fills them in from its ``policy``.

        ``scatter`` is left out if it is the codec of other gradients, so that it follows them if they change.
        """
        codecs = {axis: self.codec(axis) for axis in AXES if axis != "dp"}
        if self.scatter == self.dp:
            del codecs["scatter"]
        return codecs | {"reduce_intra": self.dp, "reduce_inter": self.dp}

    def __str__(self) -> str:
        return self.name


def _codecs(name: str) -> tuple[CodecSpec, CodecSpec, CodecSpec]:
    """The codecs that a policy gives to dense data, to gradients for owners of optimizer states, and to others."""
    for form, codecs in POLICIES.items():
        match = re.fullmatch(_CAPITALS.sub(lambda _: _NUMBER, form), name)
        if match is None:
            continue
        numbers = dict(zip(_CAPITALS.findall(form), match.groups(), strict=True))
        try:
            dense, scatter, gradients = (CodecSpec(_filled(codec, numbers)) for codec in codecs)
        except SpecError as error:
            raise SpecError("policy", f"{name!r} is not a policy: {error.problems[0]}") from None
        return dense, scatter, gradients
    raise SpecError("policy", f"{name!r} is not a policy: valid are {', '.join(POLICIES)}")


def _filled(codec: str, numbers: Mapping[str, str]) -> str:
    return _CAPITALS.sub(lambda capital: numbers[capital[0]], codec)
