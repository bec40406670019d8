"""A tensor that is cut among ranks, as one rank holds it.

[Note: share tensors]

After :func:`thinwire.shard`, ``model.parameters()`` gives a :class:`ShareTensor` for each parameter. It has the shape
of the whole parameter and stores the elements whose fp32 values (masters) this rank owns: one contiguous piece of the
flattened parameter, which may be all of it or nothing. Gradients (``parameter.grad``) and what an optimizer makes of
them (``torch.zeros_like(parameter)``) are share tensors too.

Three rules say what an operation does:

1. *Element by element* (``add_``, ``sqrt``, ``lerp_``, ``copy_``, torch's foreach and fused optimizers): it acts on the
   piece. Nothing travels. Plain tensors that take part are cut to the same piece.
2. *Reductions over the whole tensor* (``sum``, ``norm``, ``max``, ``all``): each rank reduces its piece and the ranks
   combine the results. Every rank has to call it.
3. *Everything else* (``matmul``, slicing, ``view(-1)``) needs the whole tensor. Ranks gather it, and the operation runs
   on a plain tensor. Every rank has to call it.

``__torch_dispatch__`` knows the first two and raises :class:`NeedsWhole` for the rest; ``__torch_function__``, which
sees whole functions before autograd takes them apart, answers by gathering and calls the function again.

DTensor was not the right home for this: its placements cut along dimensions, while a piece here may begin and end
inside a row, differ in size from rank to rank, or leave whole tensors to single ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, cast

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from thinwire.errors import UsageError
from thinwire.sharding.shares.operations import perform
from thinwire.sharding.shares.spec import Live, NeedsWhole, ShareSpec

__all__ = ["ShareTensor"]


class ShareTensor(torch.Tensor):
    """One rank's piece of a tensor of ``spec.shape``; see the note above.

    Args:
        piece: contiguous, 1-D, ``[spec.length]``; or a function that returns it when it is first needed.
        spec: which piece it is.
        like: dtype and device, where ``piece`` is a function.
        live: what to tell of changes, where the piece is the runtime's memory.
        requires_grad: as in torch.
    """

    spec: ShareSpec
    live: Live | None
    _piece: torch.Tensor | Callable[[], torch.Tensor]

    @staticmethod
    def __new__(
        cls: type[ShareTensor],
        piece: torch.Tensor | Callable[[], torch.Tensor],
        spec: ShareSpec,
        *,
        like: torch.Tensor | None = None,
        live: Live | None = None,
        requires_grad: bool = False,
    ) -> ShareTensor:
        options = piece if isinstance(piece, torch.Tensor) else like
        assert options is not None
        made: ShareTensor = torch.Tensor._make_wrapper_subclass(
            cls, spec.shape, dtype=options.dtype, device=options.device, requires_grad=requires_grad
        )
        made._piece, made.spec, made.live = piece, spec, live
        return made

    # -- what one asks of it -----------------------------------------------------------------------------------

    @property
    def piece(self) -> torch.Tensor:
        """This rank's elements: contiguous, 1-D, ``[spec.length]``."""
        return self._piece() if callable(self._piece) and not isinstance(self._piece, torch.Tensor) else self._piece

    def to_local(self) -> torch.Tensor:
        """This rank's elements, 1-D; in the whole shape if it holds all of them. Shares memory with the tensor."""
        piece = self.piece.detach()
        return piece.view(self.spec.shape) if self.spec.length == self.spec.shape.numel() else piece

    def full_tensor(self) -> torch.Tensor:
        """The whole tensor on every rank, as a plain tensor of its own. Collective: every rank has to call it."""
        if torch.is_grad_enabled() and self.requires_grad:
            whole: torch.Tensor = _Whole.apply(self)
            return whole
        return self._gathered()

    def tolist(self) -> Any:
        """The whole tensor's values as nested lists. Collective."""
        return self._gathered().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The whole tensor as an array of its own; as in torch, of one that requires gradients only with ``force``.
        Collective."""
        whole = self._gathered()
        return whole.requires_grad_(self.requires_grad).numpy(force=force)

    def _gathered(self) -> torch.Tensor:
        if self.spec.pieces == 1:
            return self.piece.detach().clone().view(self.spec.shape)
        return self.spec.holders.gather(self.spec.name, self.piece.detach()).view(self.spec.shape)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """The parameter, its whole shape, and the piece that is here; no values, which would have to travel."""
        del tensor_contents
        spec, total = self.spec, self.spec.shape.numel()
        if spec.length == total:
            place = "whole"
        else:
            place = f"elements {spec.offset} to {spec.offset + spec.length} of {total}" if spec.length else "nothing"
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"{type(self).__name__}({spec.name!r}, {tuple(spec.shape)}, {self.dtype}, here: {place}{grad})"

    # -- torch's protocols -------------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.grad:
            # torch's own engine knows the tensors that modules compute with. What it returns is this rank's, as in DDP.
            return func(*_computed(args), **_computed(kwargs))
        try:
            if _mixes_with_plain(args, kwargs):
                raise NeedsWhole
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        except NeedsWhole:
            pass
        written = _written_shares(func, args, kwargs)
        if written:
            return _write_whole(func, written, args, kwargs)
        wholes = _WholeArguments(args, kwargs)
        return func(*wholes.args, **wholes.kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        return perform(ShareTensor, func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> ShareTensor:
        copied = ShareTensor(self.piece.detach().clone(), self.spec, requires_grad=self.requires_grad)
        if getattr(self, "_is_param", False):
            copied._is_param = True
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError(
            f"{self.spec.name} cannot be pickled, as torch.save and copies between processes do: it is one rank's "
            "piece of the parameter. Save with thinwire.save or torch.distributed.checkpoint, or take "
            "thinwire.full_state_dict(model) on every rank"
        )

    # -- torch.distributed.checkpoint --------------------------------------------------------------------------

    def __create_write_items__(self, fqn: str, _object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.piece)
        return [
            WriteItem(
                MetadataIndex(fqn, torch.Size(box.offsets)),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)),
                    properties,
                    self.spec.shape,
                ),
            )
            for box in self.spec.boxes
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in self.spec.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for box in self.spec.boxes:
            if index.offset is None or tuple(index.offset) == box.offsets:
                if self.live is not None:
                    self.live.before_write()
                    self.live.after_write()
                return self.piece.detach()[box.start : box.start + box.numel].view(box.sizes)
        raise ValueError(f"{index} is no chunk of {self!r}")


class _Whole(torch.autograd.Function):
    """Gathers a tensor; its gradient is the mean of the ranks' gradients, cut."""

    @staticmethod
    def forward(ctx: Any, share: ShareTensor) -> torch.Tensor:
        ctx.spec = share.spec
        with torch.no_grad():
            return cast(ShareTensor, share.detach())._gathered()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        spec: ShareSpec = ctx.spec
        return ShareTensor(spec.cut(spec.holders.mean(grad)).clone(), spec)


def _written_shares(func: Callable[..., Any], args: Any, kwargs: Any) -> list[ShareTensor]:
    """The share tensors that a function of torch's changes, by its name: ``x.add_``, ``x[i] = ...``, ``out=x``."""
    name = getattr(func, "__name__", "")
    in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    written = [*(_tensors(args[0]) if in_place and args else ()), *_tensors(kwargs.get("out"))]
    return [tensor for tensor in written if isinstance(tensor, ShareTensor)]


def _write_whole(func: Callable[..., Any], written: Sequence[ShareTensor], args: Any, kwargs: Any) -> Any:
    """Call a function that changes whole tensors: on copies that ranks have gathered, of which each keeps its piece."""
    if torch.is_grad_enabled() and any(share.requires_grad and share.is_leaf for share in written):
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
    with torch.no_grad():
        copies = {id(share): share.full_tensor() for share in written}
        wholes = _WholeArguments(args, kwargs, copies)
        result = func(*wholes.args, **wholes.kwargs)
        for share in written:
            share.copy_(copies[id(share)])
    by_copy = {id(copies[id(share)]): share for share in written}
    return by_copy.get(id(result), result)


def _computed(value: Any) -> Any:
    """Arguments with the tensors that modules compute with in place of parameters."""
    if isinstance(value, ShareTensor):
        return getattr(value.live, "compute_tensor", value)
    if isinstance(value, dict):
        return {key: _computed(item) for key, item in value.items()}
    return type(value)(map(_computed, value)) if isinstance(value, list | tuple) else value


class _WholeArguments:
    """The arguments of a call with plain tensors in place of share tensors.

    Args:
        args: of the call.
        kwargs: of the call.
        copies: plain tensors for some of them, by ``id``.
    """

    def __init__(self, args: Any, kwargs: Any, copies: Mapping[int, torch.Tensor] | None = None) -> None:
        self._copies = copies or {}
        dtypes = {t.dtype for t in _tensors((args, kwargs)) if not isinstance(t, ShareTensor) and t.is_floating_point()}
        self._dtypes = dtypes
        self.args = tuple(self._plain(arg) for arg in args)
        self.kwargs = {name: self._plain(value) for name, value in kwargs.items()}

    def _plain(self, value: Any) -> Any:
        if isinstance(value, ShareTensor):
            return self._whole(value)
        if isinstance(value, list | tuple) and any(isinstance(item, ShareTensor) for item in value):
            return type(value)(self._plain(item) for item in value)
        return value

    def _whole(self, share: ShareTensor) -> torch.Tensor:
        if id(share) in self._copies:
            return self._copies[id(share)]
        computes = getattr(share.live, "compute", None)
        if computes is not None:
            value: torch.Tensor = computes(share, self._dtypes)
            return value
        return share.full_tensor()


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    return []


def _mixes_with_plain(args: Any, kwargs: Any) -> bool:
    """Whether autograd would follow a share tensor into a plain one. Its gradient is a mean over ranks, whose plain
    tensors may differ: only the gathered parameter can take such a gradient."""
    if not torch.is_grad_enabled():
        return False
    tensors = _tensors((args, kwargs))
    shares = [tensor for tensor in tensors if isinstance(tensor, ShareTensor)]
    return len(shares) < len(tensors) and any(share.requires_grad for share in shares)
