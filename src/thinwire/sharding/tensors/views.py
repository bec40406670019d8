"""Views of share tensors: rows, slices and other shapes of them, which programs read and write.

An operation that needs the whole tensor runs on a gathered copy, so its result may be a view of that copy. A
:class:`ShareView` is such a result. It remembers the share tensor, because what is written to a view in torch is
written to the tensor, as ``weight[padding_idx].zero_()`` does. A :class:`StateEntry` is a parameter in a state dict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch

from thinwire.sharding.tensors.arguments import changed_tensors, receives, replaced, tensors_among
from thinwire.sharding.tensors.operations import first_generator

_OF_THE_VIEW: Final = frozenset(
    ("as_strided_", "detach_", "rename_", "requires_grad_", "resize_", "set_", "share_memory_", "squeeze_", "swapaxes_",
     "swapdims_", "t_", "transpose_", "unsqueeze_")
)  # fmt: skip
"""Names of functions that change a view and no values."""

_OF_THE_ENTRY: Final = frozenset(("detach_", "requires_grad_", "share_memory_"))
"""Names of functions that change no values of a parameter in a state dict."""

_ALIASES: Final = (torch.Tensor.detach, torch.Tensor.data.__get__)  # type: ignore[attr-defined]
"""Functions whose result is another name of the same values."""

_TupleIterator: Final[Any] = type(iter(()))


class PlainCopies(torch.Tensor):
    """A tensor that is copied and pickled as a plain one with its values."""

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied = memo[id(self)] = self._plain().clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def _plain(self) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)


class ShareView(PlainCopies):
    """Elements of a share tensor in the memory of a gathered copy, where they read as any tensor's. What is written to
    it is written to the share tensor; every rank must do so.

    Attributes:
        share: The share tensor.
        start: Where the copy begins in its storage.
    """

    share: Any
    start: int

    @property
    def key(self) -> int:
        """Says which tensor is written to: its aliases have the same memory."""
        return id(self.share.memory)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # a compiled function reads a plain tensor, and keeps what it writes
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if getattr(func, "__name__", "") not in _OF_THE_VIEW:
            changed = [one for one in changed_tensors(func, args, kwargs) if isinstance(one, cls)]
            if changed:
                return _write(func, changed, args, kwargs)
        if not {cls, torch.Tensor}.issuperset(types):
            return NotImplemented  # another class knows what to do, and takes views as plain tensors
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            origins = [one for one in tensors_among((args, kwargs)) if isinstance(one, cls)]
            return _shown(result, [(one.share, one, one.start) for one in origins])

    def __format__(self, spec: str) -> str:
        return format(self._plain(), spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self._plain())


class StateEntry(PlainCopies):
    """A parameter that every rank holds whole, as a state dict shows it. Its memory is a copy, which any program can
    read and save. As in torch, what is written to it is written to the parameter, as averages of other libraries do.

    Attributes:
        share: The parameter.
    """

    share: Any

    @classmethod
    def of(cls, share: Any, values: torch.Tensor) -> StateEntry:
        """Show the whole values of a parameter, of which every rank holds all."""
        entry = values.as_subclass(cls)
        entry.share = share
        return entry

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        changed = [one for one in changed_tensors(func, args, kwargs) if isinstance(one, cls)]
        if changed and getattr(func, "__name__", "") not in _OF_THE_ENTRY:
            ids = {id(entry) for entry in changed}
            args, kwargs = replaced(cls, lambda one: one.share if id(one) in ids else one._plain(), (args, kwargs))
            result = func(*args, **kwargs)
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                for entry in changed:
                    entry.copy_(entry.share.full_tensor())
            return next((entry for entry in changed if entry.share is result), result)
        if not {cls, torch.Tensor}.issuperset(types):
            args, kwargs = replaced(cls, cls._plain, (args, kwargs))
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            if func in _ALIASES:
                return cls.of(args[0].share, result)
            entries = [one for one in tensors_among((args, kwargs)) if isinstance(one, cls)]
            return with_views(result, [(entry.share, entry) for entry in entries])


def with_views(result: Any, wholes: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """The result of an operation on gathered share tensors. A view of a gathered one becomes a view of its share
    tensor."""
    return _shown(result, [(share, whole, int(whole.storage_offset())) for share, whole in wholes])


def _shown(result: Any, origins: Sequence[tuple[torch.Tensor, torch.Tensor, int]]) -> Any:
    if isinstance(result, torch.Tensor):
        for share, memory, start in origins:
            if type(result) is torch.Tensor and result.dtype == memory.dtype and _in_same_memory(result, memory):
                view = result.as_subclass(ShareView)
                view.share, view.start = share, start
                return view
        return result
    if type(result) in (tuple, list):
        shown = [_shown(item, origins) for item in result]
        return shown if type(result) is list else tuple(shown)
    return iter([_shown(item, origins) for item in result]) if isinstance(result, _TupleIterator) else result


def _in_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    try:
        return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return False  # a sparse tensor, or one of a transform of torch.func, has no storage


def _write(func: Callable[..., Any], changed: Sequence[ShareView], args: Any, kwargs: Any) -> Any:
    """Call a function that changes views on views of newly gathered tensors, whose other elements may have changed, and
    copy those to the share tensors."""
    requires_grad = any(view.requires_grad for view in changed)  # then torch refuses what autograd would record
    shares = {view.key: view.share for view in changed}
    wholes = {key: share.detach().full_tensor().detach() for key, share in shares.items()}
    for whole in wholes.values():
        whole.requires_grad_(requires_grad)
    targets = {id(view): _same_view(view, wholes[view.key]) for view in changed}
    args, kwargs = replaced(ShareView, lambda one: targets.get(id(one), one._plain()), (args, kwargs))
    first = changed[0].share
    with first_generator(first.spec, first.device, kwargs.get("generator")):
        result = func(*args, **kwargs)
    if receives(func) and result is not None:
        result.wait()  # the work of async_op=True, which fills the targets
    with torch.no_grad():
        for key, share in shares.items():
            share.copy_(wholes[key])
        for view in changed:  # uncounted: its memory may be the model's, whose updates the runtime counts
            view._plain().data.copy_(targets[id(view)])
    return next((view for view in changed if targets[id(view)] is result), result)


def _same_view(view: ShareView, whole: torch.Tensor) -> torch.Tensor:
    """The elements of ``whole`` that ``view`` shows of its share tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        return whole.as_strided(view.size(), view.stride(), view.storage_offset() - view.start)
