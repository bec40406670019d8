"""What optimizers over shares refuse, since torch's own would answer for one rank's share only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

from thinwire.errors import UsageError


class ShareOptimizer(torch.optim.Optimizer):
    """An optimizer of which this rank has a share. Subclasses take over the groups of others, and call no constructor
    of torch, which would copy them."""

    def state_dict(self) -> dict[str, Any]:
        """Refuse to make a state dict, which would hold only this rank's share."""
        raise UsageError(
            "optimizer.state_dict() would hold one rank's share only: use thinwire.save(model, optim, path), or "
            "model.save(optim, path) after thinwire.parallelize"
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse to load a state dict; see :meth:`state_dict`."""
        raise UsageError(
            "optimizer.load_state_dict() does not support shares: use thinwire.load(model, optim, path), or "
            "model.load(optim, path) after thinwire.parallelize"
        )

    def _refuse_hook(self, hook: Callable[..., Any], prepend: bool = False) -> NoReturn:
        """Refuse hooks of state dicts."""
        raise UsageError(
            "hooks of an optimizer's state dict: shares are saved without one; save further values with "
            "thinwire.save(model, optim, path, extra=...)"
        )

    register_state_dict_pre_hook = register_state_dict_post_hook = _refuse_hook
    register_load_state_dict_pre_hook = register_load_state_dict_post_hook = _refuse_hook

    def __getstate__(self) -> NoReturn:
        """Refuse to be copied or pickled: the copy would update no model."""
        raise UsageError(
            f"{type(self).__name__} updates one model and cannot be copied or pickled: copy the model, and make an "
            "optimizer of the copy; save both with thinwire.save(model, optim, path)"
        )
