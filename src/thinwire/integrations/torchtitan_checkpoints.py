"""torchtitan's checkpoints over thinwire: shares that load under any plan and on any number of ranks."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.checkpoint import DATALOADER, LR_SCHEDULER, MODEL, OPTIMIZER, TRAIN_STATE, CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.tools import filesystem
from torchtitan.tools.logging import logger

import thinwire as tw
from thinwire.agreement import NOTHING, Typed
from thinwire.checkpoint.manifest import MANIFEST_NAME
from thinwire.collectives.group import control
from thinwire.errors import CheckpointError, UsageError
from thinwire.integrations.common.typed_state import decoded, encoded

_POSITION: Final[Typed[Any]] = Typed(object)

_STATES: Final = (TRAIN_STATE, LR_SCHEDULER)
"""Parts of the trainer that are equal on every rank."""

_OF_WEIGHTS: Final = (".metadata", "model.safetensors.index.json")
"""Files of torchtitan's own checkpoints, one of which each has."""

_REMEDY: Final = "Look at state_dict() of your data loader"


class _WholeModel:
    """The weights of the whole model, for exports and for loading them. Collective."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Weights and buffers in fp32, on the CPU of every rank."""
        return tw.full_state_dict(self.model)

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        """Copy weights and buffers into the shares."""
        self.model.load_state_dict(state_dict)


class ShardedCheckpoints(CheckpointManager):
    """torchtitan's checkpoint manager, with checkpoints of shares that load under any plan and on any number of ranks.

    When to save, what to keep and what to load follow torchtitan's rules. Checkpoints of weights alone (the last one by
    default, and in Hugging Face's format on request) are those that torchtitan writes and reads itself.

    Args:
        config: Configuration of the manager.
        **parts: See torchtitan's manager.

    Raises:
        UsageError: The folder is remote, or saving is asynchronous.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """The manager's configuration."""

    def __init__(self, config: Config, **parts: Any) -> None:
        super().__init__(config, **parts)
        if not self.enable:
            return
        if filesystem.is_remote(self.folder):
            raise UsageError(f"checkpoint.folder = {config.folder!r}: checkpoints go to a local directory")
        if config.async_mode.lower() != "disabled":
            raise UsageError(f"checkpoint.async_mode = {config.async_mode!r}: shares are saved at once; use 'disabled'")
        self.states[MODEL] = _WholeModel(parts["model_parts"][0])

    def dcp_save(self, state_dict: dict[str, Any], checkpoint_id: str, *rest: Any, **options: Any) -> Any:
        """Save all states as shares, or weights alone as torchtitan does. Collective.

        A checkpoint of the same step is replaced, whatever it holds.
        """
        _make_way(Path(checkpoint_id), shares=MODEL in state_dict)
        if MODEL not in state_dict:
            return super().dcp_save(state_dict, checkpoint_id, *rest, **options)
        extra = {name: encoded(state_dict[name].state_dict(), _REMEDY) for name in _STATES}
        extra[DATALOADER] = control().all_gather_typed(_position(state_dict[DATALOADER]), _POSITION)
        optim = state_dict[OPTIMIZER].optimizers[0]
        tw.save(state_dict[MODEL].model, optim, checkpoint_id, extra={"torchtitan": extra})
        return None

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Load the states that ``state_dict`` names, or weights alone. Collective."""
        ours, model = Path(checkpoint_id, MANIFEST_NAME).is_file(), self.states[MODEL].model
        if ours and MODEL not in state_dict:
            tw.load(model, None, checkpoint_id)
        elif MODEL not in state_dict:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
        elif not ours:
            raise UsageError(
                f"{checkpoint_id} has no states of thinwire's shares: to start from its weights, name it in "
                "checkpoint.initial_load_path and use another checkpoint.folder"
            )
        else:
            optim = state_dict[OPTIMIZER].optimizers[0] if OPTIMIZER in state_dict else None
            extra = tw.load(model, optim, checkpoint_id)["torchtitan"]
            for name in state_dict.keys() & set(_STATES):
                state_dict[name].load_state_dict(decoded(extra[name]))
            if DATALOADER in state_dict:
                _continue(state_dict[DATALOADER], extra[DATALOADER])

    def _find_load_step(self, folder: str = "") -> int:
        place = Path(folder or self.folder)
        saved = place.glob(f"step-*/{MANIFEST_NAME}")
        steps = [int(match[1]) for path in saved if (match := re.fullmatch(r"step-(\d+)", path.parent.name))]
        of_weights: int = super()._find_load_step(folder)
        if not steps:
            return of_weights
        if of_weights > max(steps):
            logger.warning(
                "%s has weights alone: training goes on from step %d", place / f"step-{of_weights}", max(steps)
            )
        return max(steps)

    def _flattened_model_states_sd(self, state_dict: dict[str, Any] | None = None) -> dict[str, Any]:
        return dict(self.states if state_dict is None else state_dict)


def _make_way(directory: Path, *, shares: bool) -> None:
    """Delete the checkpoint of a step that is saved again with other files, as torchtitan overwrites its own.
    Collective."""

    def delete() -> None:
        if control().rank:
            return
        is_ours = Path(directory, MANIFEST_NAME).is_file()
        is_of_weights = not is_ours and any(Path(directory, name).is_file() for name in _OF_WEIGHTS)
        if is_of_weights if shares else is_ours:
            shutil.rmtree(directory)

    control().agree(delete, lambda problems: CheckpointError(f"{directory} cannot be replaced: {problems[0]}"), NOTHING)


def _position(loader: Any) -> Any:
    """The position of this rank in the data. torchtitan's loaders would give it as a pickle."""
    state = (
        StatefulDataLoader.state_dict(loader) if isinstance(loader, ParallelAwareDataloader) else loader.state_dict()
    )
    return encoded(state, _REMEDY)


def _continue(loader: Any, positions: list[Any]) -> None:
    """Move a loader to this rank's position.

    Raises:
        UsageError: Positions of another number of ranks differ, so that this rank has none.
    """
    ranks = control()
    if len(positions) == ranks.size:
        state = decoded(positions[ranks.rank])
    elif not isinstance(loader, ParallelAwareDataloader) and all(other == positions[0] for other in positions):
        state = decoded(positions[0])
    else:
        raise UsageError(
            f"the checkpoint has the positions of {len(positions)} ranks in the data, and this job has {ranks.size} "
            "ranks: torchtitan cannot cut them anew; to start the data from its beginning, set "
            "checkpoint.exclude_from_loading to dataloader"
        )
    if isinstance(loader, ParallelAwareDataloader):
        StatefulDataLoader.load_state_dict(loader, state)
    else:
        loader.load_state_dict(state)
