"""Top-k per chunk, with two bits for each value that travels. ``docs/wire-format.md`` specifies the bytes.

What does not travel is lost, unless error feedback keeps it: this codec is for exchanges with error feedback.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from thinwire.codecs.bits import pack, store, unpack
from thinwire.codecs.codec import Codec
from thinwire.spec.topk import CHUNK, field_bytes, kept


@final
class TopK(Codec):
    """Sends sign and one of two magnitudes for the largest values of each chunk of 4096, and their places."""

    def _encode(self, x: Tensor, wire: Tensor, seed: int) -> int:
        del seed
        numel = x.numel()
        codes, places, scales = self._fields(wire, numel)
        parts = [_encoded(rows, count) for rows, count in self._chunks(x.float(), numel)]
        code, place, scale = (torch.cat([part[i].reshape(-1) for part in parts]) for i in range(3))
        _fill(codes, pack(code, 2))
        _fill(places, pack(place, 12))
        _fill(scales, scale.view(torch.uint8))
        return self.max_wire_bytes(numel, x.dtype)

    def _decode(self, wire: Tensor, out: Tensor, encoded: torch.dtype, *, add: bool) -> None:
        del encoded
        numel = out.numel()
        codes, places, scales = self._fields(wire, numel)
        code, place = unpack(codes, 2), unpack(places, 12)
        # Messages may lie at any address, at which fp32 cannot be read.
        scale = scales.clone().view(torch.float32)[: 2 * -(-numel // CHUNK)].view(-1, 2)
        values, done, chunk = torch.zeros(numel, dtype=torch.float32, device=out.device), 0, 0
        for rows, count in self._chunks(values, numel):
            end = done + rows.shape[0] * count
            own = scale[chunk : chunk + rows.shape[0]]
            _decoded(rows, code[done:end].view(-1, count), place[done:end].view(-1, count), own)
            done, chunk = end, chunk + rows.shape[0]
        store(values, out, add=add)

    def _chunks(self, x: Tensor, numel: int) -> list[tuple[Tensor, int]]:
        """Whole chunks as rows and the rest as one row, each with the number of values that travel of a row."""
        whole, rest = kept(self.spec.parameters, numel)
        end = numel // CHUNK * CHUNK
        parts = [(x[:end].view(-1, CHUNK), whole), (x[end:].view(1, -1), rest)]
        return [(rows, count) for rows, count in parts if rows.numel()]

    def _fields(self, wire: Tensor, numel: int) -> tuple[Tensor, Tensor, Tensor]:
        """The parts of a message: codes, places and magnitudes, each with its padding."""
        sizes = field_bytes(self.spec.parameters, numel)
        codes, places, scales = wire[: sum(sizes)].split(list(sizes))
        return codes, places, scales


def _encoded(rows: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes and places of the largest values of each row, in the order of their places, and the two magnitudes."""
    magnitudes = rows.abs()
    place = magnitudes.topk(count, dim=1, sorted=False).indices.sort(dim=1).values
    value = rows.gather(1, place)
    magnitude = value.abs().double()  # their sum may be beyond fp32
    upper = magnitude > magnitude.mean(dim=1, keepdim=True)
    number = upper.sum(dim=1)
    high = (magnitude * upper).sum(dim=1) / number.clamp(min=1)
    low = (magnitude * ~upper).sum(dim=1) / (count - number).clamp(min=1)
    scale = torch.stack((low, high), dim=1).float()
    # The sum of magnitudes is finite exactly if all values are: a row with another value becomes NaN as a whole.
    scale[~magnitudes.double().sum(dim=1).isfinite()] = torch.nan
    return upper.int() | (value < 0).int() << 1, place.int(), scale


def _decoded(rows: Tensor, code: Tensor, place: Tensor, scale: Tensor) -> None:
    """Fill rows of zeros with the values that were sent; a damaged message has any places."""
    magnitude = torch.where((code & 1).bool(), scale[:, 1:], scale[:, :1])
    value = torch.where((code & 2).bool(), -magnitude, magnitude)
    rows.scatter_(1, place.clamp(max=rows.shape[1] - 1).long(), value)
    rows[scale.isnan().any(dim=1)] = torch.nan


def _fill(field: Tensor, content: Tensor) -> None:
    """Write a part of a message, and zeros behind it."""
    field[: content.numel()] = content
    field[content.numel() :] = 0
