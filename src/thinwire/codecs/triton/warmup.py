"""Compiles kernels before a training step needs them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from thinwire.codecs.codec import Codec
from thinwire.codecs.coder import Sum
from thinwire.spec.codec import encodable_dtypes

NUMEL = 4096
"""Values of a message: a multiple of 16, as in the compiled kernels whose accesses are wide."""


def warm_up(
    codecs: Iterable[Codec],
    dtypes: Iterable[torch.dtype],
    device: torch.device | str,
    *,
    messages: Sequence[int] = (2,),
    gain: float | None = None,
) -> None:
    """Compile and load the kernels with which codecs encode, decode and sum, by running them on zeros.

    Without this, all ranks compile at once in the first step, while their peers wait in collectives. Triton keeps
    compiled kernels on disk, so a second process only loads them. Tensors whose lengths are no multiple of 16, and
    slices at irregular distances, may still take other kernels.

    Args:
        codecs: Codecs of the triton backend. Each of them may follow each other in a sum that is encoded again.
        dtypes: Dtypes of the tensors that are encoded. A codec skips those that it does not take.
        device: Device of the tensors.
        messages: Numbers of messages that are decoded or added at once, which are constants of a kernel.
        gain: Gain of the error feedback of all codecs that encode fp32, a constant too; ``None`` for no feedback.

    Raises:
        UsageError: The kernels cannot run on the device.
    """
    codecs, device = list(codecs), torch.device(device)
    for codec in codecs:
        valid = {getattr(torch, name) for name in encodable_dtypes(codec.spec)}
        for dtype in dict.fromkeys(dtypes):
            if dtype in valid:
                for count in messages:
                    x = torch.zeros(count * NUMEL, dtype=dtype, device=device)
                    _run(codec, codecs, x, count)
                    if gain is not None and "float32" in encodable_dtypes(codec.spec):
                        _run_feedback(codec, x, count, gain)


def _run(codec: Codec, targets: list[Codec], x: torch.Tensor, count: int) -> None:
    """Encode and decode ``count`` slices of ``x`` in all forms."""
    dtype, fp32 = x.dtype, torch.zeros(x.numel(), dtype=torch.float32, device=x.device)
    first = x[:NUMEL]
    wires = codec.encode_slices(x, [(i * NUMEL, (i + 1) * NUMEL) for i in range(count)], seed=1)
    wire = codec.encode(first, seed=1)
    codec.decode(wire, NUMEL, dtype)
    codec.decode_add(wire, fp32[:NUMEL], encoded=dtype)
    codec.decode_slices(wires, x.view(count, NUMEL), encoded=dtype)
    total = Sum(wires, NUMEL, encoded=dtype, scale=1 / count)
    onto = Sum(wires, NUMEL, fp32[:NUMEL], encoded=dtype)
    for added in (total, onto):
        codec.decode_sum_into(added, torch.empty_like(fp32[:NUMEL]))
    if "float32" not in encodable_dtypes(codec.spec):
        return
    for target in targets:
        if "float32" in encodable_dtypes(target.spec):
            codec.encode_sum(total, target, seed=1)


def _run_feedback(codec: Codec, x: torch.Tensor, count: int, gain: float) -> None:
    """Encode ``count`` slices of ``x`` with error feedback, at regular distances and not."""
    lost = torch.zeros(x.numel(), dtype=torch.float32, device=x.device)
    slices = [(i * NUMEL, (i + 1) * NUMEL) for i in range(count)]
    codec.encode_slices_feedback(x, slices, lost, gain=gain, seed=1)
    codec.encode_slices_feedback(x, [(0, NUMEL), (0, 0)], lost, gain=gain, seed=1)
