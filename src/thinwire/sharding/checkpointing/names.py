"""Names of parameters in checkpoints: those in the model, without what wrappers of modules add to them.

``torch.compile(module)`` and torch's wrapper for recomputation put a module into another one. A checkpoint does not
depend on either: it loads into the model with them and without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Final

from thinwire.checkpoint.manifest import Manifest
from thinwire.checkpoint.strict_json import Json

_WRAPPERS: Final = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What names have more if a module is wrapped; torch leaves it out as well, in ``get_model_state_dict``."""

_BY_NAME: Final = ("shapes", "slices", "encoded", "updated", "group_numbers")
"""Values whose keys are names."""


def stored(key: str) -> str:
    """A key or a name as checkpoints have it."""
    for wrapper in _WRAPPERS:
        key = key.replace(wrapper, "")
    return key


def in_names_of(names: Iterable[str], manifest: Manifest) -> tuple[Manifest, dict[str, str]]:
    """A checkpoint's manifest as if the checkpoint had been saved from a model with these names; those of thinwire 0.2
    have names with wrappers.

    Returns:
        The manifest, and by each of its keys of vectors the key that the files have.
    """
    own = {stored(name): name for name in names}

    def rename(key: str) -> str:
        parts = []
        for part in stored(key).split("/"):
            name, mark, number = (part, "", "") if part in own else part.rpartition("@")
            parts.append(own.get(name, name) + mark + number)
        return "/".join(parts)

    keys = {rename(key): key for key in manifest.vectors}
    vectors = {key: manifest.vectors[real] for key, real in keys.items()}
    reference = manifest.reference
    if reference is not None:
        contents = {rename(key): content for key, content in reference.contents.items()}
        reference = replace(reference, contents=contents)
    return replace(manifest, vectors=vectors, values=renamed(manifest.values, rename), reference=reference), keys


def renamed(values: Mapping[str, Json], rename: Callable[[str], str]) -> dict[str, Json]:
    """Values of a checkpoint with other names in them, and in their keys."""
    return {
        rename(key): {rename(name): value for name, value in entry.items()}
        if key in _BY_NAME and isinstance(entry, Mapping)
        else entry
        for key, entry in values.items()
    }
