"""Bytes that nobody would write, given to everything that reads bytes of others: codecs, ranks, checkpoints.

A reader must return a value of the right kind, or raise the one error that its callers expect. A crash of the process
ends the command.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from thinwire.agreement import Typed
from thinwire.checkpoint.manifest import MANIFEST_NAME, check_header, decode, seal
from thinwire.checkpoint.store import Alone, Chunk, ShardedVector, verify, write
from thinwire.codecs import Codec, get
from thinwire.errors import CheckpointError, CollectiveError, WireError
from thinwire.report import Sheet
from thinwire.spec.codec import FAMILIES, CodecSpec, encodable_dtypes
from thinwire_bench.chaos.damage import mutated

__all__ = ["Tally", "mutation_sheet", "try_mutations"]

_VALUES: Final = 300
"""Values of a message: not a multiple of any block."""

_SHARES: Final = {"codec messages": 0.5, "messages between ranks": 0.2, "headers": 0.15, "manifests": 0.15}
"""Share of all mutations by kind."""

_OUTCOMES: Final[Typed[Any]] = Typed(tuple[str | None, dict[str, tuple[int, str | None, list[tuple[int, int]]]]])


@dataclass
class Tally:
    """What became of the mutations of one kind.

    Attributes:
        kind: What was mutated.
        accepted: Number that were read as a value of the right kind.
        refused: Number that raised the error that is meant for them.
        slowest: Longest time of one, in seconds.
        wrong: The first few that ended in any other way, in words.
    """

    kind: str
    accepted: int = 0
    refused: int = 0
    slowest: float = 0.0
    wrong: tuple[str, ...] = ()

    @property
    def number(self) -> int:
        """How many there were."""
        return self.accepted + self.refused + len(self.wrong)

    def record(self, read: Callable[[bytes], object], raw: bytes, refusal: type[Exception], what: str) -> None:
        """Read bytes, and count how it ends."""
        began = time.perf_counter()
        try:
            read(raw)
            self.accepted += 1
        except refusal:
            self.refused += 1
        except Exception as error:
            self.wrong = (*self.wrong, f"{type(error).__name__}: {error} from {what}: {raw[:4096]!r}")
        self.slowest = max(self.slowest, time.perf_counter() - began)


def try_mutations(count: int, seed: int) -> list[Tally]:
    """Mutate messages, headers and manifests, and read them.

    Args:
        count: Number of mutations of all kinds together.
        seed: Of everything that is drawn.

    Returns:
        A tally for each kind.
    """
    tries = {
        "codec messages": _codec_messages,
        "messages between ranks": _rank_messages,
        "headers": _headers,
        "manifests": _manifests,
    }
    tallies = []
    for kind, share in _SHARES.items():
        tally = Tally(kind)
        tries[kind](tally, round(share * count), random.Random(f"{seed} {kind}"))
        tallies.append(tally)
    return tallies


def mutation_sheet(tallies: Sequence[Tally]) -> Sheet:
    """The tallies as a table."""
    return Sheet(
        title=f"{sum(tally.number for tally in tallies):,} mutations",
        columns=("what", "mutated", "read", "refused", "anything else", "slowest, ms"),
        words=1,
        rows=[
            [
                tally.kind,
                *(f"{number:,}" for number in (tally.number, tally.accepted, tally.refused, len(tally.wrong))),
                f"{1e3 * tally.slowest:.0f}",
            ]
            for tally in tallies
        ],
    )


def _bytes_like(sound: bytes, chance: random.Random) -> bytes:
    """Bytes with a few changes: bits, values, a cut, an excess, a part from elsewhere, or none of them the same."""
    raw = bytearray(sound)
    kind = chance.randrange(8)
    if kind == 0:
        return bytes(raw[: chance.randrange(len(raw) + 1)])
    if kind == 1:
        return bytes(raw) + chance.randbytes(chance.randrange(1, 64))
    if kind == 2:
        return chance.randbytes(len(raw))
    if kind == 3 and len(raw) > 1:
        start = chance.randrange(len(raw))
        length = chance.randrange(1, 32)
        raw[start : start + length] = chance.choice((b"\x00", b"\xff", b"\x7f")) * len(raw[start : start + length])
        return bytes(raw)
    for _ in range(chance.choice((1, 1, 2, 8))):
        raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
    return bytes(raw)


def _codec_messages(tally: Tally, count: int, chance: random.Random) -> None:
    """Messages of every codec and element type, read by the backend of this machine and, some, by the reference."""
    torch.manual_seed(chance.randrange(2**32))
    known = [
        (get(spec, backend=backend), dtype, bytes(get(spec).encode(_sample(dtype), seed=1).tolist()))
        for family in FAMILIES.values()
        for name in family.examples
        for spec in [CodecSpec(name)]
        for dtype in (getattr(torch, kind) for kind in encodable_dtypes(spec))
        for backend in ("cpp", "cpp", "cpp", "cpp", "cpp", "reference")
    ]
    for codec, dtype, sound in itertools.islice(itertools.cycle(chance.sample(known, len(known))), count):
        message = _bytes_like(sound, chance)

        tally.record(functools.partial(_decode, codec, dtype), message, WireError, f"{codec.spec} of {dtype}")


def _decode(codec: Codec, dtype: torch.dtype, message: bytes) -> None:
    wire = torch.tensor(bytearray(message), dtype=torch.uint8)
    values = codec.decode(wire, _VALUES, dtype)
    if values.shape != (_VALUES,) or values.dtype != dtype:
        raise TypeError(f"decoded to {tuple(values.shape)} values of {values.dtype}")


def _sample(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(_VALUES).to(dtype)


def _rank_messages(tally: Tally, count: int, chance: random.Random) -> None:
    """Values that ranks tell each other before a save."""
    value = (None, {"model/a": (12, "float32", [(0, 6), (6, 6)]), "optimizer/b": (3, None, [])})
    sound = _OUTCOMES.encode(value)
    for _ in range(count):
        message = _mutated_json(sound, chance) if chance.random() < 0.5 else _bytes_like(sound, chance)
        tally.record(_OUTCOMES.decode, message, CollectiveError, "a message")


def _mutated_json(sound: bytes, chance: random.Random) -> bytes:
    return json.dumps(mutated({"x": json.loads(sound)}, chance).get("x")).encode()


def _manifests(tally: Tally, count: int, chance: random.Random) -> None:
    """Manifests with a right checksum and other contents, and some with bytes changed behind it."""
    with _checkpoint() as place:
        sound = (place / MANIFEST_NAME).read_bytes()
    body = json.loads(sound)["body"]
    for _ in range(count):
        raw = seal(mutated(body, chance)) if chance.random() < 0.8 else _bytes_like(sound, chance)
        tally.record(functools.partial(decode, where="manifest"), raw, CheckpointError, "a manifest")


def _headers(tally: Tally, count: int, chance: random.Random) -> None:
    """Headers of safetensors files, with a right length and other contents, and with bytes changed anywhere."""
    with _checkpoint() as place:
        manifest = verify(place)
        (file,), (contents,) = manifest.files, manifest.contents()
        path = place / file.name
        sound = path.read_bytes()
        length = int.from_bytes(sound[:8], "little")
        fields, data = json.loads(sound[8 : 8 + length]), sound[8 + length :]
        for _ in range(count):
            if chance.random() < 0.5:
                header = json.dumps(mutated(fields, chance)).encode()
                raw = len(header).to_bytes(8, "little") + header + data
            else:
                raw = _bytes_like(sound[: 8 + length], chance) + data
            path.write_bytes(raw)
            tally.record(lambda file: check_header(path, len(file), contents), raw, CheckpointError, "a header")


@contextlib.contextmanager
def _checkpoint() -> Iterator[Path]:
    """A small checkpoint of one file, in memory if the system has a place for that; gone after the block."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as directory:
        place = Path(directory) / "checkpoint"
        vectors = {
            key: ShardedVector(numel, (Chunk(0, torch.arange(numel, dtype=dtype)),))
            for key, numel, dtype in (("model/a", 12, torch.float32), ("model/b", 7, torch.int64))
        }
        values: Any = {"num_steps": 3, "extra": {"position": {"step": 3, "samples": 24}}, "groups": [{"lr": 0.1}]}
        write(place, vectors, values, control=Alone())
        yield place
