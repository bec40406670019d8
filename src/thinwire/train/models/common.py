"""Parts that all models share: the output, a loss with low memory use, and rotary positions.

Shapes: B sequences, T tokens each, D hidden width, H heads, C channels per head, V vocabulary.
"""

from __future__ import annotations

import math
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

    Args:
        logits: Logits of shape ``(B, T, V)`` or ``(N, V)``.
        labels: Labels, int64, with the shape of `logits` without its last dimension; `IGNORED` labels do not count.

    Returns:
        Loss in nats per label, float32 scalar; NaN if no label counts.
    """
    loss: Tensor = _CrossEntropy.apply(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))
    return loss


class RotaryTable(nn.Module):
    """Cosines and sines of rotary position embedding, in the half-split layout of Hugging Face's models.

    Args:
        channels: Number of rotated channels per head; even.
        length: Longest sequence in tokens.
        theta: Base of the frequencies.
    """

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
        """The tables of the first `length` positions.

        Args:
            length: Number of positions, T.
            dtype: Data type of the queries and keys.

        Returns:
            Cosines and sines, each of shape ``(T, channels)``.
        """
        return self.cos[:length].to(dtype), self.sin[:length].to(dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first channels of each head by position.

    Args:
        heads: Queries or keys of shape ``(B, H, T, C)``.
        cos: Cosines of shape ``(T, R)`` with R <= C.
        sin: Sines of the same shape.

    Returns:
        Shape ``(B, H, T, C)``; channels from R on are unchanged.
    """
    turned, kept = heads[..., : cos.shape[-1]], heads[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return turned if kept.shape[-1] == 0 else torch.cat((turned, kept), dim=-1)


STACKED: Final = 3
"""Dimensions of a parameter that stacks the matrices of all experts."""


@dataclass(frozen=True)
class Draw:
    """A weight with random initial values from a normal distribution."""

    name: str
    weight: Tensor
    std: float


def draws(model: nn.Module, num_layers: int, residual_outputs: tuple[str, ...]) -> list[Draw]:
    """List the weights with random initial values.

    As in GPT-2, the standard deviation is 0.02, divided by sqrt(2 L) for layers that write to the residual stream. All
    other parameters keep the initial values of torch's modules (norms at one), except that all biases are zero.

    Args:
        model: Model on any device.
        num_layers: Number of blocks, L.
        residual_outputs: Last components of the names of linear layers, and of stacks of experts, that write to the
            residual stream.

    Returns:
        The weights, in the order in which they are drawn.
    """
    drawn = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            weight: Tensor = module.weight
            is_output = name.rsplit(".", 1)[-1] in residual_outputs
            drawn.append(Draw(f"{name}.weight", weight, 0.02 / math.sqrt(2 * num_layers) if is_output else 0.02))
        for own, parameter in module.named_parameters(recurse=False):
            if parameter.ndim == STACKED:
                std = 0.02 / math.sqrt(2 * num_layers) if own in residual_outputs else 0.02
                drawn.append(Draw(f"{name}.{own}", parameter, std))
    return drawn


def init_weights(model: nn.Module, seed: int, num_layers: int, residual_outputs: tuple[str, ...]) -> None:
    """Draw the initial values of :func:`draws` on the CPU, and set the biases of linear layers to zero. A model on the
    meta device stays as it is.

    The values depend only on `seed` and on the order of the names, not on the device or the global random state.
    """
    generator = torch.Generator().manual_seed(seed)
    for draw in draws(model, num_layers, residual_outputs):
        nn.init.normal_(draw.weight, std=draw.std, generator=generator)
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
