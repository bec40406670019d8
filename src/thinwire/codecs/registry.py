"""Chooses the backend of a codec. Only this module imports backends, by the module that the codec's family names."""

from __future__ import annotations

import functools
import importlib
import importlib.util

import torch

from thinwire.codecs.codec import Codec
from thinwire.errors import SpecError, UsageError
from thinwire.spec import CodecPlugin, CodecSpec
from thinwire.spec.codec import FAMILIES

BACKENDS = ("reference", "cpp", "triton")
"""``reference``: plain torch, any device, slow. ``cpp``: CPU. ``triton``: GPU, or any device under its
interpreter."""


def get(spec: str | CodecSpec, *, backend: str | None = None, device: str | torch.device = "cpu") -> Codec:
    """Make the codec of a name.

    Args:
        spec: For example ``"int8:256"``; see :data:`thinwire.spec.codec.NOTATION`.
        backend: One of :data:`BACKENDS`. Default: the device's own. A codec of another package has one implementation,
            which all backends return.
        device: Device of the tensors, which determines the default backend.

    Raises:
        SpecError: No codec has this name, or a codec of another package cannot be loaded.
        UsageError: No backend has this name, or it does not work on this machine.
    """
    codec = spec if isinstance(spec, CodecSpec) else CodecSpec(str(spec))
    return _make(codec, backend or default_backend(device))


def default_backend(device: str | torch.device) -> str:
    """The backend for tensors on a device: ``cpp`` on CPU, ``triton`` on CUDA and ROCm."""
    return "cpp" if torch.device(device).type == "cpu" else "triton"


def check_backend(backend: str) -> None:
    """Check the name of a backend.

    Raises:
        UsageError: No backend has this name.
    """
    if backend not in BACKENDS:
        raise UsageError(f"codec backend {backend!r} does not exist, valid are {', '.join(BACKENDS)}")


@functools.cache
def _make(spec: CodecSpec, backend: str) -> Codec:
    check_backend(backend)
    if spec.plugin is not None:
        return _of_plugin(spec, spec.plugin)
    # Triton exists only on Linux, and the kernel modules need it when they are imported.
    if backend == "triton" and importlib.util.find_spec("triton") is None:
        raise UsageError("the triton backend needs Triton, which is not installed: pip install triton")
    module = "native" if backend == "cpp" else FAMILIES[spec.family].module
    codec: Codec = importlib.import_module(f"thinwire.codecs.{backend}.{module}").make(spec)
    return codec


def _of_plugin(spec: CodecSpec, plugin: CodecPlugin) -> Codec:
    """Make a codec of another package. It has one implementation for all devices that it supports."""
    module, _, name = plugin.implementation.partition(":")
    try:
        made = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise SpecError("codec", f"{spec}: {plugin.implementation} cannot be loaded: {error}") from error
    if not (isinstance(made, type) and issubclass(made, Codec)):
        raise SpecError("codec", f"{spec}: {plugin.implementation} should be a subclass of thinwire.codecs.Codec")
    codec: Codec = made(spec)
    return codec
