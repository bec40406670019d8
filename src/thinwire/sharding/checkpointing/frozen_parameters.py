"""Frozen parameters in checkpoints: kept once, in a base that checkpoints refer to, or only referred to.

What they hold is compared by the CRC-32 of each parameter, which a processor computes at the speed of its memory, anew
for each save: nobody has to say that a value has changed. Those of values on a device are kept while the device finds
the same sums of their bits, so that values need not go to the host.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
from torch import nn
from zlib_ng.zlib_ng import crc32, crc32_combine

from thinwire.agreement import Typed
from thinwire.checkpoint.background import PendingSave
from thinwire.checkpoint.bases import Base, base_name, describe_difference
from thinwire.checkpoint.blocks import as_bytes
from thinwire.checkpoint.durable import directory_of
from thinwire.checkpoint.manifest import DTYPES, Content, check_cover, dtype_name
from thinwire.checkpoint.storage import ShardedVector
from thinwire.collectives.group import Control
from thinwire.errors import CheckpointError
from thinwire.sharding.params.write_audit import sum_of_bits

REFERENCE: Final = "reference"

_BLOCK: Final = 32 << 20
"""Bytes that come from a device at a time."""


@dataclass(frozen=True)
class _Piece:
    """A rank's piece of a vector: ``numel`` elements of ``dtype`` from ``offset`` on, and their CRC-32."""

    offset: int
    numel: int
    dtype: str
    crc: int


_PIECES: Final[Typed[dict[str, tuple[int, list[_Piece]]]]] = Typed(dict[str, tuple[int, list[_Piece]]])


@dataclass
class _Known:
    """What this process knows of the frozen parameters of a model.

    Attributes:
        crcs: CRC-32 by key, offset and length of a piece on a device, and what tells that the piece has changed.
        base: Place and name of the base that the last save has referred to.
        save: That save; ``None`` if it is complete.
    """

    crcs: dict[tuple[str, int, int], tuple[tuple[int, int], int]] = field(default_factory=dict)
    base: tuple[Path, str] | None = None
    save: PendingSave | None = None

    def crc_of(self, key: str, offset: int, piece: torch.Tensor) -> int:
        """The CRC-32 of a piece; of one on a device, computed anew if its values may be others."""
        if piece.device.type == "cpu":
            return _crc_of(piece)
        place, mark = (key, offset, piece.numel()), (piece._version, int(sum_of_bits(piece)))
        if place not in self.crcs or self.crcs[place][0] != mark:
            self.crcs[place] = mark, _crc_of(piece)
        return self.crcs[place][1]

    def has(self, place: Path, name: str) -> bool:
        """Whether the last save has succeeded, and referred to this base."""
        complete = self.save is None or (self.save.done() and not self.save.failed)
        return complete and self.base == (place.resolve(), name)


_known: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()


def base_for(
    model: nn.Module, frozen: str | Path | None, path: Path, vectors: Mapping[str, ShardedVector], ranks: Control
) -> Base | None:
    """What a save of these ranks does with frozen parameters, of which ``vectors`` are this rank's pieces: the base to
    write or to refer to; ``None`` without frozen parameters. ``model`` is the first part of the model, and ``frozen``
    what the user said; see :func:`thinwire.save`. Collective."""
    place = path.parent if frozen is None else None if frozen == REFERENCE else directory_of(frozen).absolute()
    known = _known.setdefault(model, _Known())
    contents = _contents(vectors, known.crc_of, ranks)
    if not contents:
        return None
    is_kept = place is None or known.has(place, base_name(contents))
    known.base, known.save = (None if place is None else (place.resolve(), base_name(contents))), None
    return Base(place, contents, None if is_kept else vectors)


def note_save(model: nn.Module, save: PendingSave) -> None:
    """Note which save writes the base that :func:`base_for` has returned."""
    _known[model].save = save


def forget_base(model: nn.Module) -> None:
    """Note that the save failed for which :func:`base_for` was called."""
    _known[model].base = None


def check_present(
    wanted: Mapping[str, Content], vectors: Mapping[str, ShardedVector], path: Path, ranks: Control
) -> None:
    """Check that the model, of whose values ``vectors`` are this rank's pieces, holds what a checkpoint only refers to.
    Collective.

    Raises:
        CheckpointError: A parameter has other values, another type or length; the message names it.
    """
    present = _contents(vectors, _Known().crc_of, ranks)
    for key, content in wanted.items():
        if present.get(key) != content:
            raise CheckpointError(
                f"{path} refers to frozen parameters that were saved nowhere, and this model is another: "
                f"{describe_difference(key, content, present.get(key))}; load the model from the files that the run "
                "began with, before thinwire.shard, under a plan with the run's compute_dtype and frozen.storage"
            )


def _crc_of(piece: torch.Tensor) -> int:
    crc = 0
    for block in as_bytes(piece).split(_BLOCK):
        crc = crc32(block.cpu().numpy().data, crc)
    return crc


def _contents(
    vectors: Mapping[str, ShardedVector], crc_of: Callable[[str, int, torch.Tensor], int], ranks: Control
) -> dict[str, Content]:
    """What vectors hold, by key, from the pieces of all ranks. Collective."""
    mine = {
        key: (
            vector.numel,
            [
                _Piece(offset, piece.numel(), dtype_name(piece.dtype), crc_of(key, offset, piece))
                for offset, piece in ((chunk.offset, chunk.tensor) for chunk in vector.chunks)
                if piece.numel()
            ],
        )
        for key, vector in vectors.items()
    }
    pieces: dict[str, tuple[int, list[_Piece]]] = {}
    for everyone in ranks.all_gather_typed(mine, _PIECES):
        for key, (numel, of_rank) in everyone.items():
            pieces.setdefault(key, (numel, []))[1].extend(of_rank)
    return {key: _joined(key, numel, of_key) for key, (numel, of_key) in sorted(pieces.items())}


def _joined(key: str, numel: int, pieces: Sequence[_Piece]) -> Content:
    spans = [(piece.offset, piece.numel) for piece in pieces]
    check_cover(spans, numel, f"vector {key!r}: of all ranks' chunks, elements")
    dtype, crc = DTYPES[pieces[0].dtype], 0
    for piece in sorted(pieces, key=lambda one: one.offset):
        crc = crc32_combine(crc, piece.crc, piece.numel * dtype.itemsize)
    return Content(numel, dtype, crc)
