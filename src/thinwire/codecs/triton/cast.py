"""``none``, ``bf16`` and ``fp16``, by the kernel of block quantisation, which also copies and casts values."""

from __future__ import annotations

from thinwire.codecs.triton.block import ValueCodec

make = ValueCodec
"""Make the codec of a spec."""
