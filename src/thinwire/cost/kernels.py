"""Seconds of a part's kernels by shape, without a profile: matrix products, attention, and what is bound by memory.

A model's share of the peak follows from its shape. Matrix products grow with the square of the width, all other kernels
with the width itself, so wide models come closer to the peak. The same matrix product is less efficient for few tokens.
"""

from __future__ import annotations

from functools import cache

from thinwire.cost.blocks import ModelPart, Routed

_VALUE = 2
"""Bytes of a value; matrices are multiplied in 16 bits."""

_WAVE = 3_000_000
"""Elements of a product that all multiprocessors compute at once: tiles of 128 x 256 on about 100 of them. The last
wave is half empty on average."""

_PROLOGUE = 256
"""Length of the sum over which a multiprocessor multiplies in the time that it takes to fetch a tile's first operands
and to write its result."""

_SCORE_VALUES = 6
"""Values that attention without a fused kernel reads or writes for each score: the product writes it, a kernel for mask
and softmax and one for dropout read and write it, and the product with the values reads it."""

_FUSED_BACKWARD = 2.5
"""FLOPs of the backward of fused attention over those of its forward: five products instead of two (Dao 2023)."""


class Kernels:
    """Kernels of one accelerator.

    Args:
        peak: Peak FLOP/s of matrix products.
        share: Share of the peak that large products reach.
        memory: Bytes per second that kernels bound by memory reach.
        attention: Share of the peak that fused attention reaches; ``None``: it is not fused.
        passes: Times that kernels between matrix products read and write what fused kernels would read and write once.
    """

    def __init__(self, peak: float, share: float, memory: float, attention: float | None, passes: float = 1.0) -> None:
        self._flops, self._memory, self._passes = peak * share, memory, passes
        self._fused = None if attention is None else peak * attention
        self._products = cache(self._matrix_products)

    def computing(self, part: ModelPart, sequences: int, seq: int) -> tuple[float, float]:
        """Seconds of the forward and of the backward of ``sequences`` sequences of ``seq`` tokens. In the backward,
        element-wise kernels read the gradient as well, which doubles what they move."""
        tokens = sequences * seq
        between = self.elementwise(tokens * (part.split_values + part.whole_values))
        attention = (
            self.attention(tokens, seq, part.attention_width, part.heads) if part.attention_width else (0.0, 0.0)
        )
        products, grouped = self._products(part.matrices, tokens), self._expert_products(part.routed, tokens)
        forward, backward = zip(products, grouped, (between, 2 * between), attention, strict=True)
        return sum(forward), sum(backward)

    def elementwise(self, values: float) -> float:
        """Seconds of kernels that read or write ``values`` values and are bound by memory."""
        return self._passes * values * _VALUE / self._memory

    def attention(self, tokens: int, seq: int, width: int, heads: int) -> tuple[float, float]:
        """Seconds of the forward and of the backward of attention.

        Args:
            tokens: Number of tokens of all sequences.
            seq: Tokens per sequence.
            width: Width of all heads together.
            heads: Number of heads.
        """
        flops = 4 * tokens * seq * width
        if self._fused is not None:
            forward = flops / 2 / self._fused  # it skips the masked half
            return forward, _FUSED_BACKWARD * forward
        scores = self._passes * tokens * seq * heads * _SCORE_VALUES * _VALUE
        forward = flops / self._flops + scores / self._memory
        return forward, 2 * forward

    def _matrix_products(
        self, matrices: tuple[tuple[int, int], ...], tokens: int, count: int = 1
    ) -> tuple[float, float]:
        """Seconds of the products with ``count`` of each of these matrices in the forward and in the backward."""
        forward = backward = 0.0
        for rows, columns in matrices:
            forward += self.product(tokens, rows, columns, count)
            backward += self.product(tokens, columns, rows, count) + self.product(rows, columns, tokens, count)
        return forward, backward

    def _expert_products(self, routed: Routed | None, tokens: int) -> tuple[float, float]:
        """Seconds of the products with the experts that tokens visit, in the forward and in the backward. The products
        of all experts are one kernel, in which each expert has the same number of tokens."""
        if routed is None:
            return 0.0, 0.0
        return self._products(routed.matrices, max(1, tokens * routed.active // routed.experts), routed.experts)

    def product(self, rows: int, columns: int, depth: int, count: int = 1) -> float:
        """Seconds of ``count`` products of ``rows x depth`` and ``depth x columns`` in one kernel."""
        waves = count * rows * columns / _WAVE
        full = waves / (waves + 0.5) * depth / (depth + _PROLOGUE)
        bound = count * (rows * depth + depth * columns + rows * columns) * _VALUE / self._memory
        return max(2 * count * rows * columns * depth / (self._flops * full), bound)
