"""Times single kernels on one device, in one process, while nothing else runs.

On CUDA, a sample is as many calls as the host can queue while the device sleeps: training queues ahead of the device
too, and a launch takes the host longer than a small kernel takes the device.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Final, Literal

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from thinwire.profile.timing import FEWEST, MOST, Call, Spread, finish, in_turn
from thinwire.spec.machines.kernels import KernelRow, KernelTable, this_host
from thinwire.spec.plan import Dtype

_COLD: Final = 256 << 20
"""Bytes after which a kernel finds its data again: no cache holds them."""

_COPIES: Final = 16

_LASTING: Final = 2e-3
"""Seconds that a sample on CUDA lasts, if its calls are not too many."""

_MOST_CALLS: Final = 32
_QUEUEING: Final = 1_000_000
"""Clocks of a device, about half a millisecond, in which the host queues a call: an update takes it that long."""

_COUNTED: Final = 10
"""Values that the cost model counts, for each token and channel, of what :func:`_elementwise` computes: 2 of the norm,
2 of the rotation, 3 of the gate, and 3 of the residual addition."""

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
    """Time kernels one after another, for about ``seconds`` in all."""
    each = seconds / max(1, len(shapes))
    rows = [_row(shape, _spread(*_body(shape, device, getattr(torch, dtype)), device, each)) for shape in shapes]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return KernelTable(device=name, host=this_host(), torch=torch.__version__, dtype=dtype, rows=tuple(rows))


def _row(shape: KernelShape, spread: Spread) -> KernelRow:
    share = 3 if shape.kernel == "elementwise" else 1  # of what was timed: a forward and a backward
    return KernelRow(**asdict(shape), seconds=spread.median / share, low=spread.low / share, high=spread.high / share)


def _spread(body: Call, copies: int, device: torch.device, seconds: float) -> Spread:
    once = partial(_on_cuda if device.type == "cuda" else _on_cpu, body)
    for _ in range(copies):  # what a first call prepares
        body()
    finish(device)
    calls = max(1, min(_MOST_CALLS, int(_LASTING / max(once(1), 1e-6)))) if device.type == "cuda" else 1
    first = once(calls)
    return Spread.of([once(calls) for _ in range(max(FEWEST, min(MOST, int(seconds / max(calls * first, 1e-6)))))])


def _on_cpu(body: Call, calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        body()
    return (time.perf_counter() - begin) / calls


def _on_cuda(body: Call, calls: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(_QUEUEING * calls)
    begin.record()
    for _ in range(calls):
        body()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / calls


def _body(shape: KernelShape, device: torch.device, dtype: torch.dtype) -> tuple[Call, int]:
    """The call to time, and how many calls in turn have data of their own."""
    makers: dict[Kind, Callable[[KernelShape, torch.device, torch.dtype], Call]] = {
        "matmul": _matmul,
        "attention": _attention,
        "attention_backward": _attention,
        "elementwise": _elementwise,
        "update": _update,
        "copy": _copy,
    }
    held = 4 * (shape.rows * max(shape.columns, shape.depth) + shape.columns * shape.depth)
    copies = max(1, min(_COPIES, _COLD // held))
    return in_turn(partial(makers[shape.kernel], shape, device, dtype), copies), copies


def _matmul(shape: KernelShape, device: torch.device, dtype: torch.dtype) -> Call:
    left = torch.randn(shape.rows, shape.depth, dtype=torch.float32, device=device).to(dtype)
    right = torch.randn(shape.columns, shape.depth, dtype=torch.float32, device=device).to(dtype)
    out = torch.empty(shape.rows, shape.columns, device=device, dtype=dtype)
    return lambda: torch.matmul(left, right.T, out=out)


def _attention(shape: KernelShape, device: torch.device, dtype: torch.dtype) -> Call:
    backward = shape.kernel == "attention_backward"
    heads = max(1, shape.heads)
    size = max(1, shape.rows // shape.depth), heads, shape.depth, shape.columns // heads
    query, key, value = (
        torch.randn(size, dtype=torch.float32, device=device).to(dtype).requires_grad_(backward) for _ in range(3)
    )

    def forward() -> Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=True)

    if not backward:
        return forward
    out = forward()
    gradient = torch.ones_like(out)
    return lambda: torch.autograd.grad(out, (query, key, value), gradient, retain_graph=True)


def _elementwise(shape: KernelShape, device: torch.device, dtype: torch.dtype) -> Call:
    """Forward and backward of what a block computes between matrix products: a norm, the rotation of heads, a gate and
    a residual addition, each a kernel or more of its own. The cost model gives the forward a third of both."""
    heads, width = max(1, shape.heads), shape.columns
    tokens = max(1, shape.rows // (_COUNTED * width))
    seq = min(tokens, shape.depth)
    size = max(1, tokens // seq), seq, width
    stream, vector, up, gate, added = (
        torch.randn(size, dtype=torch.float32, device=device).to(dtype).requires_grad_() for _ in range(5)
    )
    weight = torch.ones(width, device=device, dtype=dtype, requires_grad=True)
    cos, sin = (torch.randn(seq, width // heads, dtype=torch.float32, device=device).to(dtype) for _ in range(2))

    def forward() -> tuple[Tensor, ...]:
        turned = vector.unflatten(-1, (heads, -1)).transpose(1, 2)
        first, second = turned.chunk(2, dim=-1)
        rotated = turned * cos + torch.cat((-second, first), dim=-1) * sin
        return rms_norm(stream, (width,), weight), rotated, silu(gate) * up, stream + added

    gradients = [torch.ones_like(out) for out in forward()]
    return lambda: torch.autograd.grad(forward(), (stream, weight, vector, up, gate, added), gradients)


def _update(shape: KernelShape, device: torch.device, dtype: torch.dtype) -> Call:
    del dtype  # optimizers compute in fp32
    master = torch.nn.Parameter(torch.zeros(shape.rows, dtype=torch.float32, device=device))
    master.grad = torch.zeros_like(master)
    return torch.optim.AdamW([master], fused=True).step


def _copy(shape: KernelShape, device: torch.device, dtype: torch.dtype) -> Call:
    source = torch.zeros(shape.rows, dtype=torch.float32, device=device)
    target = torch.zeros(shape.rows, device=device, dtype=dtype)
    return lambda: target.copy_(source)
