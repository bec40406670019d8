"""The subscriber: holds the weights of the newest version that it has seen in a store."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from thinwire.errors import UsageError, WireError
from thinwire.weights.parts import Kind, Name, Piece, complete, decode, split, take
from thinwire.weights.stores import Store

__all__ = ["Subscriber"]

log = logging.getLogger("thinwire")

_Key = tuple[str, int, int, Kind]


class Subscriber:
    """Follows a trainer's weights, which ``thinwire.publisher`` writes.

    It begins at an anchor and applies deltas after it. New values are made beside the old ones, verified, and only then
    put in their place: weights are always those of one whole version.

    Args:
        store: A directory, or a URL of fsspec, HTTP among them.

    Attributes:
        version: The version that is held; ``None`` before the first.
        run: The publisher's life that it belongs to.
        step: Optimizer steps that made it.
        nbytes: Bytes that were read.
    """

    def __init__(self, store: str) -> None:
        self._store = Store(store)
        self.version: int | None = None
        self.run: str | None = None
        self.step = self.nbytes = 0
        self._tensors: dict[str, torch.Tensor] = {}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The weights, on the CPU, as in the trainer's state dict; later versions change them in place."""
        return dict(self._tensors)

    def update(self) -> int | None:
        """Take the newest version that is there; returns its number, or ``None`` if there is no newer one.

        Raises:
            WireError: There is a newer one, and what leads to it is damaged. The weights stay as they are.
        """
        versions = complete(self._store.names())
        before = self.run, self.version
        problem: WireError | None = None
        for way in self._ways(versions):
            try:
                for key in way:
                    self._apply(versions[key], is_delta=key[3] == "delta")
                    self.run, self.version = key[:2]
                break
            except WireError as error:
                problem = problem or error
                log.warning("version %d of %s: %s", key[1], self._store.url, error)
        if problem is not None and (self.run, self.version) == before:
            raise problem
        return self.version if (self.run, self.version) != before else None

    def follow(self, timeout: float | None = None, *, interval: float = 0.2) -> int | None:
        """Wait for a newer version and take it; returns its number, or ``None`` after ``timeout`` seconds. What is
        damaged, or cannot be read for a while, is waited out: the next anchor leads past it."""
        deadline = None if timeout is None else time.monotonic() + timeout
        said = ""
        while True:
            try:
                if (version := self.update()) is not None:
                    return version
            except (OSError, WireError) as error:
                if str(error) != said:
                    log.warning("%s: %s", self._store.url, error)
                said = str(error)
            if deadline is not None and time.monotonic() >= deadline:
                return None
            time.sleep(interval)

    @torch.no_grad()
    def load_into(self, module: nn.Module) -> None:
        """Copy the weights into a module of the same architecture, whatever its dtype and device.

        Raises:
            UsageError: There is no version yet, or the module has other tensors.
        """
        if self.version is None:
            raise UsageError(f"{self._store.url} has no complete version yet: wait for one with follow()")
        own = module.state_dict()
        if own.keys() != self._tensors.keys():
            some = sorted(own.keys() ^ self._tensors.keys())[:3]
            raise UsageError(f"the module and the weights differ in {', '.join(some)}: take the same architecture")
        for name, tensor in own.items():
            tensor.copy_(self._tensors[name])

    # -- versions ----------------------------------------------------------------------------------------------

    def _ways(self, versions: Mapping[_Key, Sequence[Name]]) -> list[list[_Key]]:
        """Ways to the newest version, the shortest first: deltas from the version that is held, or from an anchor."""
        runs = sorted({key[0] for key in versions if key[3] == "anchor"})
        if not runs or (self.run is not None and runs[-1] < self.run):
            return []
        newest = runs[-1]
        deltas = {key[2]: key for key in versions if key[0] == newest and key[3] == "delta"}

        def after(version: int) -> list[_Key]:
            way = []
            while version in deltas:
                way.append(deltas[version])
                version = deltas[version][1]
            return way

        held = self.version if self.run == newest else None
        ways = [] if held is None else [after(held)]
        for anchor in sorted((key for key in versions if key[0] == newest and key[3] == "anchor"), reverse=True):
            way = [anchor, *after(anchor[1])]
            if held is None or way[-1][1] > held:
                ways.append(way)
        # An anchor, which is longer, is taken where deltas lead less far.
        return sorted((way for way in ways if way), key=lambda way: (-way[-1][1], way[0][3] == "anchor", len(way)))

    def _apply(self, names: Sequence[Name], *, is_delta: bool) -> None:
        """Take a version.

        Raises:
            WireError: It is damaged, or was made against other weights. The weights stay as they are.
        """
        made: list[tuple[Piece, torch.Tensor]] = []
        step = 0
        for name in names:
            try:
                content = self._store.read(str(name))
            except FileNotFoundError as error:
                raise WireError(f"{name} is gone: versions before the last anchor but one are removed") from error
            self.nbytes += len(content)
            step, pieces, messages = decode(content)
            for dtype, message in messages.items():
                of_dtype = [piece for piece in pieces if piece.dtype == dtype]
                old = torch.cat([self._place(piece) for piece in of_dtype]) if is_delta and of_dtype else None
                numel = sum(piece.numel for piece in of_dtype)
                made += split(take(dtype, message, numel, old), of_dtype)
        if not is_delta:
            self._make_room([piece for piece, _ in made])
        for piece, values in made:
            self._place(piece).copy_(values)
        self.step = step

    def _place(self, piece: Piece) -> torch.Tensor:
        tensor = self._tensors.get(piece.name)
        if tensor is None or not _is_of(tensor, piece):
            raise WireError(f"{piece.name} is {list(piece.shape)} of {piece.dtype} in a delta, and another tensor here")
        return tensor.view(-1)[piece.offset : piece.offset + piece.numel]

    def _make_room(self, pieces: Sequence[Piece]) -> None:
        """Have tensors for the pieces of an anchor, which cover all of them.

        Raises:
            WireError: They do not.
        """
        firsts: dict[str, Piece] = {}
        ends: dict[str, int] = {}
        for piece in sorted(pieces, key=lambda piece: (piece.name, piece.offset)):
            if piece.offset != ends.get(piece.name, 0):
                raise WireError(f"the pieces of {piece.name} in an anchor do not follow each other")
            ends[piece.name] = piece.offset + piece.numel
            firsts.setdefault(piece.name, piece)
        for name, piece in firsts.items():
            if ends[name] != math.prod(piece.shape):
                raise WireError(f"an anchor holds {ends[name]} of {math.prod(piece.shape)} values of {name}")
        tensors = {}
        for name, piece in firsts.items():
            kept = self._tensors.get(name)
            fits = kept is not None and _is_of(kept, piece)
            tensors[name] = kept if fits and kept is not None else torch.empty(piece.shape, dtype=piece.kind)
        self._tensors = tensors


def _is_of(tensor: torch.Tensor, piece: Piece) -> bool:
    return tuple(tensor.shape) == tuple(piece.shape) and tensor.dtype == piece.kind
