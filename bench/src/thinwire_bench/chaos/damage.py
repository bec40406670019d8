"""Damage to a checkpoint on disk: flipped bits, files cut short, and manifests that are changed and sealed again."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from thinwire.checkpoint.manifest import MANIFEST_NAME, seal

_JUNK: Final[tuple[Any, ...]] = (
    None, True, False, 0, 1, -1, 7, 2**40, 2**63, 10**30, 0.5, -0.0, 1e308, "", "x", "0", "a\nb", [], [[]], [0],
    [1, 2], ["x"], {}, {"": 0}, {"x": []},
)  # fmt: skip
"""What takes the place of a part of a manifest."""

_RENAMED: Final = 0.9
_REMOVED: Final = 0.75
_REPLACED: Final = 0.6


def flip(checkpoint: Path, chance: random.Random) -> str:
    """Turn one bit of one file; says which."""
    file = _some_file(checkpoint, chance)
    content = bytearray(file.read_bytes())
    place = chance.randrange(len(content))
    content[place] ^= 1 << chance.randrange(8)
    file.write_bytes(content)
    return f"byte {place} of {file.name}"


def cut_short(checkpoint: Path, chance: random.Random) -> str:
    """Cut one file at a random place, or remove it; says which."""
    file = _some_file(checkpoint, chance)
    if chance.random() < 0.2:
        file.unlink()
        return f"{file.name} removed"
    kept = chance.randrange(file.stat().st_size)
    with file.open("r+b") as opened:
        opened.truncate(kept)
    return f"{file.name} cut to {kept} bytes"


def reseal(checkpoint: Path, chance: random.Random) -> str:
    """Change parts of the manifest, and give it the checksum of what it then holds; says how many bytes it has."""
    manifest = checkpoint / MANIFEST_NAME
    sealed = seal(mutated(json.loads(manifest.read_bytes())["body"], chance))
    manifest.write_bytes(sealed)
    return f"a manifest of {len(sealed)} bytes"


def mutated(body: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """Replace, remove, repeat or rename one to three parts of a JSON object."""
    body = copy.deepcopy(body)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        if not body:
            break
        path = _some_place(body, chance)
        parent: Any = body
        for step in path[:-1]:
            parent = parent[step]
        _change(parent, path[-1], chance)
    return body


def _change(parent: Any, key: Any, chance: random.Random) -> None:
    kind = chance.random()
    if kind < _REPLACED:
        parent[key] = copy.deepcopy(chance.choice(_JUNK))
    elif kind < _REMOVED:
        del parent[key]
    elif kind < _RENAMED and isinstance(parent, dict):
        parent[chance.choice(["x", "", f"{key}@0", str(key)[:-1]])] = parent.pop(key)
    elif isinstance(parent, list):
        parent.insert(chance.randrange(len(parent) + 1), copy.deepcopy(parent[key]))


def _some_place(body: dict[str, Any], chance: random.Random) -> tuple[Any, ...]:
    """The way to a part. Half of all changes are to values, which only their users can judge."""
    inside = [path for path in _places(body) if path[0] == "values" or chance.random() < 0.3]
    return chance.choice(inside or [(next(iter(body)),)])


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _places(item, (*path, key))


def _some_file(checkpoint: Path, chance: random.Random) -> Path:
    return chance.choice(sorted(path for path in checkpoint.iterdir() if path.stat().st_size))
