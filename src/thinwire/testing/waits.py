"""Finds what would make a host wait for its device, on a machine that has none.

Under :func:`check_host_waits` tensors on torch's device ``meta`` stand for those of a GPU: they have a shape and a
dtype, and no memory. Operations on them compute nothing, and a value that the host would read does not exist. (Fake
tensors with the device ``cuda`` cannot be copied by a torch that was built without CUDA.)
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from thinwire.collectives.links.streams import CudaStreams, replace_streams

_READS: Final = frozenset({
    "aten::_local_scalar_dense",  # item(), float(), bool(), if
    "aten::_unique2", "aten::equal", "aten::is_nonzero", "aten::masked_select", "aten::nonzero",
    "aten::unique_consecutive", "aten::unique_dim",
})  # fmt: skip
"""Operators whose result, or whose result's shape, the host needs."""

_COPIES: Final = frozenset({"aten::_to_copy", "aten::copy_"})
_INDEXING: Final = "aten::index"


@dataclass(frozen=True, slots=True)
class HostWait:
    """A call of torch's operator for which the host would wait, in the innermost line that is neither torch nor this
    module."""

    operation: str
    where: str


class HostWaits(TorchDispatchMode):
    """Notes calls for which the host would wait for a device.

    Args:
        cpu_is_device: Whether tensors of the CPU stand for those of a device; copies then do not count.

    Attributes:
        waits: The calls, in order.
    """

    def __init__(self, *, cpu_is_device: bool = False) -> None:
        super().__init__()
        self.waits: list[HostWait] = []
        self._cpu_is_device = cpu_is_device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func._schema.name)
        if self._waits(func, name, args, kwargs):
            self.waits.append(HostWait(name, _innermost()))
        return func(*args, **kwargs)

    def _on_device(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and (self._cpu_is_device or value.device.type != "cpu")

    def _waits(self, func: Any, name: str, args: Any, kwargs: Any) -> bool:
        if name in _READS:
            return any(self._on_device(value) for value in args)
        if name == _INDEXING:
            return self._on_device(args[0]) and any(_is_mask(index) for index in args[1])
        return name in _COPIES and not self._cpu_is_device and _is_blocking_copy(func, args, kwargs)


@contextlib.contextmanager
def check_host_waits() -> Iterator[HostWaits]:
    """Note every call inside the context for which a host would wait for its device.

    Code under the check makes its tensors with ``device="meta"``, and takes the branches of a device with streams. No
    GPU is needed. Kernels of Triton cannot run.

    Yields:
        What was noted. A value that is read is noted, and torch then raises an error, because there is none.
    """
    with replace_streams(lambda device: CudaStreams(torch.device("cuda"))), HostWaits() as noted:
        yield noted


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _is_blocking_copy(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether values travel between the host and a device while the host waits."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    if given.get("non_blocking"):
        return False
    source = given["src"] if "src" in given else given["self"]
    target = given["self"].device if "src" in given else torch.device(given.get("device") or source.device)
    return bool(source.numel()) and (source.device.type == "cpu") != (target.type == "cpu")


def _innermost() -> str:
    ours, torchs = Path(__file__), Path(torch.__file__).parent
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path != ours and not path.is_relative_to(torchs):
            return f"{frame.filename}:{frame.lineno}"
    return "unknown"
