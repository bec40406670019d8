"""The codecs as Triton kernels: CUDA and ROCm, and any device under Triton's interpreter."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING

from thinwire.errors import UsageError
from thinwire.spec.codec import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from thinwire.codecs.codec import Codec
    from thinwire.spec import CodecSpec

__all__ = ["make", "warm_up"]


def make(spec: CodecSpec) -> Codec:
    """Make the codec of a spec by ``make`` of the module that its family names.

    Raises:
        UsageError: Triton is not installed.
    """
    _check_installed()
    codec: Codec = importlib.import_module(f"{__name__}.{FAMILIES[spec.family].module}").make(spec)
    return codec


def warm_up(
    codecs: Iterable[Codec],
    dtypes: Iterable[torch.dtype],
    device: torch.device | str,
    *,
    messages: Sequence[int] = (2,),
) -> None:
    """Compile the kernels of codecs; see :func:`thinwire.codecs.triton.warmup.warm_up`.

    Raises:
        UsageError: Triton is not installed, or the kernels cannot run on the device.
    """
    _check_installed()
    importlib.import_module(f"{__name__}.warmup").warm_up(codecs, dtypes, device, messages=messages)


def _check_installed() -> None:
    # Triton exists only on Linux, and the kernel modules need it when they are imported.
    if importlib.util.find_spec("triton") is None:
        raise UsageError("the triton backend needs Triton, which is not installed: pip install triton")
