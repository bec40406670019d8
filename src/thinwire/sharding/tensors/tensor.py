"""A tensor that is cut among ranks and stores one rank's piece.

[Note: share tensors]

After :func:`thinwire.shard`, ``model.parameters()`` returns a :class:`ShareTensor` for each parameter. It has the shape
of the whole parameter, but stores only the elements with masters (fp32 values) that this rank owns: one contiguous
piece of the flattened parameter, which may be empty or the whole parameter. Gradients (``parameter.grad``) and
optimizer states (``torch.zeros_like(parameter)``) are share tensors too.

There are three kinds of operations:

1. *Element by element* (``add_``, ``sqrt``, ``lerp_``, ``copy_``, torch's foreach and fused optimizers): the operation
   acts on the piece, without communication. Plain tensors among the arguments are cut to the same piece.
2. *Reductions over the whole tensor* (``sum``, ``norm``, ``max``, ``all``): each rank reduces its piece, and the ranks
   combine the results. Every rank must call the operation.
3. *Everything else* (``matmul``, slicing, ``view(-1)``) needs the whole tensor. Ranks gather it, and the operation runs
   on a plain tensor. Every rank must call the operation. Slices and other views are :class:`ShareView`.

``__torch_dispatch__`` handles the first two kinds and raises :class:`NeedsWhole` for the third.
``__torch_function__``, which sees a function before autograd decomposes it, then gathers and calls the function again.

DTensor does not fit, because its placements cut along dimensions. A piece may begin and end inside a row, its size may
differ from rank to rank, and a single rank may own a whole tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast

import torch

from thinwire.errors import UsageError
from thinwire.sharding.tensors.arguments import changed_tensors, receives, replaced, tensors_among
from thinwire.sharding.tensors.operations import perform
from thinwire.sharding.tensors.spec import Live, Memory, NeedsWhole, ShareSpec
from thinwire.sharding.tensors.views import ShareView, with_views

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


_WALKS: Final = frozenset((torch.autograd.grad, torch.autograd.backward))
"""Functions that walk along a graph."""

_UPDATES: Final = frozenset(
    f"{kind}{name}_"
    for kind in ("", "_foreach_")
    for name in ("add", "addcdiv", "addcmul", "copy", "div", "divide", "lerp", "mul", "multiply", "sub", "subtract")
)
"""Names of functions with which loops let one tensor follow another, as a mean over steps does."""

_OF_ONE_DTYPE: Final = frozenset(("lerp", "lerp_", "_foreach_lerp", "_foreach_lerp_"))
"""Names of functions that torch refuses for two dtypes, as of a parameter with a master and of one without."""

_Wholes = dict[int, tuple["ShareTensor", torch.Tensor]]
"""Share tensors and whole plain tensors that stand for them, by ``id`` of the share tensor."""


class ShareTensor(torch.Tensor):
    """One rank's piece of a tensor of ``spec.shape``; see the note above.

    Args:
        piece: The piece: contiguous, 1-D, ``[spec.length]``; or a function that returns it, called at every access.
        spec: Position of the piece in the tensor.
        like: Tensor with the dtype and the device of the piece; required if ``piece`` is a function.
        live: Runtime to notify of changes; ``None`` if the piece is not the runtime's memory.
        requires_grad: As in torch.
    """

    spec: ShareSpec
    memory: Memory

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
        share: ShareTensor = torch.Tensor._make_wrapper_subclass(
            cls, spec.shape, dtype=options.dtype, device=options.device, requires_grad=requires_grad
        )
        share.memory, share.spec = Memory(piece, live), spec
        return share

    # -- public interface --------------------------------------------------------------------------------------

    @property
    def piece(self) -> torch.Tensor:
        """This rank's elements: contiguous, 1-D, ``[spec.length]``."""
        return self.memory.piece

    @property
    def live(self) -> Live | None:
        """Runtime to notify of changes; ``None`` if the piece is not the runtime's memory."""
        return self.memory.live

    def alias(self) -> ShareTensor:
        """Another share tensor over the same memory, without autograd."""
        alias = ShareTensor(self.memory.held, self.spec, like=self)
        alias.memory = self.memory
        return alias

    @property
    def data(self) -> ShareTensor:
        """The same piece, without autograd."""
        return self.alias()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Move to other memory. As in torch, aliases stay with what the tensor has had, and share tensors with the same
        cut share memory from now on, unless both have the runtime's."""
        if isinstance(value, ShareTensor) and value.memory is self.memory:
            return  # module.to(...) assigns a tensor to itself if it already has the right type
        if self.live is not None and self.live.is_own(self):
            dtype = self.dtype
            self._part_with_aliases()
            _before_update([self], [value] if value.dtype == dtype else ())
            is_older = isinstance(value, ShareTensor) and value.spec.is_before(self.spec)
            self._check_like_this(value, (self.dtype, dtype, value.dtype if is_older else dtype))
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                self.copy_(value)
            self.lend_to(value)
            return
        self._check_like_this(value, (self.dtype,))
        source = value if isinstance(value, ShareTensor) else cast(ShareTensor, torch.empty_like(self).copy_(value))
        self.memory, self.spec = source.memory, source.spec

    def _part_with_aliases(self) -> None:
        """Let aliases keep the present values, because this tensor, whose memory is the runtime's, gets others."""
        memory = weakref.ref(self.memory)
        self.memory = Memory(self.memory.held, self.memory.live)
        if (held := memory()) is not None:
            held.part()

    def lend_to(self, other: torch.Tensor) -> None:
        """Share the runtime's memory, which has got ``other``'s values, with it and its aliases, as torch would share
        theirs. What is in the runtime's memory already stays where it is."""
        if not isinstance(other, ShareTensor) or other.live is not None:
            return
        if other.dtype == self.dtype and other.spec.same_cut(self.spec):
            other.memory.held, other.memory.live = self.memory.held, self.memory.live
            self.memory = other.memory

    def _check_like_this(self, value: torch.Tensor, dtypes: Sequence[torch.dtype]) -> None:
        if tuple(value.shape) != tuple(self.shape) or value.dtype not in dtypes or value.device != self.device:
            model = "the model before thinwire.shard; the plan's compute_dtype says what forward and backward use"
            raise UsageError(
                f"{self.spec.name}.data = a tensor of shape {tuple(value.shape)}, {value.dtype}, on {value.device}: "
                f"the shape {tuple(self.shape)}, {self.dtype} and {self.device} are fixed once the model is "
                f"sharded. Convert {model if getattr(self, '_is_param', False) else 'what is assigned'}"
            )

    def to_local(self) -> torch.Tensor:
        """This rank's elements, which share memory with the tensor; 1-D, or in the whole shape if this rank holds the
        whole tensor."""
        piece = self.piece.detach()
        return piece.view(self.spec.shape) if self.spec.length == self.spec.shape.numel() else piece

    def full_tensor(self) -> torch.Tensor:
        """Gather the whole tensor into a new plain tensor on every rank. Collective: every rank must call it."""
        if torch.is_grad_enabled() and self.requires_grad:
            whole: torch.Tensor = _Whole.apply(self)
            return whole
        return self._gathered()

    def tolist(self) -> Any:
        """Return the values of the whole tensor as nested lists. Collective."""
        return self._gathered().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the whole tensor as a new array. As in torch, a tensor that requires gradients needs ``force``.
        Collective."""
        whole = self._gathered()
        return whole.requires_grad_(self.requires_grad).numpy(force=force)

    def _gathered(self) -> torch.Tensor:
        if self.spec.pieces == 1:
            return self.piece.detach().clone().view(self.spec.shape)
        return self.spec.holders.gather(self.spec.name, self.piece.detach()).view(self.spec.shape)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Describe the parameter, its whole shape, and this rank's piece. Values would need communication."""
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
        if ShareView in types and any(isinstance(one, ShareView) for one in changed_tensors(func, args, kwargs)):
            return NotImplemented  # it writes to its own share tensor
        if func in _WALKS:
            # Autograd graphs contain the tensors that modules compute with. As in DDP, the result of autograd.grad is
            # not combined.
            args, kwargs = replaced(ShareTensor, _computed, (args, kwargs))
            if any(isinstance(one, ShareTensor) for one in tensors_among((args, kwargs))):
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)  # leaves that programs have made
            return func(*args, **kwargs)
        if func is torch.Tensor.detach and torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # torch has no such detach() for subclasses; state_dict() calls it
                return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if "out" in kwargs:
            _before_update(tensors_among(kwargs["out"]))
        elif name in _UPDATES and args:
            _before_update(tensors_among(args[0]), tensors_among((args[1:], kwargs)) if name.endswith("copy_") else ())
        if name in _OF_ONE_DTYPE and len(args) > 1:
            args = (*_alike(args[0], args[1], in_place=name.endswith("_")), *args[2:])
        try:
            if _mixes_with_plain(args, kwargs):
                raise NeedsWhole
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
                if torch.is_grad_enabled() and _misses_hooks(func, result, args, kwargs):
                    raise NeedsWhole
                return result
        except NeedsWhole:
            pass
        written = [tensor for tensor in changed_tensors(func, args, kwargs) if isinstance(tensor, ShareTensor)]
        if written:
            return _write_whole(func, written, args, kwargs)
        wholes: _Wholes = {}
        args, kwargs = _with_wholes(args, kwargs, wholes)
        return with_views(func(*args, **kwargs), wholes.values())

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

    # -- torch.distributed.checkpoint, whose callers have paid for its import ----------------------------------

    def __create_write_items__(self, fqn: str, _object: Any) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.piece)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.spec.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

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
    """Gathers a tensor. Its gradient is this rank's piece of the mean of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, share: ShareTensor) -> torch.Tensor:
        ctx.spec = share.spec
        with torch.no_grad():
            return cast(ShareTensor, share.detach())._gathered()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        spec: ShareSpec = ctx.spec
        return ShareTensor(spec.cut(spec.holders.mean(grad)).clone(), spec)


def _before_update(targets: Sequence[torch.Tensor], copied: Sequence[torch.Tensor] = ()) -> None:
    """Let share tensors keep small changes. A copy of a parameter makes none; a copy of other values may load them."""
    if any(isinstance(one, ShareTensor) and one.live is not None for one in copied):
        return
    for share in targets:
        if isinstance(share, ShareTensor) and share.live is not None:
            wide = share.live.before_update(share, loads=any(not isinstance(one, ShareTensor) for one in copied))
            if wide is not None:
                with torch._C.DisableTorchFunctionSubclass():
                    torch.utils.swap_tensors(share, wide)


def _alike(start: Any, end: Any, *, in_place: bool) -> tuple[Any, Any]:
    """Tensors, or lists of them, in pairs of one dtype: the wider one, or in place that of ``start``."""
    if isinstance(start, torch.Tensor) and isinstance(end, torch.Tensor):
        dtype = start.dtype if in_place else torch.promote_types(start.dtype, end.dtype)
        return start.to(dtype), end.to(dtype)
    if isinstance(start, list | tuple) and isinstance(end, list | tuple) and len(start) == len(end) > 0:
        starts, ends = zip(*(_alike(*pair, in_place=in_place) for pair in zip(start, end, strict=True)), strict=True)
        return starts, ends
    return start, end


def _write_whole(func: Callable[..., Any], written: Sequence[ShareTensor], args: Any, kwargs: Any) -> Any:
    """Call a function that changes whole tensors on gathered copies, and copy this rank's pieces back."""
    recorded = torch.is_grad_enabled() and not receives(func)
    if recorded and any(share.requires_grad and share.is_leaf for share in written):
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
    with torch.no_grad():
        wholes: _Wholes = {id(share): (share, share.full_tensor()) for share in written}
        copies = list(wholes.values())
        args, kwargs = _with_wholes(args, kwargs, wholes)
        result = func(*args, **kwargs)
        if receives(func) and result is not None:
            result.wait()  # the work of async_op=True, which fills the copies
        for share, copy in copies:
            share.copy_(copy)
    return next((share for share, copy in copies if copy is result), result)


def _computed(share: ShareTensor) -> torch.Tensor:
    """The tensor that modules compute with, if the share is a parameter."""
    return getattr(share.live, "compute_tensor", share) if share.live and share.live.is_own(share) else share


def _with_wholes(args: Any, kwargs: Any, wholes: _Wholes) -> tuple[Any, Any]:
    """The arguments of a call, with share tensors replaced by plain tensors: those of ``wholes``, to which others are
    added."""
    dtypes = {
        t.dtype for t in tensors_among((args, kwargs)) if not isinstance(t, ShareTensor) and t.is_floating_point()
    }

    def whole(share: ShareTensor) -> torch.Tensor:
        if id(share) not in wholes:
            compute: Callable[..., torch.Tensor] | None = getattr(share.live, "compute", None)
            wholes[id(share)] = share, share.full_tensor() if compute is None else compute(share, dtypes)
        return wholes[id(share)][1]

    plain: tuple[Any, Any] = replaced(ShareTensor, whole, (args, kwargs))
    return plain


def _misses_hooks(func: Callable[..., Any], result: Any, args: Any, kwargs: Any) -> bool:
    """Whether autograd has recorded an operation on the share of a parameter whose gradient has hooks, which would not
    see this part of it: they are those of the tensor that modules compute with. An operation in place cannot be done
    again; the parameter refuses its gradient."""
    shares = [one for one in tensors_among((args, kwargs)) if isinstance(one, ShareTensor)]
    if not any(_computed(one) is not one and _computed(one)._backward_hooks for one in shares):
        return False
    return not changed_tensors(func, args, kwargs) and any(one.grad_fn is not None for one in tensors_among(result))


def _mixes_with_plain(args: Any, kwargs: Any) -> bool:
    """Whether autograd would record an operation on a share tensor and a plain tensor. Plain tensors may differ between
    ranks, so the gradient must be averaged over ranks, which requires the gathered parameter."""
    if not torch.is_grad_enabled():
        return False
    tensors = tensors_among((args, kwargs))
    shares = [tensor for tensor in tensors if isinstance(tensor, ShareTensor)]
    return len(shares) < len(tensors) and any(share.requires_grad for share in shares)
