"""Codecs of other packages, as far as a plan and the planner must know them: names, sizes and properties, no torch.

A package registers a :class:`CodecPlugin` under the entry point group :data:`GROUP`; ``docs/add-a-codec.md`` shows how.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from thinwire.errors import SpecError

GROUP = "thinwire.codecs"
"""The entry point group. An entry's name is the codec's name in plans."""

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_DTYPES = ("float32", "bfloat16", "float16")


def _takes_none(parameters: str) -> str:
    if parameters:
        raise ValueError(f"it takes no parameters, not {parameters!r}")
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecPlugin:
    """A codec of another package. Plans name it ``NAME`` or ``NAME:PARAMETERS``.

    Attributes:
        name: the codec's name in plans: lower-case letters, digits and underscores.
        version: version of the codec's wire format. All ranks of a job must have the same one.
        implementation: ``"package.module:Class"``, a subclass of :class:`thinwire.codecs.Codec`. It is imported only
            where tensors are encoded, so only that module may import torch.
        wire_bytes: from the parameters, the number of values and the bytes of one value, the size of the message in
            bytes; for a codec of variable length, its largest size.
        canonical: from the parameters as written, the one spelling that stands for them; raises ``ValueError`` with
            the reason if they are invalid. By default a codec takes no parameters.
        examples: texts of the codec that ``thinwire profile`` measures and :func:`thinwire.testing.check_codec` checks.
        dtypes: names of the dtypes that the codec encodes.
        lossless: whether decoding returns exactly what was encoded. The message is then decoded to that dtype only.
        variable_length: whether the size of a message depends on the values.
        needs_seed: whether encoding takes a seed.
        max_error: for a codec with loss, the largest error of a value, as a share of the largest magnitude in the
            tensor, for normally distributed values.
        typical_ratio: for a codec of variable length, bytes of the tensor over bytes of its message as they usually
            come out. The planner uses it.
        bytes_per_second: speed of encoding and of decoding, in bytes of the tensor per second on one rank. The planner
            uses it where no profile holds a measurement; without either it refuses to price the codec.
    """

    name: str
    version: str
    implementation: str
    wire_bytes: Callable[[str, int, int], int]
    canonical: Callable[[str], str] = _takes_none
    examples: tuple[str, ...]
    dtypes: tuple[str, ...] = _DTYPES
    lossless: bool = False
    variable_length: bool = False
    needs_seed: bool = False
    max_error: float | None = None
    typical_ratio: float | None = None
    bytes_per_second: float | None = None

    def problems(self) -> list[str]:
        """What is wrong with the declaration itself, in one sentence each."""
        module, _, attribute = self.implementation.partition(":")
        named, loss = _NAME.fullmatch(self.name), self.max_error or 0
        known, ratio = self.dtypes and set(self.dtypes) <= set(_DTYPES), self.typical_ratio or 0
        speed = self.bytes_per_second
        sound = {
            f"name = {self.name!r} should be lower-case letters, digits and underscores": named,
            "version should be text that is not empty": self.version,
            f"implementation = {self.implementation!r} should be 'package.module:Class'": module and attribute,
            f"dtypes = {self.dtypes!r} should be some of {', '.join(_DTYPES)}": known,
            "examples should hold at least one text of the codec": self.examples,
            "max_error should be above 0 for a codec with loss": self.lossless or loss > 0,
            "typical_ratio should be above 0 for a codec of variable length": not self.variable_length or ratio > 0,
            "bytes_per_second should be above 0, or None if the speed is not known": speed is None or speed > 0,
        }
        return [sentence for sentence, is_sound in sound.items() if not is_sound]


@functools.cache
def _entries() -> dict[str, tuple[EntryPoint, ...]]:
    entries: dict[str, tuple[EntryPoint, ...]] = {}
    for entry in entry_points(group=GROUP):
        entries[entry.name] = (*entries.get(entry.name, ()), entry)
    return entries


def installed_plugins() -> dict[str, str]:
    """Names of the codecs that other packages register, each with its package and the package's version."""
    return {name: " and ".join(map(_package, entries)) for name, entries in sorted(_entries().items())}


def forget_plugins() -> None:
    """Look for installed packages again at the next use, for example after one was installed into this process."""
    _entries.cache_clear()
    _loaded.cache_clear()


def plugin_of(name: str) -> CodecPlugin | None:
    """The codec that another package registers under a name; ``None`` if no package does.

    Raises:
        SpecError: if two packages register the name, or what is registered is no valid :class:`CodecPlugin`.
    """
    return _loaded(name) if name in _entries() else None


@functools.cache
def _loaded(name: str) -> CodecPlugin:
    entry, *others = _entries()[name]
    if others:
        raise SpecError(
            "codec", f"{name!r} is registered by {installed_plugins()[name]}: uninstall all but one of these packages"
        )
    had_torch = "torch" in sys.modules
    try:
        plugin = entry.load()
    except (ImportError, AttributeError) as error:
        raise SpecError("codec", f"{name!r} of {_package(entry)}: {entry.value} cannot be loaded: {error}") from error
    if not isinstance(plugin, CodecPlugin):
        made = type(plugin).__name__
        raise SpecError("codec", f"{name!r} of {_package(entry)}: {entry.value} is {made}, expected a CodecPlugin")
    problems = plugin.problems()
    if plugin.name != name:
        problems.append(f"its entry point is named {name!r} and the codec {plugin.name!r}: use one name")
    if "torch" in sys.modules and not had_torch:
        problems.append(f"{entry.module} imports torch: move what needs it to the module of its implementation")
    if problems:
        raise SpecError("codec", [f"{name!r} of {_package(entry)}: {problem}" for problem in problems])
    return plugin


def _package(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.module
