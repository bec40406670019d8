"""Times single kernels on one device, in one process, while nothing else runs."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from thinwire.profile.timing import FEWEST, MOST, Spread, finish, in_turn
from thinwire.spec.machines.kernels import KernelRow, KernelTable, this_host
from thinwire.spec.plan import Dtype

__all__ = ["KernelShape", "measure_kernels"]

_COLD: Final = 256 << 20
"""Bytes after which a kernel finds its data again: no cache holds them."""

_COPIES: Final = 16

Kind = Literal["matmul", "attention", "attention_backward", "elementwise", "update", "copy"]


@dataclass(frozen=True, slots=True)
class KernelShape:
    """A kernel of one shape, as :class:`thinwire.spec.machines.kernels.KernelRow` describes it."""

    kernel: Kind
    rows: int
    columns: int = 1
    depth: int = 1
    heads: int = 0


def measure_kernels(shapes: Sequence[KernelShape], device: torch.device, dtype: Dtype, seconds: float) -> KernelTable:
    """Time kernels one after another.

    Args:
        shapes: What to time.
        device: Device that computes.
        dtype: Dtype of the values.
        seconds: Approximate duration of all.
    """
    each = seconds / max(1, len(shapes))
    rows = [_row(shape, _spread(_body(shape, device, getattr(torch, dtype)), device, each)) for shape in shapes]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return KernelTable(device=name, host=this_host(), torch=torch.__version__, dtype=dtype, rows=tuple(rows))


def _row(shape: KernelShape, spread: Spread) -> KernelRow:
    dimensions = {"rows": shape.rows, "columns": shape.columns, "depth": shape.depth, "heads": shape.heads}
    return KernelRow(kernel=shape.kernel, seconds=spread.median, low=spread.low, high=spread.high, **dimensions)


def _spread(body: Callable[[], None], device: torch.device, seconds: float) -> Spread:
    def once() -> float:
        finish(device)
        begin = time.perf_counter()
        body()
        finish(device)
        return time.perf_counter() - begin

    once()
    first = once()
    return Spread.of([once() for _ in range(max(FEWEST, min(MOST, int(seconds / max(first, 1e-6)))))])


def _body(shape: KernelShape, device: torch.device, dtype: torch.dtype) -> Callable[[], None]:
    """The call to time; calls in turn have data of their own."""
    makers: dict[Kind, Callable[[], Callable[[], None]]] = {
        "matmul": lambda: _matmul(shape, device, dtype),
        "attention": lambda: _attention(shape, device, dtype, backward=False),
        "attention_backward": lambda: _attention(shape, device, dtype, backward=True),
        "elementwise": lambda: _elementwise(shape, device, dtype),
        "update": lambda: _update(shape, device),
        "copy": lambda: _copy(shape, device, dtype),
    }
    held = 4 * (shape.rows * max(shape.columns, shape.depth) + shape.columns * shape.depth)
    return in_turn(makers[shape.kernel], max(1, min(_COPIES, _COLD // held)))


def _matmul(shape: KernelShape, device: torch.device, dtype: torch.dtype) -> Callable[[], None]:
    left = torch.randn(shape.rows, shape.depth, device=device).to(dtype)
    right = torch.randn(shape.columns, shape.depth, device=device).to(dtype)
    out = torch.empty(shape.rows, shape.columns, device=device, dtype=dtype)

    def product() -> None:
        torch.matmul(left, right.T, out=out)

    return product


def _attention(shape: KernelShape, device: torch.device, dtype: torch.dtype, *, backward: bool) -> Callable[[], None]:
    heads = max(1, shape.heads)
    size = max(1, shape.rows // shape.depth), heads, shape.depth, shape.columns // heads
    query, key, value = (torch.randn(size, device=device).to(dtype).requires_grad_(backward) for _ in range(3))

    def forward() -> Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=True)

    if not backward:

        def attend() -> None:
            forward()

        return attend
    out = forward()
    gradient = torch.ones_like(out)

    def differentiate() -> None:
        torch.autograd.grad(out, (query, key, value), gradient, retain_graph=True)

    return differentiate


def _elementwise(shape: KernelShape, device: torch.device, dtype: torch.dtype) -> Callable[[], None]:
    """A product that reads two values and writes one for each of a third of all values."""
    left, right = (torch.randn(max(1, shape.rows // 3), device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)

    def multiply() -> None:
        torch.mul(left, right, out=out)

    return multiply


def _update(shape: KernelShape, device: torch.device) -> Callable[[], None]:
    master = torch.nn.Parameter(torch.zeros(shape.rows, device=device))
    master.grad = torch.zeros_like(master)
    optimizer = torch.optim.AdamW([master], fused=True)

    def update() -> None:
        optimizer.step()

    return update


def _copy(shape: KernelShape, device: torch.device, dtype: torch.dtype) -> Callable[[], None]:
    source = torch.zeros(shape.rows, device=device)
    target = torch.zeros(shape.rows, device=device, dtype=dtype)

    def copy() -> None:
        target.copy_(source)

    return copy
