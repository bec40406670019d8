"""The codecs on CPU, in C++ from ``csrc/``, with one version of every kernel per instruction set."""

from __future__ import annotations

from thinwire.codecs.codec import Codec
from thinwire.codecs.cpp.native import FixedCodec, LosslessCodec
from thinwire.spec import CodecSpec

__all__ = ["make"]


def make(spec: CodecSpec) -> Codec:
    return LosslessCodec(spec) if spec.is_variable_length else FixedCodec(spec)
