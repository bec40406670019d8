"""A checkpoint of ``thinwire train`` as the state of a model and an optimizer that are torch's own."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from thinwire.checkpoint.store import Reader

__all__ = ["branch"]

_MOMENTS = ("exp_avg", "exp_avg_sq")


@torch.no_grad()
def branch(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Go on from a checkpoint: parameters, and the moments and steps of AdamW.

    Args:
        model: A model whose parameters are whole, fp32, on the CPU.
        optimizer: Its AdamW, which has not stepped yet.
        path: The checkpoint of a run without islands, tensor or pipeline parallelism.

    Raises:
        CheckpointError: It is corrupt, or of another model or optimizer.
    """
    reader = Reader(path)
    values = reader.manifest.values
    for name, parameter in model.named_parameters():
        parameter.copy_(reader.vector(f"model/{name}").view_as(parameter))
        moments = {key: reader.vector(f"optimizer/{name}/{key}").view_as(parameter) for key in _MOMENTS}
        step = torch.tensor(float(values[f"optimizer/{name}/step"]))
        optimizer.state[parameter] = {"step": step, **moments}
