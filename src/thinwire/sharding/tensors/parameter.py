"""The share tensor that represents a parameter outside of forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch.utils.hooks import RemovableHandle

from thinwire.sharding.tensors.spec import Live, ShareSpec
from thinwire.sharding.tensors.tensor import ShareTensor

_TORCHS_REQUIRES_GRAD: Any = torch.Tensor.requires_grad

GradientHook = Callable[[torch.Tensor], torch.Tensor | None]


class LiveParameter(Live, Protocol):
    """The runtime behind a parameter of a sharded model.

    Attributes:
        compute_tensor: Tensor that the parameter's module computes with inside passes.
    """

    compute_tensor: torch.nn.Parameter

    def gradient(self) -> ShareTensor | None:
        """The gradient, or ``None``."""

    def set_gradient(self, value: torch.Tensor | None) -> None:
        """Replace the gradient, or drop it if ``value`` is ``None``."""

    def train(self, *, wanted: bool) -> None:
        """Set whether gradients are computed."""

    def hook_gradient(self, hook: GradientHook) -> RemovableHandle:
        """Call a hook with this rank's gradient, before ranks combine their gradients."""

    def hook_accumulation(self, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
        """Call a hook after a step's last backward, when ranks have combined the gradient."""


class ShardedParameter(ShareTensor):
    """This rank's share of one parameter of a sharded model; ``isinstance(p, nn.Parameter)`` holds.

    ``p.grad`` is this rank's share of the combined gradient. It is available after the backward of a step's last
    micro-batch, and ``None`` if no rank used the parameter. A write to ``p`` (``copy_``, ``p.data = ...``, an
    optimizer's update) reaches the other ranks before the next forward.

    The piece has the elements that this rank owns, 1-D, fp32; for a frozen parameter, those that it holds, in compute
    dtype.
    """

    @staticmethod
    def __new__(
        cls: type[ShardedParameter],
        piece: torch.Tensor | Callable[[], torch.Tensor],
        spec: ShareSpec,
        live: LiveParameter,
        *,
        requires_grad: bool,
        like: torch.Tensor | None = None,
    ) -> ShardedParameter:
        share = cast(
            ShardedParameter, ShareTensor.__new__(cls, piece, spec, like=like, live=live, requires_grad=requires_grad)
        )
        share._is_param = True  # as in nn.Parameter's own subclasses of Tensor
        return share

    @property
    def grad(self) -> ShareTensor | None:
        """This rank's share of the combined gradient, or ``None``."""
        return self.live.gradient()

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self.live.set_gradient(value)

    @grad.deleter
    def grad(self) -> None:
        self.live.set_gradient(None)

    @property
    def live(self) -> LiveParameter:
        """The runtime."""
        return cast(LiveParameter, self.memory.live)

    @property
    def requires_grad(self) -> bool:
        """Whether gradients are computed."""
        with torch._C.DisableTorchFunctionSubclass():
            return cast(bool, _TORCHS_REQUIRES_GRAD.__get__(self))

    @requires_grad.setter
    def requires_grad(self, wanted: bool) -> None:
        self.requires_grad_(wanted)

    def requires_grad_(self, mode: bool = True) -> ShardedParameter:
        """Freeze the parameter, or train it. Collective if it was frozen when the model was sharded, and is trained for
        the first time."""
        self.live.train(wanted=mode)
        with torch._C.DisableTorchFunctionSubclass():
            _TORCHS_REQUIRES_GRAD.__set__(self, mode)
        return self

    def register_hook(self, hook: GradientHook) -> RemovableHandle:
        """Call ``hook`` with this rank's gradient of the whole parameter, before ranks combine their gradients. As in
        torch, it is the sum of all uses, those outside of the forward included."""
        return self.live.hook_gradient(hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
        """Call ``hook`` with the parameter after a step's last backward, when ranks have combined the gradient."""
        return self.live.hook_accumulation(hook)
