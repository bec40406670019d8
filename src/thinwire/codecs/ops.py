"""The codecs as operators of ``torch.library``, so that they trace under ``torch.compile`` and ``torch.export``.

Importing this module registers ``torch.ops.thinwire.encode``, ``decode`` and ``decode_add``. Codec and backend are
given as text; an empty backend means the device's own. Outside of compiled code, :func:`thinwire.codecs.get` costs less
per call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.codecs.codec import Codec
from thinwire.codecs.registry import get
from thinwire.spec import CodecSpec


@torch.library.custom_op("thinwire::encode", mutates_args=())
def encode(x: Tensor, codec: str, backend: str = "", seed: int | None = None) -> Tensor:
    """:meth:`Codec.encode <thinwire.codecs.Codec.encode>` as an operator."""
    # An operator's result owns its memory, and that of a codec of variable length is a part of a larger buffer.
    wire = _codec(codec, backend, x).encode(x, seed=seed)
    return wire.clone() if CodecSpec(codec).is_variable_length else wire


@encode.register_fake
def _(x: Tensor, codec: str, backend: str = "", seed: int | None = None) -> Tensor:
    del backend, seed
    spec = CodecSpec(codec)
    if spec.is_variable_length:
        return x.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.uint8)
    return x.new_empty(spec.max_wire_bytes(x.numel(), x.dtype), dtype=torch.uint8)


@torch.library.custom_op("thinwire::decode", mutates_args=())
def decode(wire: Tensor, numel: int, dtype: torch.dtype, codec: str, backend: str = "") -> Tensor:
    """:meth:`Codec.decode <thinwire.codecs.Codec.decode>` as an operator."""
    return _codec(codec, backend, wire).decode(wire, numel, dtype)


@decode.register_fake
def _(wire: Tensor, numel: int, dtype: torch.dtype, codec: str, backend: str = "") -> Tensor:
    del codec, backend
    return wire.new_empty(numel, dtype=dtype)


@torch.library.custom_op("thinwire::decode_add", mutates_args={"out"})
def decode_add(wire: Tensor, out: Tensor, codec: str, backend: str = "", encoded: torch.dtype | None = None) -> None:
    """:meth:`Codec.decode_add <thinwire.codecs.Codec.decode_add>` as an operator."""
    _codec(codec, backend, wire).decode_add(wire, out, encoded=encoded)


def _codec(codec: str, backend: str, tensor: Tensor) -> Codec:
    return get(codec, backend=backend or None, device=tensor.device)
