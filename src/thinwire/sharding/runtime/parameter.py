"""The share tensor that represents a parameter outside of forward and backward, and what stands behind it: its masters,
its gradient, its compute tensor."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from thinwire.errors import UsageError
from thinwire.sharding.params.flat_buffer import FlatBuffer
from thinwire.sharding.params.param_group import Unit
from thinwire.sharding.params.stored_shard import StoredPiece
from thinwire.sharding.runtime.share_values import Masters, ShareGradients, TrainedParameter
from thinwire.sharding.tensors.spec import Live, ShareSpec
from thinwire.sharding.tensors.tensor import ShareTensor

_TORCHS_GRAD: Any = torch.Tensor.grad
"""torch's own ``grad`` of a share, which autograd fills in the backward of operations on shares."""

_TORCHS_REQUIRES_GRAD: Any = torch.Tensor.requires_grad

GradientHook = Callable[[torch.Tensor], torch.Tensor | None]

_LOADS = 2
"""Copies of plain values to a frozen parameter that may be loads: at the beginning, and of the best weights in the end.
Further ones are results of updates."""


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
        live: ModelParameter,
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
    def live(self) -> ModelParameter:
        """The runtime."""
        return cast(ModelParameter, self.memory.live)

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
        handle: RemovableHandle = self.live.compute_tensor.register_hook(hook)
        return handle

    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
        """Call ``hook`` with the parameter after a step's last backward, when ranks have combined the gradient."""
        handle = RemovableHandle(self.live.hooks)
        self.live.hooks[handle.id] = hook
        return handle


class ModelParameter(Live):
    """Connects the share of one parameter to the runtime.

    Attributes:
        compute_tensor: Tensor that the parameter's module computes with inside passes.
        hooks: What waits for the combined gradient.
    """

    share: ShardedParameter
    stored: StoredPiece | None = None
    """Its values, if they are kept encoded."""
    frozen_in: FlatBuffer | None = None
    """Its flat buffer, if it was frozen when the model was sharded."""
    trained: TrainedParameter | None
    """Its place in the runtime; ``None`` if it is frozen."""

    def __init__(
        self,
        masters: Masters,
        gradients: ShareGradients,
        unit: Unit,
        compute: nn.Parameter,
        trained: TrainedParameter | None,
    ) -> None:
        self.masters, self.gradients = masters, gradients
        self.unit, self.compute_tensor, self.trained = unit, compute, trained
        self.hooks: OrderedDict[int, Callable[[torch.Tensor], None]] = OrderedDict()
        self.held_gradient: ShareTensor | None = None
        self._loads = 0

    # -- the values --------------------------------------------------------------------------------------------

    def is_own(self, share: ShareTensor) -> bool:
        return share is self.share

    def before_update(self, share: ShareTensor, *, loads: bool = False) -> ShareTensor | None:
        """Give a frozen parameter that is kept in a narrower dtype than it had a master: in bfloat16, 1 plus 0.3 % is
        1, and a mean over steps would stand still."""
        if self.frozen_in is not None and self.frozen_in.narrows:
            self._loads += loads
            if not loads or self._loads > _LOADS:
                self.masters.widen({share.spec.name})
        return self.share.data if share.dtype != self.share.dtype else None

    def before_write(self) -> None:
        self.masters.before_write()
        if self.stored is not None:
            self.stored.edit()

    def after_write(self) -> None:
        if self.stored is not None:
            self.stored.edit()
        self.masters.written(self.unit.index, self.compute_tensor)

    def overflowed(self) -> None:
        """Nothing depends on it."""

    def compute(self, share: ShareTensor, dtypes: set[torch.dtype]) -> torch.Tensor:
        """The whole parameter, for an operation that needs it. Collective.

        This is the module's compute tensor if gradients flow through the operation, or if the operation has plain
        floating-point tensors of the same dtype, out of ``dtypes``. Otherwise it is the exact values. The share is the
        parameter, or a detached alias of it.
        """
        follows = torch.is_grad_enabled() and share.requires_grad
        if follows and share is not self.share:
            return share.full_tensor()  # an alias that was made a leaf has a gradient of its own
        if not follows and (self.compute_tensor.dtype == share.dtype or self.compute_tensor.dtype not in dtypes):
            return share.full_tensor()
        value = self.compute_tensor if follows else self.compute_tensor.detach()
        with self.masters.reading(self.unit.index):
            # Gathered memory is freed even if the caller still has a view of it, so return a copy. Views of shares rely
            # on the order of its elements.
            return value.clone(memory_format=torch.contiguous_format) if self.unit.sharded else value.contiguous()

    # -- the gradient ------------------------------------------------------------------------------------------

    def gradient(self) -> ShareTensor | None:
        """The gradient, or ``None``."""
        if self.trained is None or not self.gradients.exists(self.trained):
            return None
        return self.held_gradient if self.held_gradient is not None else self._hold_gradient(self.trained)

    def _hold_gradient(self, trained: TrainedParameter) -> ShareTensor:
        values, live = trained.part.owned.memory[trained.owned], _LiveGradient(self)
        self.held_gradient = ShareTensor(self.gradient_piece, self.share.spec, like=values, live=live)
        self.gradients.parting.add(self._part_with_gradient)
        return self.held_gradient

    def gradient_piece(self) -> torch.Tensor:
        """Wait for the combined gradient and return this rank's share of it, 1-D.

        Raises:
            UsageError: The backward of the step's last micro-batch has not run.
        """
        assert self.trained is not None
        return self.gradients.piece(self.trained, self.share.spec.name)

    def _part_with_gradient(self) -> None:
        """Let the gradient, which is about to be dropped, keep its values if somebody still holds it."""
        if self.held_gradient is None:
            return
        memory = weakref.ref(self.held_gradient.memory)
        self.held_gradient = None
        if (held := memory()) is None:
            return
        if self.trained is not None and self.trained.part.unsynced:
            held.held, held.live = partial(_refuse_dropped, self.share.spec.name), None
        else:
            held.part()

    def set_gradient(self, value: torch.Tensor | None) -> None:
        """Replace the gradient, or drop it if ``value`` is ``None``."""
        trained = self.trained
        if trained is None:
            if value is not None:
                raise UsageError(
                    f"{self.share.spec.name} was frozen when the model was sharded and takes no gradient: set its "
                    "requires_grad = True first"
                )
            return
        if value is None:
            self._part_with_gradient()
            if not self.gradients.is_absent(trained):
                self.gradients.forget(trained)
            return
        if tuple(value.shape) != tuple(self.share.spec.shape):
            raise UsageError(
                f"{self.share.spec.name}.grad = a tensor of shape {tuple(value.shape)}; the parameter's is "
                f"{tuple(self.share.spec.shape)}"
            )
        if trained.part.unsynced:
            raise UsageError(f"{self.share.spec.name}.grad is set before the step's last backward")
        with torch.no_grad():
            if self.held_gradient is None or value is not self.held_gradient:
                if isinstance(value, ShareTensor) and not value.spec.same_cut(self.share.spec):
                    value = value.full_tensor()
                piece = value.piece if isinstance(value, ShareTensor) else self.share.spec.cut(value)
                self._part_with_gradient()
                self.gradients.replace(trained, piece)
                self._hold_gradient(trained).lend_to(value)
        self.gradients.note_set(trained)

    def accumulated(self, share: torch.Tensor) -> None:
        """Move the gradient of an operation on shares from torch's own ``.grad`` to the runtime."""
        assert self.trained is not None
        with torch._C.DisableTorchFunctionSubclass():
            grad = _TORCHS_GRAD.__get__(share)
            _TORCHS_GRAD.__set__(share, None)
        if self.compute_tensor._backward_hooks:
            raise UsageError(
                f"a hook on the gradient of {self.share.spec.name} misses a part of it, as a loss uses the parameter "
                "outside of the forward, in an operation in place or before the hook is set: set hooks before the "
                "loss is computed, and add to other tensors out of place"
            )
        spec = self.share.spec
        piece = grad.piece if isinstance(grad, ShareTensor) else spec.cut(spec.holders.mean(grad))
        self.gradients.add(self.trained, piece.detach().clone())

    def train(self, *, wanted: bool) -> None:
        """Set whether gradients are computed."""
        if self.trained is None:
            self.masters.want(self.share.spec.name, wanted=wanted)
        self.compute_tensor.requires_grad_(wanted)


class _LiveGradient(Live):
    """Connects a gradient of one parameter, and its aliases, to the runtime until the parameter drops the gradient. As
    in torch, whoever still holds it then keeps its values."""

    def __init__(self, parameter: ModelParameter) -> None:
        self._parameter = parameter

    def is_own(self, share: ShareTensor) -> bool:
        return share is self._parameter.held_gradient

    def before_write(self) -> None:
        self._parameter.gradient_piece()

    def after_write(self) -> None:
        self._parameter.gradients.changed()

    def overflowed(self) -> None:
        self._parameter.gradients.overflowed()

    def norms(self, order: float) -> torch.Tensor | None:
        return self._parameter.gradients.norms(order)[self._parameter.share.spec.name]


def _refuse_dropped(name: str) -> NoReturn:
    raise UsageError(
        f"a gradient of {name} is read that was dropped before the step's last backward: ranks had not combined it. "
        "Drop it after that backward"
    )
