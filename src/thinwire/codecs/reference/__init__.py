"""The codecs in plain torch: what the wire format means, and what the other backends are compared with."""

from __future__ import annotations

from thinwire.codecs.codec import Codec
from thinwire.codecs.reference.block import BlockCodec
from thinwire.codecs.reference.cast import CastCodec, NoneCodec
from thinwire.codecs.reference.exp3 import ReferenceExp3
from thinwire.codecs.reference.mpc import ReferenceMpc
from thinwire.codecs.reference.zfp import ReferenceZfp
from thinwire.spec import CodecSpec

__all__ = ["make"]

_FAMILIES: dict[str, type[Codec]] = {
    "none": NoneCodec,
    "bf16": CastCodec,
    "fp16": CastCodec,
    "int": BlockCodec,
    "zfp": ReferenceZfp,
    "mpc": ReferenceMpc,
    "exp3": ReferenceExp3,
}


def make(spec: CodecSpec) -> Codec:
    """The codec of a spec."""
    return _FAMILIES[spec.family](spec)
