"""The codecs as Triton kernels: CUDA and ROCm, and any device under Triton's interpreter."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING

from thinwire.errors import UsageError

if TYPE_CHECKING:
    from thinwire.codecs.codec import Codec
    from thinwire.spec import CodecSpec

__all__ = ["make"]

_FAMILIES = {
    "none": ("block", "ValueCodec"),
    "bf16": ("block", "ValueCodec"),
    "fp16": ("block", "ValueCodec"),
    "int": ("block", "ValueCodec"),
    "zfp": ("zfp", "TritonZfp"),
    "mpc": ("mpc", "TritonMpc"),
    "exp3": ("exp3", "TritonExp3"),
}


def make(spec: CodecSpec) -> Codec:
    """The codec of a spec.

    Raises:
        UsageError: if Triton is not installed.
    """
    # Triton is there on Linux only, and the modules below are made of its functions.
    if importlib.util.find_spec("triton") is None:
        raise UsageError("the triton backend needs Triton, which is not installed: pip install triton")
    module, name = _FAMILIES[spec.family]
    codec: Codec = getattr(importlib.import_module(f"thinwire.codecs.triton.{module}"), name)(spec)
    return codec
