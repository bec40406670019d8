"""P shards of frozen parameters that are kept encoded (``frozen.storage``).

A shard is one message of a codec of independent blocks. No block holds elements of two parameters or of two shards, so
every parameter becomes the same blocks under any plan: those of its values in compute dtype, row by row, completed with
zeros. What reads or writes a parameter outside of passes gets decoded values. They are encoded before the parameter is
computed with again; blocks that hold what they held before stay as they are.
"""

from __future__ import annotations

import weakref

import torch

from thinwire.codecs import Codec
from thinwire.program import padded
from thinwire.program.shares import ALIGNMENT_BYTES
from thinwire.sharding.memory.layout import FlatLayout, Run


class StoredShard:
    """A P shard that is kept as a message, uint8, which may lie on the host. Values are encoded and decoded on
    ``device``, in blocks of ``block`` elements."""

    def __init__(self, codec: Codec, layout: FlatLayout, message: torch.Tensor, device: torch.device) -> None:
        assert codec.spec.block is not None
        assert codec.spec.bits is not None
        self.message, self.block, self.dtype, self.device = message, codec.spec.block, layout.dtype, device
        self._codec, self._bits, self._numel = codec, codec.spec.bits, layout.shard_numel
        self._pieces: list[StoredPiece] = []

    def fill(self, values: torch.Tensor) -> None:
        """Encode the values of the whole shard, ``[layout.shard_numel]``."""
        self.message.copy_(self._codec.encode(values.to(self.device, self.dtype)))

    def codes(self, run: Run) -> torch.Tensor:
        """The codes of the blocks of a run that begins with a block, uint8; a view."""
        begin = run.start * self._bits // 8
        return self.message[begin : begin + self._whole(run) * self._bits // 8]

    def scales(self, run: Run) -> torch.Tensor:
        """The scales of the blocks of a run that begins with a block, fp32; a view."""
        first, behind = run.start // self.block, padded(self._numel * self._bits // 8, ALIGNMENT_BYTES)
        blocks = self.message[behind : behind + 4 * (self._numel // self.block)].view(torch.float32)
        return blocks[first : first + self._whole(run) // self.block]

    def read(self, run: Run) -> torch.Tensor:
        """Decode a run that begins with a block: new values, 1-D, in compute dtype on the device."""
        return decoded(self._codec, self.codes(run), self.scales(run), self.dtype, self.device)[: run.length]

    def write(self, run: Run, values: torch.Tensor) -> None:
        """Encode new values of a run that is a parameter's."""
        before, after = (self._in_blocks(each) for each in (self.read(run), values.to(self.device, self.dtype)))
        changed = ((before != after) & ~(before.isnan() & after.isnan())).any(1).to(self.message.device)
        encoded = self._codec.encode(after).to(self.message.device)
        codes, scales = self.codes(run).view(len(changed), -1), self.scales(run)
        behind = padded(codes.numel(), ALIGNMENT_BYTES)
        codes.copy_(torch.where(changed[:, None], encoded[: codes.numel()].view_as(codes), codes))
        fresh = encoded[behind : behind + scales.nbytes].view(torch.float32)
        scales.copy_(torch.where(changed, fresh, scales))

    def piece(self, run: Run | None) -> StoredPiece:
        """A parameter's values in this shard; ``None`` for a parameter without any."""
        self._pieces.append(StoredPiece(self, run))
        return self._pieces[-1]

    def take_edits(self) -> None:
        """Encode what was written to pieces since the last time; also after another change of the message."""
        for piece in self._pieces:
            piece.put_back()

    def _whole(self, run: Run) -> int:
        return padded(run.length, self.block)

    def _in_blocks(self, values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(values, (0, -len(values) % self.block)).view(-1, self.block)


class StoredPiece:
    """The decoded values of a parameter in a shard: 1-D, the same tensor as long as anybody holds it, or changes it."""

    def __init__(self, shard: StoredShard, run: Run | None) -> None:
        self._shard, self._run = shard, run
        self._edited: torch.Tensor | None = None
        self._given: weakref.ref[torch.Tensor] | None = None

    def __call__(self) -> torch.Tensor:
        """The values."""
        given = self._given() if self._given is not None else None
        if given is None:
            run = self._run
            given = self._shard.read(run) if run else torch.empty(0, dtype=self._shard.dtype, device=self._shard.device)
            self._given = weakref.ref(given)
        return given

    def edit(self) -> None:
        """Note that the values change."""
        self._edited = self()

    def put_back(self) -> None:
        """Encode the values, if they have changed. Later reads see what the shard then holds."""
        if self._edited is not None and self._run is not None:
            self._shard.write(self._run, self._edited)
        self._edited = self._given = None


def decoded(
    codec: Codec, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Decode whole blocks on the codec's device, from their codes, uint8, and scales, fp32: the values, 1-D."""
    assert codec.spec.block is not None
    numel = len(scales) * codec.spec.block
    message = torch.zeros(codec.spec.slot_bytes(numel, dtype), dtype=torch.uint8, device=device)
    behind = padded(codes.numel(), ALIGNMENT_BYTES)
    message[: codes.numel()].copy_(codes)
    message[behind : behind + scales.nbytes].copy_(scales.view(torch.uint8))
    return codec.decode(message, numel, dtype)
