"""Parts that all models share: the output, a loss with low memory use, and rotary positions.

Shapes: B sequences, T tokens each, D hidden width, H heads, C channels per head, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from thinwire.collectives.links.streams import streams_of
from thinwire.cost import GPU_LOSS_CHUNK, HOST_LOSS_CHUNK

IGNORED: Final = -100
"""Label of positions that the loss ignores, as in torch's cross-entropy."""


@dataclass
class CausalOutput:
    """The output of a causal language model.

    Attributes:
        logits: Logits of shape ``(B, T, V)`` in the compute dtype.
        loss: Mean cross-entropy in nats per label, float32 scalar; ``None`` without labels.
    """

    logits: Tensor
    loss: Tensor | None = None


class _CrossEntropy(torch.autograd.Function):
    """Keeps the unchanged logits and one float32 per row; computes in float32 on one chunk of rows at a time."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
        normalisers = torch.empty_like(losses)
        for rows in _row_chunks(logits):
            chunk = logits[rows].float()
            normalisers[rows] = torch.logsumexp(chunk, dim=-1)
            chosen = chunk.gather(-1, labels[rows].clamp_min(0).unsqueeze(-1)).squeeze(-1)
            losses[rows] = normalisers[rows] - chosen
        counts = labels != IGNORED
        num_labels = counts.sum()
        ctx.save_for_backward(logits, labels, normalisers, num_labels)
        return (losses * counts).sum() / num_labels

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None]:
        logits, labels, normalisers, num_labels = ctx.saved_tensors
        scale = (labels != IGNORED) * (grad_outputs[0] / num_labels)
        grad = torch.empty_like(logits)
        for rows in _row_chunks(logits):
            grad[rows] = _gradient(logits[rows], labels[rows], normalisers[rows], scale[rows])
        return grad, None


def _gradient(logits: Tensor, labels: Tensor, normalisers: Tensor, scale: Tensor) -> Tensor:
    """Softmax less one at the label, by row, in float32. A chunk's copies are freed before those of the next one."""
    share = torch.exp(logits.float() - normalisers.unsqueeze(-1))
    target = labels.clamp_min(0).unsqueeze(-1)
    share.scatter_add_(-1, target, torch.full_like(target, -1, dtype=torch.float32))
    return share.mul_(scale.unsqueeze(-1))


def _row_chunks(logits: Tensor) -> list[slice]:
    elements = HOST_LOSS_CHUNK if streams_of(logits.device) is None else GPU_LOSS_CHUNK
    step = max(1, elements // logits.shape[1])
    return [slice(start, start + step) for start in range(0, logits.shape[0], step)]


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy, computed in float32 for any dtype of the logits.

    In addition to the logits and their gradient, it needs 16 MiB (64 MiB on GPUs), because it never copies all logits
    to float32.

    Logits are ``(B, T, V)`` or ``(N, V)``, labels int64 without the last dimension; :data:`IGNORED` ones do not count.
    The loss is in nats per label, a float32 scalar; NaN if no label counts.
    """
    loss: Tensor = _CrossEntropy.apply(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))
    return loss


class RotaryTable(nn.Module):
    """Cosines and sines of rotary position embedding, in the half-split layout of Hugging Face's models, for an even
    number of rotated channels per head and at most ``length`` tokens; ``theta`` is the base of the frequencies."""

    cos: Tensor
    sin: Tensor

    def __init__(self, channels: int, length: int, theta: float) -> None:
        super().__init__()
        frequencies = theta ** (-torch.arange(0, channels, 2, dtype=torch.float64) / channels)
        angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the first T positions in the dtype of queries and keys, each ``(T, channels)``."""
        return self.cos[:length].to(dtype), self.sin[:length].to(dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R <= C channels of each head, queries or keys ``(B, H, T, C)``, by position; cosines and sines
    are ``(T, R)``. Channels from R on are unchanged."""
    turned, kept = heads[..., : cos.shape[-1]], heads[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return turned if kept.shape[-1] == 0 else torch.cat((turned, kept), dim=-1)


STACKED: Final = 3
"""Dimensions of a parameter that stacks the matrices of all experts."""
