"""Tensor <-> message, in three backends that write the same bytes. Knows nothing of ranks.

codec = thinwire.codecs.get("int8:256")
wire = codec.encode(gradient)                        # uint8
values = codec.decode(wire, gradient.numel(), torch.float32)
"""

from thinwire.codecs.codec import Codec
from thinwire.codecs.coder import Sum
from thinwire.codecs.registry import BACKENDS, default_backend, get

__all__ = ["BACKENDS", "Codec", "Sum", "default_backend", "get"]
