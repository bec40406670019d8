"""The codecs in plain torch: what the wire format means, and what the other backends are compared with."""

from __future__ import annotations

from thinwire.codecs.codec import Codec
from thinwire.codecs.reference.block import BlockCodec
from thinwire.codecs.reference.cast import CastCodec, NoneCodec
from thinwire.codecs.reference.exp3 import Exp3Codec
from thinwire.codecs.reference.mpc import MpcCodec
from thinwire.codecs.reference.zfp import ZfpCodec
from thinwire.spec import CodecSpec

__all__ = ["make"]

_FAMILIES: dict[str, type[Codec]] = {
    "none": NoneCodec,
    "bf16": CastCodec,
    "fp16": CastCodec,
    "int": BlockCodec,
    "zfp": ZfpCodec,
    "mpc": MpcCodec,
    "exp3": Exp3Codec,
}


def make(spec: CodecSpec) -> Codec:
    """The codec of a spec."""
    return _FAMILIES[spec.family](spec)
