"""``none``, ``bf16`` and ``fp16``: the kernels of block quantisation take values as they are, too."""

from __future__ import annotations

from thinwire.codecs.triton.block import ValueCodec

__all__ = ["make"]

make = ValueCodec
"""The codec of a spec."""
