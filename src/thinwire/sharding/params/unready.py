"""Parameters that are not ready: whatever computes with one gets its values, wherever the parameter comes from.

A module's attribute makes a unit ready before it returns a parameter (:mod:`thinwire.sharding.hooks.parameter_hooks`).
Parameters are also listed, which waits for nothing, and kept. While its unit is freed, or new values are on their way,
a parameter has the class :class:`UnreadyParameter`. Shape, dtype and settings can be read. Any other function of torch
makes the unit ready first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import nn

from thinwire.sharding.modules.quantized import is_packed
from thinwire.sharding.tensors.arguments import replaced

_READ: Final = (
    "_backward_hooks", "_base", "_version", "device", "dtype", "grad", "grad_fn", "is_cpu", "is_cuda", "is_leaf",
    "is_meta", "is_mkldnn", "is_mps", "is_mtia", "is_nested", "is_quantized", "is_sparse", "is_sparse_csr",
    "is_vulkan", "is_xla", "is_xpu", "itemsize", "layout", "name", "names", "nbytes", "ndim", "output_nr",
    "requires_grad", "retains_grad", "shape",
)  # fmt: skip
_CALLED: Final = (
    "__hash__", "__len__", "data_ptr", "dim", "element_size", "get_device", "has_names", "is_complex", "is_contiguous",
    "is_floating_point", "is_inference", "is_same_size", "is_signed", "ndimension", "nelement", "numel",
    "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad", "size", "storage_offset",
    "stride", "untyped_storage",
)  # fmt: skip


def _settings() -> frozenset[Any]:
    """The functions of torch that do not compute with values: settings, and the walk along a graph."""
    found = {getattr(torch.Tensor, name) for name in _CALLED if hasattr(torch.Tensor, name)}
    found |= {torch.is_floating_point, torch.is_complex, torch.numel}
    found |= {torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward}
    for attribute in (getattr(torch.Tensor, name) for name in _READ if hasattr(torch.Tensor, name)):
        found.add(attribute.__get__)
    for name in ("grad", "requires_grad", "_backward_hooks"):
        found |= {getattr(torch.Tensor, name).__set__, getattr(torch.Tensor, name).__delete__}
    return frozenset(found)


_SETTINGS: Final = _settings()


class UnreadyParameter(nn.Parameter):
    """A parameter while its unit is not ready.

    Attributes:
        whole: Returns what stands for it in a computation: itself, once it is ready, or its share.
    """

    whole: Callable[[], torch.Tensor]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if func not in _SETTINGS:
            args, kwargs = replaced(UnreadyParameter, lambda one: one.whole(), (args, kwargs or {}))
            if not any(isinstance(value, UnreadyParameter) for value in args):
                return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Describe the parameter. Values would need communication."""
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"Parameter({tuple(self.shape)}, {self.dtype}, not ready{grad})"


def is_plain(parameter: torch.Tensor) -> bool:
    """Whether a parameter is one of torch's own class, ready or not, or of a subclass that only marks it, unlike
    DTensor."""
    kind = type(parameter)
    if kind in (nn.Parameter, UnreadyParameter):
        return True
    return kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__ and not is_packed(parameter)
