"""What every model shares: the output, a loss of small memory, rotary positions, recomputation.

Shapes: B sequences, T tokens each, D hidden width, H heads, C channels per head, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

IGNORED: Final = -100
"""A label that does not count, as in torch's cross-entropy."""

_CHUNK_ELEMENTS: Final = 1 << 22
"""Elements of the float32 working copy of the logits: 16 MiB whatever the batch and the vocabulary."""


@dataclass
class CausalOutput:
    """What a causal language model returns.

    Attributes:
        logits: shape ``(B, T, V)``, in the compute dtype.
        loss: mean cross-entropy in nats per label, float32 scalar; None without labels.
    """

    logits: Tensor
    loss: Tensor | None = None


class _CrossEntropy(torch.autograd.Function):
    """Keeps the logits as they are and one float32 per row; works in float32 on a chunk of rows at a time."""

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
        scale = grad_outputs[0] / num_labels
        grad = torch.empty_like(logits)
        for rows in _row_chunks(logits):
            share = torch.exp(logits[rows].float() - normalisers[rows].unsqueeze(-1))
            target = labels[rows].clamp_min(0).unsqueeze(-1)
            share.scatter_add_(-1, target, torch.full_like(target, -1, dtype=torch.float32))
            grad[rows] = share.mul_((labels[rows] != IGNORED).unsqueeze(-1) * scale)
        return grad, None


def _row_chunks(logits: Tensor) -> list[slice]:
    step = max(1, _CHUNK_ELEMENTS // logits.shape[1])
    return [slice(start, start + step) for start in range(0, logits.shape[0], step)]


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy, computed in float32 whatever the logits' dtype.

    Besides the logits and their gradient it needs 16 MiB: no float32 copy of the whole logits is ever made.

    Args:
        logits: shape ``(B, T, V)`` or ``(N, V)``.
        labels: int64, the shape of `logits` without its last dimension; `IGNORED` does not count.

    Returns:
        float32 scalar, nats per label; NaN where no label counts.
    """
    loss: Tensor = _CrossEntropy.apply(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))
    return loss


class RotaryTable(nn.Module):
    """Cosines and sines of rotary position embedding, in the half-split layout of Hugging Face's models.

    Args:
        channels: channels per head that are rotated; even.
        length: longest sequence.
        theta: base of the frequencies.
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
            length: T.
            dtype: of the queries and keys.

        Returns:
            Cosines and sines, each of shape ``(T, channels)``.
        """
        return self.cos[:length].to(dtype), self.sin[:length].to(dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first channels of each head by position.

    Args:
        heads: shape ``(B, H, T, C)``.
        cos: shape ``(T, R)`` with R <= C.
        sin: same.

    Returns:
        Shape ``(B, H, T, C)``; channels from R on are unchanged.
    """
    turned, kept = heads[..., : cos.shape[-1]], heads[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return turned if kept.shape[-1] == 0 else torch.cat((turned, kept), dim=-1)


def call_layer(layer: Callable[..., Tensor], recompute: bool, *inputs: Any) -> Tensor:
    """Run a block, or run it so that backward recomputes it from its input instead of keeping activations.

    Args:
        layer: the block.
        recompute: whether to recompute.
        inputs: its arguments.

    Returns:
        Its output.
    """
    if not (recompute and torch.is_grad_enabled()):
        return layer(*inputs)
    # No dropout in our blocks, so there is no random state to preserve (and on CUDA, to synchronise for).
    output: Tensor = checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=False)
    return output


@dataclass(frozen=True)
class Draw:
    """A weight that starts at random.

    Attributes:
        name: of the parameter.
        weight: the parameter.
        std: of its normal distribution.
    """

    name: str
    weight: Tensor
    std: float


def draws(model: nn.Module, num_layers: int, residual_outputs: tuple[str, ...]) -> list[Draw]:
    """The weights that start at random, as GPT-2's do: normal of 0.02, divided by sqrt(2 L) for what writes into the
    residual stream. All others start as torch's modules do: norms at one, and here all biases at zero.

    Args:
        model: on any device.
        num_layers: L.
        residual_outputs: last parts of the names of the linear layers that write into the residual stream.

    Returns:
        In the order in which they are drawn.
    """
    drawn = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            weight: Tensor = module.weight
            is_output = name.rsplit(".", 1)[-1] in residual_outputs
            drawn.append(Draw(f"{name}.weight", weight, 0.02 / math.sqrt(2 * num_layers) if is_output else 0.02))
    return drawn


def init_weights(model: nn.Module, seed: int, num_layers: int, residual_outputs: tuple[str, ...]) -> None:
    """Give :func:`draws` their values, and biases of linear layers zero.

    The values depend on `seed` and the names' order alone, not on the device or the global random state.

    Args:
        model: on CPU; on the meta device nothing happens.
        seed: of the generator.
        num_layers: L.
        residual_outputs: see :func:`draws`.
    """
    generator = torch.Generator().manual_seed(seed)
    for draw in draws(model, num_layers, residual_outputs):
        nn.init.normal_(draw.weight, std=draw.std, generator=generator)
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
