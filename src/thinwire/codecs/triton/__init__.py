"""The codecs as Triton kernels: CUDA and ROCm, and any device under Triton's interpreter."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING

from thinwire.errors import UsageError
from thinwire.spec.codec import FAMILIES

if TYPE_CHECKING:
    from thinwire.codecs.codec import Codec
    from thinwire.spec import CodecSpec

__all__ = ["make"]


def make(spec: CodecSpec) -> Codec:
    """The codec of a spec.

    Raises:
        UsageError: if Triton is not installed.
    """
    # Triton exists on Linux only, and the modules of this package import it.
    if importlib.util.find_spec("triton") is None:
        raise UsageError("the triton backend needs Triton, which is not installed: pip install triton")
    module, _, name = FAMILIES[spec.family].triton.partition(":")
    codec: Codec = getattr(importlib.import_module(f"{__name__}.{module}"), name)(spec)
    return codec
