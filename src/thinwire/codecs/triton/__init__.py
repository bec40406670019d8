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
    """Make the codec of a spec by ``make`` of the module that its family names.

    Raises:
        UsageError: Triton is not installed.
    """
    # Triton exists only on Linux, and the kernel modules need it when they are imported.
    if importlib.util.find_spec("triton") is None:
        raise UsageError("the triton backend needs Triton, which is not installed: pip install triton")
    codec: Codec = importlib.import_module(f"{__name__}.{FAMILIES[spec.family].module}").make(spec)
    return codec
