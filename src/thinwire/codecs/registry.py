"""Which backend makes which codec. The only place that imports backends."""

from __future__ import annotations

import functools
import importlib

import torch

from thinwire.codecs.codec import Codec
from thinwire.errors import UsageError
from thinwire.spec import CodecSpec

__all__ = ["BACKENDS", "default_backend", "get"]

BACKENDS = ("reference", "cpp", "triton", "unfused")
"""``reference``: plain torch, any device, slow. ``cpp``: CPU. ``triton``: GPU, or any device under its interpreter.
``unfused``: the device's own without its fused forms, for measurements."""


def get(spec: str | CodecSpec, *, backend: str | None = None, device: str | torch.device = "cpu") -> Codec:
    """The codec of a name.

    Args:
        spec: for example ``"int8:256"``; see :data:`thinwire.spec.codec.NOTATION`.
        backend: one of :data:`BACKENDS`; the device's own unless said.
        device: where the tensors live, to choose the backend by.

    Raises:
        SpecError: if the text names no codec.
        UsageError: if there is no such backend, or it cannot work here.
    """
    codec = CodecSpec(spec) if isinstance(spec, str) else spec
    return _make(codec, backend or default_backend(device))


def default_backend(device: str | torch.device) -> str:
    """The backend for tensors on a device: ``cpp`` on CPU, ``triton`` on CUDA and ROCm."""
    return "cpp" if torch.device(device).type == "cpu" else "triton"


@functools.cache
def _make(spec: CodecSpec, backend: str) -> Codec:
    if backend not in BACKENDS:
        raise UsageError(f"codec backend {backend!r} does not exist, valid are {', '.join(BACKENDS)}")
    codec: Codec = importlib.import_module(f"thinwire.codecs.{backend}").make(spec)
    return codec
