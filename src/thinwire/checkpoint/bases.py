"""Bases: directories of vectors that several checkpoints refer to instead of holding them.

A base is a checkpoint of its own, so that it appears whole or not at all, and has a checksum of every block. Its name,
``frozen-HASH``, follows from what its vectors hold: who finds a base by name, or any other one, compares the CRC-32 of
each vector that the checkpoint refers to. Nothing here communicates, and nothing deletes a base.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from thinwire.checkpoint.atomic import is_checkpoint, locate
from thinwire.checkpoint.manifest import Content, Manifest, Reference, dtype_name, parse_contents, read_manifest
from thinwire.checkpoint.storage import ShardedVector
from thinwire.errors import CheckpointError

CONTENTS: Final = "contents"
"""Key of the value of a base that says what each of its vectors holds."""

_GLOB: Final = "frozen-" + "[0-9a-f]" * 16


@final
@dataclass(frozen=True)
class Base:
    """Vectors that a checkpoint is to refer to.

    Attributes:
        place: Directory of the bases; ``None`` if the vectors are to be stored nowhere.
        contents: What they hold, by key; equal on all ranks.
        vectors: This rank's chunks of them; ``None``, on all ranks, if a base is known to hold them.
    """

    place: Path | None
    contents: Mapping[str, Content]
    vectors: Mapping[str, ShardedVector] | None


def base_name(contents: Mapping[str, Content]) -> str:
    """The name of the base that is written for these vectors."""
    text = json.dumps({key: content.as_json() for key, content in sorted(contents.items())})
    return f"frozen-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def find_base(places: Sequence[Path], contents: Mapping[str, Content]) -> tuple[Path | None, str | None]:
    """Find a base in these directories that holds vectors, whatever else it holds.

    Returns:
        The base, without symbolic links, or ``None``; and a sentence on the first one that does not hold them.
    """
    problem = None
    for candidate in _candidates(places, base_name(contents)):
        try:
            difference = _difference(read_manifest(candidate)[0], contents, candidate)
        except CheckpointError as error:
            difference = str(error)
        if difference is None:
            return candidate, None
        problem = problem or difference
    return None, problem


def base_of(directory: Path, reference: Reference) -> Path:
    """Find the base that a checkpoint refers to by a path. ``directory`` has no symbolic links.

    Raises:
        CheckpointError: The base is missing, incomplete or corrupt, or another one; the message says where it should
            be, and what differs.
    """
    assert reference.path is not None
    named = Path(os.path.normpath(directory / reference.path))
    # Beside the checkpoint too: whoever copies both puts them next to each other.
    places = list(dict.fromkeys((named.parent, directory.parent)))
    found, problem = find_base(places, reference.contents)
    if found is None:
        where = " or ".join(map(str, places))
        raise CheckpointError(
            f"{directory}: the frozen parameters that it refers to are not there: no {named.name} in {where}"
            f"{f' ({problem})' if problem else ''}; put that directory, or a link to it, next to the checkpoint"
        )
    return found


def _candidates(places: Sequence[Path], name: str) -> Iterator[Path]:
    """The bases in these directories, those of the right name first."""
    for place in places:
        if is_checkpoint(named := locate(place / name)):
            yield named
    for place in places:
        for other in sorted(place.glob(_GLOB)):
            if other.name != name and is_checkpoint(other):
                yield other


def _difference(manifest: Manifest, contents: Mapping[str, Content], where: Path) -> str | None:
    """A sentence on the first vector that the base at ``where`` does not hold; ``None`` if it holds all."""
    held = parse_contents(manifest.values.get(CONTENTS), f"{where}: {CONTENTS}")
    for key, content in contents.items():
        there = held.get(key) if key in manifest.vectors else None
        if there != content:
            return f"{where.name} is another: {describe_difference(key, content, there)}"
    return None


def describe_difference(key: str, saved: Content, present: Content | None) -> str:
    """Say in a few words how a vector differs from what a checkpoint refers to."""
    name = key.partition("/")[2]
    if present is None:
        return f"it has no {name}"
    if (saved.numel, saved.dtype) != (present.numel, present.dtype):
        forms = [f"{content.numel} elements of {dtype_name(content.dtype)}" for content in (present, saved)]
        return f"its {name} has {forms[0]}, not {forms[1]}"
    return f"its {name} has other values"
