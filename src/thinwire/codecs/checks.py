"""Checks of a codec's arguments, once and before any memory is touched."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.codecs.coder import Sum
from thinwire.codecs.seeds import fold_seed
from thinwire.errors import UsageError, WireError
from thinwire.spec import CodecSpec
from thinwire.spec.codec import encodable_dtypes

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def checked_values(spec: CodecSpec, x: Tensor) -> Tensor:
    """Return the values as a contiguous 1-D tensor.

    Raises:
        SpecError: The codec does not encode this dtype.
    """
    spec.check_dtype(x.dtype)
    return x.detach().resolve_neg().contiguous().view(-1)


def checked_seed(spec: CodecSpec, seed: int | None) -> int:
    """Fold the seed to 32 bits; 0 for codecs that need none.

    Raises:
        UsageError: The codec needs a seed and there is none.
    """
    if not spec.needs_seed:
        return 0
    if seed is None:
        raise UsageError(f"{spec} rounds at random: pass seed=, a number that differs from step to step")
    return fold_seed(seed)


def encoded_dtype(spec: CodecSpec, encoded: torch.dtype | None) -> torch.dtype:
    """The dtype that was encoded. Default: fp32, or the first dtype that the codec encodes if it does not encode fp32.

    Raises:
        SpecError: The codec does not encode this dtype.
    """
    if encoded is None:
        names = encodable_dtypes(spec)
        encoded = torch.float32 if "float32" in names else getattr(torch, names[0])
    spec.check_dtype(encoded)
    return encoded


def check_rows(spec: CodecSpec, wires: Tensor, numel: int, encoded: torch.dtype | None) -> torch.dtype:
    """Check messages to be added, uint8 of shape (messages, bytes), and return the dtype that was encoded."""
    if wires.dim() != 2 or len(wires) == 0:
        raise UsageError(f"messages to be added should be rows of a matrix, this is {tuple(wires.shape)}")
    encoded = encoded_dtype(spec, encoded)
    # A row may be longer than its message: fixed lengths are known, and messages of variable length contain theirs.
    row = wires[0] if spec.is_variable_length else wires[0, : spec.max_wire_bytes(numel, encoded)]
    check_wire(spec, row, numel, encoded)
    return encoded


def check_sum(spec: CodecSpec, total: Sum) -> None:
    """Check the messages of a sum, and the values that they are added to."""
    check_rows(spec, total.wires, total.numel, total.encoded)
    onto, device = total.onto, total.wires.device
    if onto is None:
        return
    fits = onto.numel() == total.numel and onto.dim() == 1 and onto.is_contiguous() and onto.device == device
    if not fits or onto.dtype not in _FLOATS:
        raise UsageError(
            f"onto should be contiguous, 1-D, of {total.numel} values of float32, bfloat16 or float16 on {device}; it "
            f"is {tuple(onto.shape)} {onto.dtype} on {onto.device}"
        )


def check_wire(spec: CodecSpec, wire: Tensor, numel: int, encoded: torch.dtype) -> None:
    """Check one message of ``numel`` values.

    Raises:
        UsageError: The message is not a contiguous 1-D uint8 tensor.
        WireError: Its length is wrong for this number of values.
    """
    if wire.dtype != torch.uint8 or wire.dim() != 1 or not wire.is_contiguous():
        raise UsageError(
            f"a message should be a contiguous 1-D uint8 tensor, this one is {tuple(wire.shape)} {wire.dtype}"
        )
    expected = spec.max_wire_bytes(numel, encoded)
    if not spec.is_variable_length and wire.numel() != expected:
        raise WireError(
            f"{spec}: a message of {numel} values has {expected} bytes, this one has {wire.numel()}; "
            "decode with the codec and the number of values that it was encoded with"
        )


def check_out(out: Tensor, numel: int, dtype: torch.dtype, device: torch.device) -> None:
    """Check a tensor for decoded values."""
    if dtype not in _FLOATS:
        raise UsageError(f"messages decode to float32, bfloat16 or float16, not to {dtype}")
    if out.dtype != dtype or out.numel() != numel or not out.is_contiguous() or out.device != device:
        raise UsageError(
            f"out should be contiguous, of {numel} values of {dtype} on {device}; it is "
            f"{tuple(out.shape)} {out.dtype} on {out.device}"
        )


def check_feedback(spec: CodecSpec, x: Tensor, lost: Tensor, gain: float) -> None:
    """Check the error feedback of ``x``, which is encoded as fp32."""
    if not 0 < gain <= 1:
        raise UsageError(f"gain = {gain} should be above 0 and at most 1")
    spec.check_dtype(torch.float32)
    check_out(lost, x.numel(), torch.float32, x.device)


def checked_room(out: Tensor | None, nbytes: int, device: torch.device) -> Tensor:
    """Return the first ``nbytes`` of ``out``, or new memory, as 1-D uint8 tensor."""
    if out is None:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    if out.dtype != torch.uint8 or not out.is_contiguous() or out.numel() < nbytes or out.device != device:
        raise UsageError(
            f"out should be contiguous uint8 of at least {nbytes} bytes on {device}; it is "
            f"{tuple(out.shape)} {out.dtype} on {out.device}"
        )
    return out.view(-1)[:nbytes]
