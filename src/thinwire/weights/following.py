"""The subscriber: holds the weights of the newest version that it has seen in a store."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from thinwire.collectives.memory import stored_once
from thinwire.errors import UsageError, WireError
from thinwire.sharding.checkpointing.names import stored
from thinwire.sharding.modules.quantized import inner_tensors
from thinwire.weights.kept import KeptVersion
from thinwire.weights.parts import Kind, Name, Piece, complete, decode, split, take, wanted
from thinwire.weights.stores import Store

log = logging.getLogger("thinwire")

_LONGEST_WAIT: Final = 10.0
"""Seconds between two looks at a store that has failed again and again."""

_Key = tuple[str, int, int, Kind]


class Subscriber:
    """Follows a trainer's weights, which ``thinwire.publisher`` writes.

    It begins at an anchor and applies deltas after it. New values are made beside the old ones, verified, and only then
    put in their place: weights are always those of one whole version.

    Args:
        store: A directory, or a URL of fsspec, HTTP among them.
        directory: Where to keep the newest version as ``model.safetensors``, which is replaced as a whole. A subscriber
            that is started again goes on from it.
        keys: Directory of keys that ``thinwire serve-weights`` asks for.

    Attributes:
        version: The version that is held; ``None`` before the first.
        run: The publisher's life that it belongs to.
        step: Optimizer steps that made it.
        nbytes: Bytes that were read.

    Raises:
        UsageError: The URL is of no known kind, or a file, or the directory is another subscriber's, or a model of
            several files.
    """

    def __init__(self, store: str, directory: str | Path | None = None, *, keys: str | Path | None = None) -> None:
        self._store = Store(store, keys).checked()
        self.version: int | None = None
        self.run: str | None = None
        self.step = self.nbytes = 0
        self._tensors: dict[str, torch.Tensor] = {}
        self._fetched: dict[Name, bytes] = {}
        self._writing = threading.Lock()  # who holds it may read the weights, or put a version in their place
        self._kept = None if directory is None else KeptVersion(Path(directory))
        if self._kept is not None:
            try:
                found = self._kept.load()
            except BaseException:
                self.close()
                raise
            if found is not None:
                self.run, self.version, self.step, self._tensors = found
        self._asked: tuple[str, int] | None = None
        self._past = self.run or "", self.version or 0  # only versions after it are taken
        self._taken = self.run, self.version  # the last version that was returned

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The weights, on the CPU, as in the trainer's state dict; later versions change them in place."""
        return dict(self._tensors)

    def fetch(self) -> None:
        """Read what leads to the newest version, so that :meth:`update` need not wait for the store. It changes no
        weights: call it in a thread, while they are in use.

        Raises:
            OSError: The store cannot be read.
        """
        versions = self._listed()
        with self._writing:  # while a version takes the place of another, none is held
            way = self._way(versions)
        listed = set(itertools.chain.from_iterable(versions.values()))
        # What the store has no longer leads nowhere: without an update, it would pile up here.
        self._fetched = {name: content for name, content in self._fetched.copy().items() if name in listed}
        for key in way:
            for name in versions[key]:
                if name not in self._fetched:
                    self._fetched[name] = self._store.read(str(name))

    def update(self, upto: int | None = None, *, fetched: bool = False) -> int | None:
        """Take the newest version that is there; returns its number, or ``None`` if there is no newer one.

        Args:
            upto: The last version to take, for receivers that have to agree on one.
            fetched: Whether to take only what :meth:`fetch` has read, and not to ask the store.

        Raises:
            WireError: There is a newer one, and what leads to it is damaged. The weights stay as they are.
            OSError: The store cannot be read, or the directory cannot be written.
            UsageError: A tensor has a dtype that the file in the directory cannot hold.
        """
        found = complete(self._fetched.copy()) if fetched else self._listed()
        versions = {key: names for key, names in found.items() if upto is None or key[1] <= upto}
        problem: WireError | None = None
        while way := self._way(versions):
            for key in way:
                try:
                    self._apply(key, versions[key])
                except WireError as error:
                    problem = problem or error
                    for name in versions.pop(key):  # another way may lead past it
                        self._fetched.pop(name, None)
                    break
            else:
                break
        if problem is not None and (newest := max(found))[:2] != (self.run, self.version):
            self._ask(newest)
        held = self._fetched.copy().items()
        self._fetched = {name: content for name, content in held if (name.run, name.version) > self._past}
        if self._kept is not None and self.run is not None and self.version is not None:
            self._kept.save(self.run, self.version, self.step, self._tensors)
        if (self.run, self.version) != self._taken:
            self._taken = self.run, self.version
            if problem is not None:
                log.warning("%s: %s; version %d was reached past it", self._store.url, problem, self.version)
            return self.version
        if problem is not None:
            raise problem
        return None

    def _ask(self, newest: _Key) -> None:
        """Ask the publisher for an anchor, once for each version that cannot be reached."""
        if self._asked != newest[:2]:
            self._asked = newest[:2]
            with contextlib.suppress(Exception):  # over HTTP, nothing can be asked
                self._store.write(wanted(newest[0]), b"")

    def follow(self, timeout: float | None = None, *, upto: int | None = None, interval: float = 0.2) -> int | None:
        """Wait for a newer version and take it; returns its number, or ``None`` after ``timeout`` seconds. What is
        damaged, or cannot be read for a while, is waited out, with looks at the store that become rarer, down to one in
        ten seconds: the next anchor leads past it.

        Args:
            timeout: Longest wait, in seconds; ``None`` for ever.
            upto: See :meth:`update`.
            interval: Seconds from one look at the store to the next.

        Raises:
            UsageError: See :meth:`update`.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        said, wait = "", interval
        while True:
            try:
                if (version := self.update(upto)) is not None:
                    return version
                wait = interval
            except (OSError, WireError) as error:
                if str(error) != said:
                    log.warning("%s: %s", self._store.url, error)
                said, wait = str(error), min(2 * wait, _LONGEST_WAIT)
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return None
            time.sleep(wait if left is None else min(wait, left))

    def load_by(self, load: Callable[[Iterable[tuple[str, torch.Tensor]]], object]) -> None:
        """Give the weights to a function that takes names and tensors, as the ``load_weights`` of vLLM's models does.
        Until it returns, no other version takes their place.

        Raises:
            UsageError: There is no version yet.
        """
        with self._writing:
            if self.version is None:
                raise UsageError(f"{self._store.url} has no complete version yet: wait for one with follow()")
            load(self._tensors.items())

    def load_into(self, module: nn.Module) -> None:
        """Copy the weights into a module of the same architecture, whatever its dtype and device.

        Raises:
            UsageError: There is no version yet, or the module has other tensors or DTensors, or is on the meta device.
                It stays as it is.
        """
        self.load_by(lambda weights: _copy(dict(weights), module))

    def close(self) -> None:
        """Let another subscriber keep versions in the directory."""
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    # -- versions ----------------------------------------------------------------------------------------------

    def _listed(self) -> dict[_Key, list[Name]]:
        """The complete versions in the store. A run of which nothing is left there, and which none after it has
        replaced, is followed no longer: the store was emptied, or is another one."""
        held = self._past[0]  # before the store is asked, as another thread may take a run that begins meanwhile
        names = self._store.names()
        versions = complete(names)
        newest = max((run for run, _, _, kind in versions if kind == "anchor"), default="")
        if "" < newest < held and all(name.run != held for name in names):
            with self._writing:
                if self._past[0] == held:
                    log.warning("%s: nothing is left of run %s: following %s", self._store.url, held, newest)
                    self._past, self._fetched = ("", 0), {}
        return versions

    def _way(self, versions: Collection[_Key]) -> list[_Key]:
        """The way to the newest version that can be reached: deltas from the version that is held, or from an anchor
        where those lead less far, as few as possible. Empty if there is nothing newer."""
        newest = max({run for run, _, _, kind in versions if kind == "anchor"} | {self._past[0]})
        held = self.version if self.run == newest else None
        # By version, the best way to it: without an anchor if possible, then the shortest. Parents come first.
        ways: dict[int, list[_Key]] = {} if held is None else {held: []}
        for key in sorted((key for key in versions if key[0] == newest), key=lambda key: (key[1], key[3] == "anchor")):
            _, version, parent, kind = key
            if kind == "delta" and parent not in ways:
                continue
            way = [key] if kind == "anchor" else [*ways[parent], key]
            if version not in ways or _cost(way) < _cost(ways[version]):
                ways[version] = way
        return ways[max(ways)] if ways else []

    @torch.inference_mode(False)  # the tensors are there to be written to, wherever the next version comes
    @torch.no_grad()
    def _apply(self, key: _Key, names: Sequence[Name]) -> None:
        """Take a version.

        Raises:
            WireError: It is damaged, or was made against other weights. The weights stay as they are.
        """
        run, version, _, kind = key
        made: list[tuple[Piece, torch.Tensor]] = []
        step = 0
        for name in names:
            step, pieces, messages = decode(self._read(name))
            for dtype, message in messages.items():
                of_dtype = [piece for piece in pieces if piece.dtype == dtype]
                is_delta = kind == "delta" and of_dtype
                old = torch.cat([piece.read(self._tensor(piece)) for piece in of_dtype]) if is_delta else None
                numel = sum(piece.numel for piece in of_dtype)
                made += split(take(dtype, message, numel, old), of_dtype)
        tensors = self._tensors if kind == "delta" else self._room([piece for piece, _ in made])
        with self._writing:
            self.version = None  # whoever is interrupted here holds no version, and begins at an anchor
            for piece, values in made:
                piece.write(tensors[piece.name], values)
            self._tensors = tensors
            self.run, self.version, self.step = run, version, step
            self._past = run, version

    def _read(self, name: Name) -> bytes:
        content = self._fetched.get(name)
        if content is None:
            try:
                content = self._store.read(str(name))
            except FileNotFoundError as error:
                raise WireError(f"{name} is gone: versions before the last anchor but one are removed") from error
        self.nbytes += len(content)
        return content

    def _tensor(self, piece: Piece) -> torch.Tensor:
        tensor = self._tensors.get(piece.name)
        if tensor is None or not _is_of(tensor, piece):
            raise WireError(f"{piece.name} is {list(piece.shape)} of {piece.dtype} in a delta, and another tensor here")
        return tensor

    def _room(self, pieces: Sequence[Piece]) -> dict[str, torch.Tensor]:
        """Tensors for the pieces of an anchor, which cover all of them; those that are held, where they fit.

        Raises:
            WireError: They do not.
        """
        tensors = {}
        for name, group in itertools.groupby(sorted(pieces, key=_place), key=lambda piece: piece.name):
            of_tensor = list(group)
            first, ends = of_tensor[0], Counter[int]()  # ends by slice
            for piece in of_tensor:
                _, cut, offset = _place(piece)
                if offset != ends[cut] or not _is_alike(piece, first):
                    raise WireError(f"the pieces of {name} in an anchor do not follow each other")
                ends[cut] += piece.numel
            if ends.total() != math.prod(first.shape):
                raise WireError(f"an anchor holds {ends.total()} of {math.prod(first.shape)} values of {name}")
            kept = self._tensors.get(name)
            if kept is None or not _is_of(kept, first):
                kept = torch.empty(first.shape, dtype=first.kind, device="cpu")
            tensors[name] = kept
        return tensors


@torch.no_grad()
def _copy(weights: Mapping[str, torch.Tensor], module: nn.Module) -> None:
    # Extra state, which is none of the weights, may be anything.
    state = [pair for pair in module.state_dict().items() if not pair[0].endswith(_EXTRA_STATE_KEY_SUFFIX)]
    own = dict(inner for name, tensor in state for inner in inner_tensors(stored(name), tensor) if inner[1].numel())
    weights = {name: values for name, values in weights.items() if values.numel()}
    if shells := [name for name, tensor in own.items() if tensor.is_meta]:
        raise UsageError(f"{shells[0]} of the module is on the meta device, without values: call to_empty() first")
    if shares := [name for name, tensor in own.items() if isinstance(tensor, DTensor)]:
        raise UsageError(
            f"{shares[0]} of the module is a DTensor, and load_into() writes whole tensors: give state_dict() to "
            "torch.distributed.checkpoint.state_dict.set_model_state_dict, with full_state_dict=True in its options"
        )
    if differing := _differing(weights, own):
        raise UsageError(f"the module and the weights differ in {', '.join(differing[:3])}: take the same architecture")
    for name, values in weights.items():
        stored_once(own[name]).copy_(stored_once(values, own[name]))


def _differing(weights: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of tensors that a module would not get from weights, or not whole, and why."""
    differing = []
    names: dict[tuple[int, torch.Size], str] = {}  # by place in memory
    for name, values in weights.items():
        if (tensor := own.get(name)) is None:
            differing.append(name)
            continue
        first = names.setdefault((tensor.data_ptr(), tensor.shape), name)
        if tensor.shape != values.shape:
            differing.append(f"{name} ({list(tensor.shape)} in the module, {list(values.shape)} in the weights)")
        elif first != name and not _has_bits_of(values, weights[first]):
            differing.append(f"{name} (tied to {first} in the module)")
    # Tied tensors are published under one of their names.
    return differing + [n for n, each in own.items() if n not in weights and (each.data_ptr(), each.shape) not in names]


def _cost(way: Sequence[_Key]) -> tuple[bool, int]:
    return bool(way) and way[0][3] == "anchor", len(way)


def _place(piece: Piece) -> tuple[str, int, int]:
    """Tensor, slice of it, first element in that."""
    return piece.name, 0 if piece.cut is None else piece.cut.index, piece.offset


def _has_bits_of(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same, NaN being NaN."""
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _is_of(tensor: torch.Tensor, piece: Piece) -> bool:
    return tuple(tensor.shape) == tuple(piece.shape) and tensor.dtype == piece.kind


def _is_alike(a: Piece, b: Piece) -> bool:
    """Whether two pieces are of slices of one tensor."""
    cuts = [None if piece.cut is None else (piece.cut.dim, piece.cut.ways) for piece in (a, b)]
    return (a.shape, a.dtype) == (b.shape, b.dtype) and cuts[0] == cuts[1]
