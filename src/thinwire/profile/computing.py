"""Times the forward and the backward of a model's parts, while all ranks of a node compute."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from thinwire.collectives.group import Control
from thinwire.profile.timing import FEWEST, MOST, PAIR, PAIRS, SECONDS, Call, Spread, finish, in_turn, timed
from thinwire.spec import ModelSpec
from thinwire.spec.plan import Dtype
from thinwire.spec.profile import ComputeRow


@dataclass(frozen=True)
class ModelPiece:
    """A part of a model.

    Attributes:
        part: Kind of part; ``"whole"`` is the embedding, ``repeats`` blocks and the head, one after another, and
            ``"plain"`` is the same without thinwire's runtime.
        shape: Dimensions of the model that it belongs to.
        seq: Tokens per sequence.
        micro_batch: Sequences per micro-batch.
        dtype: Compute dtype.
        flops: FLOPs of the forward of one part.
        make: Builds, on a device, a list of parameters and a call; the call and the backward of its result are timed.
            Gradients of the parameters are added to fp32 sums; the runtime sees to those of a sharded model.
        repeats: Number of such parts, each with its own weights, that the call runs one after another. A single part
            would find its weights in the cache each time, which never happens in training.
    """

    part: Literal["block", "head", "embedding", "whole", "plain"]
    shape: ModelSpec
    seq: int
    micro_batch: int
    dtype: Dtype
    flops: int
    make: Callable[[torch.device], tuple[Sequence[nn.Parameter], Callable[[], Tensor]]]
    repeats: int = 1

    @property
    def row(self) -> dict[str, Any]:
        """What tells its row of a profile from others, by the names that it has there."""
        dimensions = ("hidden", "ffn", "heads", "kv_heads", "vocab")
        of_shape = {name: getattr(self.shape, name) for name in dimensions}
        return {"part": self.part, **of_shape, "seq": self.seq, "micro_batch": self.micro_batch, "dtype": self.dtype}


def measure_model(
    pieces: Sequence[ModelPiece], control: Control, device: torch.device, seconds: float, *, plain: bool = False
) -> list[ComputeRow]:
    """Time the forward and backward of a model's parts. Gradients are added to fp32 sums, as in the runtime.

    Timing each part alone gives its share. Timing the whole, in which no rank waits for another, gives the total: in
    training, caches are cold, ranks drift apart, and there is work between the parts, including the runtime's.

    It takes about so many ``seconds``. With ``plain``, the whole is timed without thinwire's runtime, too.

    Returns:
        One row per part, the same on every rank.
    """
    whole = next(piece for piece in pieces if piece.part == "whole")
    parts = [piece for piece in pieces if piece.part not in ("whole", "plain")]
    share = seconds / (len(parts) + 1 + plain)
    # First: the runtime tunes the process's allocator, which other frameworks do not.
    others = [_measure_whole(piece, control, device, share) for piece in pieces if plain and piece.part == "plain"]
    rows = [_measure_part(piece, control, device, share) for piece in parts]
    together = _measure_whole(whole, control, device, share)
    alone = sum((row.forward + row.backward) * (whole.repeats if row.part == "block" else 1) for row in rows)
    scale = together / alone
    without = others[0] / together if others else 1.0
    return [row.with_(forward=row.forward * scale, backward=row.backward * scale, plain=without) for row in rows]


def _measure_part(piece: ModelPiece, control: Control, device: torch.device, seconds: float) -> ComputeRow:
    forward, backward = _training(piece, device)

    def once() -> tuple[float, float]:
        control.barrier()
        begin = time.perf_counter()
        out = forward()
        finish(device)
        middle = time.perf_counter()
        backward(out)
        finish(device)
        return middle - begin, time.perf_counter() - middle

    once()
    first = max(sum(pair) for pair in control.all_gather_typed(once(), PAIR))
    samples = [once() for _ in range(max(FEWEST, min(MOST, int(seconds / max(first, 1e-6)))))]
    everyone = control.all_gather_typed(samples, PAIRS)
    # The slowest rank counts: in training, a rank that is done early would go on and take its share of the cores.
    whole = Spread.of([max(sum(pair) for pair in column) for column in zip(*everyone, strict=True)]).median
    share = sum(pair[0] for rank in everyone for pair in rank) / sum(sum(pair) for rank in everyone for pair in rank)
    each = whole / piece.repeats
    return ComputeRow(**piece.row, forward=share * each, backward=(1 - share) * each, flops=piece.flops)


def _measure_whole(piece: ModelPiece, control: Control, device: torch.device, seconds: float) -> float:
    """Seconds of a forward and backward on the slowest rank, while no rank waits for another."""
    forward, backward = _training(piece, device)

    def several(count: int) -> float:
        control.barrier()
        begin = time.perf_counter()
        for _ in range(count):
            backward(forward())
        finish(device)
        return max(control.all_gather_typed(time.perf_counter() - begin, SECONDS)) / count

    several(1)
    count = max(FEWEST, min(MOST, int(seconds / several(1))))
    # A hiccup may take several times as long as a call.
    return statistics.median(several(-(-count // FEWEST)) for _ in range(FEWEST))


def _training(piece: ModelPiece, device: torch.device) -> tuple[Callable[[], Tensor], Callable[[Tensor], None]]:
    """The forward of a part, and the backward of its result. ``"plain"`` frameworks leave gradients where autograd puts
    them."""
    parameters, call = piece.make(device)
    sums: dict[nn.Parameter, Tensor] = {}

    def backward(out: Tensor) -> None:
        out.backward(torch.ones_like(out))
        for parameter in parameters:
            if piece.part != "plain":
                assert parameter.grad is not None
                if parameter not in sums:
                    sums[parameter] = torch.zeros(parameter.shape, dtype=torch.float32, device=device)
                sums[parameter].add_(parameter.grad)
            parameter.grad = None

    return call, backward


def measure_update(control: Control, device: torch.device) -> float:
    """Seconds of AdamW per element of a shard, including the rounding to bf16."""
    numel = 1 << 22
    master = nn.Parameter(torch.zeros(numel, dtype=torch.float32, device=device))
    master.grad = torch.zeros_like(master)
    rounded = torch.zeros(numel, dtype=torch.bfloat16, device=device)
    optimizer = torch.optim.AdamW([master], fused=True)

    def update() -> None:
        optimizer.step()
        rounded.copy_(master.detach())

    return timed(control, update, seconds=0.3, device=device, waits=False).median / numel


def measure_host_copies(control: Control, device: torch.device) -> tuple[float, float]:
    """Seconds per byte of copies from the host's memory to the device, and back, while all ranks of a node copy."""
    nbytes = 32 << 20
    host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda", device="cpu")
    there = torch.zeros(nbytes, dtype=torch.uint8, device=device)

    copies = (partial(there.copy_, host, non_blocking=True), partial(host.copy_, there, non_blocking=True))
    up, down = (timed(control, copy, seconds=0.2, device=device, waits=False).median / nbytes for copy in copies)
    return up, down


def measure_touch(control: Control, device: torch.device) -> float:
    """Seconds per element of copying from fp32 to bf16, with data that no cache holds."""
    numel = 1 << 20

    def make() -> Call:
        source = torch.zeros(numel, dtype=torch.float32, device=device)
        target = torch.zeros(numel, dtype=torch.bfloat16, device=device)
        return lambda: target.copy_(source)

    return timed(control, in_turn(make, 8), seconds=0.2, device=device, waits=False).median / numel
