"""Exact differences of tensors, for receivers that hold the old one. ``docs/wire-format.md`` specifies the bytes.

This is no :class:`~thinwire.codecs.Codec`: a codec's message says everything about its tensor, so that collectives may
send it to anyone. A delta says nothing to a receiver without the old tensor, so no plan can name it as a codec. Islands
hold an old tensor together: :func:`~thinwire.collectives.visible_mean.visible_mean` exchanges deltas from it.
"""

from __future__ import annotations

from typing import Final, final

import torch
from torch import Tensor

import thinwire.codecs.cpp._native as _native
from thinwire.codecs.checks import checked_room
from thinwire.errors import UsageError, WireError

BLOCK: Final = 1 << 17
"""Values of a block, unless another power of two is asked for."""

_LEAST_BLOCK, _MOST_BLOCK = 1 << 6, 1 << 20

NUMBERS: Final = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 4,
}
"""Every dtype that has deltas, with its number in messages."""


@final
class Delta:
    """What turns one tensor into another of the same dtype and number of values, bit for bit.

    Both sides need the old tensor, with the same bits. Every bit pattern comes back: NaN with its payload, infinities,
    zeros of both signs. Messages are short where few values change, and change by few units in the last place. They
    have about the entropy of these steps given the exponents of the old values; they are never longer than the new
    tensor, 32 bytes, and 16 bytes for each block.

    Tensors are on CPU, of fp32, bf16, fp16, fp8 (``float8_e4m3fn``, ``float8_e5m2``), and of any shape. Blocks are
    independent, and worked on by as many threads as torch uses (``set_num_threads``).

    Args:
        block: Values of a block: a power of two from 2^6 to 2^20. What a block costs by itself, some 50 bytes, is
            shared by more values in a larger one.

    Raises:
        UsageError: There are no such blocks.
    """

    def __init__(self, block: int = BLOCK) -> None:
        if not _LEAST_BLOCK <= block <= _MOST_BLOCK or block & (block - 1):
            raise UsageError(f"block = {block} should be a power of two from {_LEAST_BLOCK} to {_MOST_BLOCK}")
        self.block = block

    def max_wire_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """The largest message, in bytes.

        Raises:
            UsageError: There are no deltas of this dtype.
        """
        return _native.delta_bytes(_number(dtype), numel, self.block.bit_length() - 1)

    def encode(self, old: Tensor, new: Tensor, *, out: Tensor | None = None) -> Tensor:
        """The message that turns ``old`` into ``new``.

        Args:
            old: What the receiver holds.
            new: As many values of the same dtype.
            out: Contiguous uint8 tensor of at least :meth:`max_wire_bytes` bytes for the message; by default, the
                message has memory of its own.

        Returns:
            The message, 1-D uint8.

        Raises:
            UsageError: The tensors differ in dtype or number of values, or are not on CPU.
        """
        _check_old(old)
        if new.dtype != old.dtype or new.numel() != old.numel() or new.device != old.device:
            raise UsageError(
                f"new should be of {old.numel()} values of {old.dtype} on {old.device}, as old is; it is "
                f"{tuple(new.shape)} {new.dtype} on {new.device}"
            )
        before, after = old.detach().resolve_neg().contiguous(), new.detach().resolve_neg().contiguous()
        room = checked_room(out, self.max_wire_bytes(old.numel(), old.dtype), old.device)
        nbytes = _native.encode_delta(
            _number(old.dtype),
            before.data_ptr(),
            after.data_ptr(),
            old.numel(),
            self.block.bit_length() - 1,
            room.data_ptr(),
            room.numel(),
            torch.get_num_threads(),
        )
        # The room is as large as the tensor, of which a message takes little.
        return room[:nbytes].clone() if out is None else room[:nbytes]

    def apply(self, old: Tensor, message: Tensor, out: Tensor | None = None) -> Tensor:
        """The new tensor. ``old`` stays as it is.

        Every block is compared with the checksums of the message, of its own bytes and of the values that it makes.

        Args:
            old: The tensor that the message was made against.
            message: Contiguous 1-D uint8, with blocks of any size; other bytes may follow it.
            out: Contiguous tensor of old's dtype and number of values for the result, which shares no memory with
                ``old`` or the message; by default, a new one of old's shape.

        Returns:
            The new tensor: ``out`` if given.

        Raises:
            UsageError: ``old``, the message, or ``out`` is not such a tensor.
            WireError: The message is truncated or damaged, or was made against another tensor. What ``out`` then
                holds is not to be used.
        """
        _check_old(old)
        if message.dtype != torch.uint8 or message.dim() != 1 or not message.is_contiguous() or message.is_cuda:
            raise UsageError(
                f"a message should be a contiguous 1-D uint8 tensor on CPU, this one is {tuple(message.shape)} "
                f"{message.dtype} on {message.device}"
            )
        before = old.detach().resolve_neg().contiguous()
        result = torch.empty_like(before) if out is None else out
        if result.dtype != old.dtype or result.numel() != old.numel() or not result.is_contiguous():
            raise UsageError(
                f"out should be contiguous, of {old.numel()} values of {old.dtype}; it is {tuple(result.shape)} "
                f"{result.dtype}"
            )
        if result.device != old.device or _overlap(result, before) or _overlap(result, message):
            raise UsageError("out should be on CPU, and share no memory with the old tensor or the message")
        try:
            _native.apply_delta(
                _number(old.dtype),
                before.data_ptr(),
                old.numel(),
                message.data_ptr(),
                message.numel(),
                result.data_ptr(),
                torch.get_num_threads(),
            )
        except ValueError as error:
            raise WireError(str(error)) from None
        return result


def _number(dtype: torch.dtype) -> int:
    if dtype not in NUMBERS:
        raise UsageError(f"there are no deltas of {dtype}, but of {', '.join(map(str, NUMBERS))}")
    return NUMBERS[dtype]


def _check_old(old: Tensor) -> None:
    _number(old.dtype)
    if old.device.type != "cpu":
        raise UsageError(f"deltas are of tensors on CPU, this one is on {old.device}")


def _overlap(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes
