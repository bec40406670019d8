"""Parameters in state dicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from thinwire.sharding.tensors.arguments import changed_tensors, replaced, tensors_among
from thinwire.sharding.tensors.tensor import ShareTensor
from thinwire.sharding.tensors.views import PlainCopies, with_views

_ALIASES: Final = (torch.Tensor.detach, torch.Tensor.data.__get__)  # type: ignore[attr-defined]
"""Functions whose result is another name of the same values."""

_OF_THE_ENTRY: Final = frozenset(("detach_", "requires_grad_", "share_memory_"))
"""Names of functions that change no values."""


class StateEntry(PlainCopies):
    """A parameter that every rank holds whole, as a state dict shows it. Its memory is a copy, which any program can
    read and save. As in torch, what is written to it is written to the parameter, as averages of other libraries do.

    Attributes:
        share: The parameter.
    """

    share: ShareTensor

    @classmethod
    def of(cls, share: ShareTensor) -> StateEntry:
        """Show a parameter of which every rank holds all."""
        return cls._showing(share, share.full_tensor())

    @classmethod
    def _showing(cls, share: ShareTensor, values: torch.Tensor) -> StateEntry:
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
                return cls._showing(args[0].share, result)
            entries = [one for one in tensors_among((args, kwargs)) if isinstance(one, cls)]
            return with_views(result, [(entry.share, entry) for entry in entries])
