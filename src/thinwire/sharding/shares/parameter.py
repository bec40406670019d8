"""A model's parameter as a rank holds it, outside of forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch.utils.hooks import RemovableHandle

from thinwire.errors import UsageError
from thinwire.sharding.shares.spec import Live, ShareSpec
from thinwire.sharding.shares.tensor import ShareTensor

__all__ = ["LiveParameter", "ShardedParameter"]

_TORCHS_REQUIRES_GRAD: Any = torch.Tensor.requires_grad

GradientHook = Callable[[torch.Tensor], torch.Tensor | None]


class LiveParameter(Live, Protocol):
    """What stands behind a parameter of a sharded model.

    Attributes:
        compute_tensor: what its module computes with inside passes.
    """

    compute_tensor: torch.nn.Parameter

    def gradient(self) -> ShareTensor | None:
        """The gradient, or none."""

    def set_gradient(self, value: torch.Tensor | None) -> None:
        """Replace the gradient, or drop it."""

    def train(self, *, wanted: bool) -> None:
        """Have gradients computed, or not."""

    def hook_gradient(self, hook: GradientHook) -> RemovableHandle:
        """Call a hook with this rank's gradient, before ranks combine theirs."""

    def hook_accumulation(self, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
        """Call a hook after a step's last backward, when ranks have combined the gradient."""


class ShardedParameter(ShareTensor):
    """This rank's share of one parameter of a sharded model; ``isinstance(p, nn.Parameter)`` holds.

    ``p.grad`` is the share of the gradient that all ranks have combined: there after the backward of a step's last
    micro-batch, read when it is asked for, ``None`` if no rank used the parameter. Writing to ``p`` (``copy_``,
    ``p.data = ...``, an optimizer's update) reaches the other ranks before the next forward.

    Args:
        piece: fp32 elements that this rank owns, 1-D; of a frozen parameter, those that it holds, in compute dtype.
        spec: which piece it is.
        live: the runtime behind it.
        requires_grad: as in torch.
    """

    live: LiveParameter

    @staticmethod
    def __new__(
        cls: type[ShardedParameter],
        piece: torch.Tensor,
        spec: ShareSpec,
        live: LiveParameter,
        *,
        requires_grad: bool,
    ) -> ShardedParameter:
        made = cast(ShardedParameter, ShareTensor.__new__(cls, piece, spec, live=live, requires_grad=requires_grad))
        made._is_param = True  # as in nn.Parameter's own subclasses of Tensor
        return made

    @property
    def grad(self) -> ShareTensor | None:
        """The share of the combined gradient."""
        return self.live.gradient()

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self.live.set_gradient(value)

    @grad.deleter
    def grad(self) -> None:
        self.live.set_gradient(None)

    @property
    def data(self) -> ShareTensor:
        """The same piece, without autograd."""
        return ShareTensor(self.piece, self.spec, live=self.live)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if tuple(value.shape) != tuple(self.spec.shape) or value.dtype != self.dtype or value.device != self.device:
            raise UsageError(
                f"{self.spec.name}.data = a tensor of shape {tuple(value.shape)}, {value.dtype}, on {value.device}: "
                f"the shape {tuple(self.spec.shape)}, {self.dtype} and {self.device} are fixed once the model is "
                "sharded. Convert the model before thinwire.shard; the plan's compute_dtype says what forward and "
                "backward use"
            )
        if isinstance(value, ShareTensor) and self._is_same_memory(value):
            return  # itself, as module.to(...) assigns what has the right type already
        with torch.no_grad():
            self.copy_(value)

    def _is_same_memory(self, other: ShareTensor) -> bool:
        """The same answer on every rank, those whose piece is empty and has no address included: a write is announced
        to the others, which have to expect it."""
        mine, theirs = self.piece, other.piece
        return (
            other.spec.name == self.spec.name
            and mine.untyped_storage()._cdata == theirs.untyped_storage()._cdata
            and mine.storage_offset() == theirs.storage_offset()
        )

    @property
    def requires_grad(self) -> bool:
        """Whether gradients are computed."""
        with torch._C.DisableTorchFunctionSubclass():
            return cast(bool, _TORCHS_REQUIRES_GRAD.__get__(self))

    @requires_grad.setter
    def requires_grad(self, wanted: bool) -> None:
        self.requires_grad_(wanted)

    def requires_grad_(self, mode: bool = True) -> ShardedParameter:
        """Freeze the parameter, or train it again. One that was frozen when the model was sharded stays frozen."""
        self.live.train(wanted=mode)
        with torch._C.DisableTorchFunctionSubclass():
            _TORCHS_REQUIRES_GRAD.__set__(self, mode)
        return self

    def register_hook(self, hook: GradientHook) -> RemovableHandle:
        """Call ``hook`` with this rank's gradient of the whole parameter, as torch does, before ranks combine "
        "theirs."""
        return self.live.hook_gradient(hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
        """Call ``hook`` with the parameter when ranks have combined the gradient of a step's last backward."""
        return self.live.hook_accumulation(hook)
