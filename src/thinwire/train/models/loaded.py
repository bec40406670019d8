"""Initial values from safetensors files: headers are checked first, then each rank reads the parts that it keeps.

Files are mapped into memory, so that only the required parts are read. Nothing is unpickled.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from thinwire.errors import DataError
from thinwire.sharding.memory.initial import Region
from thinwire.train.models.huggingface import PREFIX
from thinwire.train.models.stored import FileTensor, file_tensors, persistent_buffers

SINGLE: Final = "model.safetensors"
"""Name of the weights file of a model that is stored in one file."""

INDEX: Final = "model.safetensors.index.json"
"""Name of the index of a model that is stored in several files; it maps tensors to files."""

_FLOATS: Final = ("F64", "F32", "F16", "BF16")
_MAX_INDEX_BYTES: Final = 64 << 20
_SAMPLE: Final = 1 << 16
_OF_NO_USE: Final = (r"rotary_emb\.inv_freq$", r"\.attn\.(masked_)?bias$", r"\.attention\.(masked_)?bias$")
"""Names of computed tensors that older versions of ``transformers`` saved nevertheless."""


@final
@dataclass(frozen=True)
class _StoredTensor:
    """A tensor in a file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


@final
class LoadedValues:
    """The weights of a Hugging Face model's directory.

    Args:
        directory: Directory with ``model.safetensors``, or with the index and its files.
        model: The whole ``transformers`` model on the meta device. Its persistent buffers are filled when the files are
            opened.
    """

    def __init__(self, directory: Path, model: nn.Module) -> None:
        self._directory, self._model = directory, model
        self._whole = copy.deepcopy(model)  # matches the files even if the model is split before they are opened
        self._sources: dict[str, list[tuple[FileTensor, _StoredTensor]]] = {}
        self._handles: dict[Path, Any] = {}

    def open(self) -> str:
        """Check names, shapes and types of all tensors, from the files' headers; returns a digest of the headers and of
        the files' last bytes.

        Raises:
            DataError: Tensors are missing, have another shape or type, or do not belong to the model.
        """
        held = _headers(self._directory)
        self._sources, problems = _matched(self._whole, held)
        if problems:
            raise DataError(f"{self._directory} does not fit {type(self._whole).__name__}: {'; '.join(problems)}")
        for name, buffer in persistent_buffers(self._model).items():
            region = tuple(slice(0, size) for size in buffer.shape)
            buffer.copy_(self.read(PREFIX + name, region))
        return f"{len(held)} tensors, {_digest(held)}"

    def read(self, name: str, region: Region) -> Tensor:
        """Return a part of a parameter; see :class:`thinwire.sharding.memory.initial.InitialValues`."""
        sources = self._sources[name.removeprefix(PREFIX)]
        whole: Tensor | None = None
        for tensor, held in sources:
            overlap = tensor.overlap(region)
            if overlap is None:
                continue
            here, there = overlap
            value = self._slice(tensor, held, here)
            if len(sources) == 1:
                return value
            if whole is None:
                whole = torch.empty([part.stop - part.start for part in region], dtype=value.dtype, device="cpu")
            place = whole[there]
            place.copy_(value.view(place.shape))
        assert whole is not None, "the tensors cover the parameter"
        return whole

    def _slice(self, tensor: FileTensor, held: _StoredTensor, region: Region) -> Tensor:
        try:
            if held.file not in self._handles:
                self._handles[held.file] = safe_open(held.file, framework="pt", device="cpu")
            handle = self._handles[held.file]
            if not region:
                return handle.get_tensor(tensor.name)  # type: ignore[no-any-return]
            return handle.get_slice(tensor.name)[region]  # type: ignore[no-any-return]
        except (OSError, SafetensorError) as error:
            raise DataError(f"{held.file}: {tensor.name} cannot be read: {error}") from error


def _headers(directory: Path) -> dict[str, _StoredTensor]:
    """List all tensors of a model's files from their headers."""
    if (directory / INDEX).is_file():
        listed = _read_index(directory / INDEX)
        files = sorted(set(listed.values()))
    elif (directory / SINGLE).is_file():
        listed, files = {}, [SINGLE]
    else:
        pickled = any(directory.glob("pytorch_model*.bin"))
        raise DataError(
            f"{directory} holds no {SINGLE} and no {INDEX}"
            + (
                "; its pytorch_model.bin is a pickle, which is never loaded: save it again as safetensors"
                if pickled
                else ""
            )
            + ', or start at random with model.weights = "random"'
        )
    held: dict[str, _StoredTensor] = {}
    for file in files:
        for name, entry in _header(directory / file).items():
            if name in held:
                raise DataError(f"{directory}: {name} is in {held[name].file.name} and in {file}")
            held[name] = entry
    for name, file in listed.items():
        if name not in held or held[name].file.name != file:
            raise DataError(f"{directory / INDEX}: {file} should hold {name} and does not")
    return held


def _header(file: Path) -> dict[str, _StoredTensor]:
    try:
        with safe_open(file, framework="pt", device="cpu") as handle:
            slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
            return {
                name: _StoredTensor(file, tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()
            }
    except (OSError, SafetensorError) as error:
        raise DataError(f"{file} is no complete safetensors file: {error}") from error


def _read_index(file: Path) -> dict[str, str]:
    try:
        if file.stat().st_size > _MAX_INDEX_BYTES:
            raise DataError(f"{file}: {file.stat().st_size} bytes, an index has at most {_MAX_INDEX_BYTES}")
        table = json.loads(file.read_text(encoding="utf-8"))
        listed = table["weight_map"]
    except (OSError, ValueError, RecursionError, TypeError, KeyError) as error:
        raise DataError(f"{file} is no readable index of safetensors files: {error!r}") from error
    if not isinstance(listed, dict):
        raise DataError(f"{file}: weight_map should be an object")
    for name, part in listed.items():
        if not isinstance(part, str) or Path(part).name != part or not part.endswith(".safetensors"):
            raise DataError(f"{file}: {name} lies in {part!r}, which is not the plain name of a .safetensors file")
    return listed


def _matched(
    model: Any, held: Mapping[str, _StoredTensor]
) -> tuple[dict[str, list[tuple[FileTensor, _StoredTensor]]], list[str]]:
    """Match parameters with tensors of files. Returns the sources, and one phrase for each kind of problem."""
    expected: dict[str, list[FileTensor]] = {}
    for tensor in file_tensors(model):
        expected.setdefault(tensor.source, []).append(tensor)
    aliases = _aliases(model)
    base = f"{getattr(model, 'base_model_prefix', '')}."
    sources: dict[str, list[tuple[FileTensor, _StoredTensor]]] = {}
    missing, wrong, used = [], [], set()
    for source, tensors in expected.items():
        stored = next(
            (
                candidate
                for candidate in _candidates(source, tensors, aliases.get(source, ()), base)
                if all(tensor.name in held for tensor in candidate)
            ),
            None,
        )
        if stored is None:
            missing += [tensor.name for tensor in tensors if tensor.name not in held]
            continue
        sources[source] = [(tensor, held[tensor.name]) for tensor in stored]
        used |= {tensor.name for tensor in stored}
        for tensor, entry in sources[source]:
            if entry.shape != tensor.shape:
                wrong.append(f"{tensor.name} is {list(entry.shape)} in the files, {list(tensor.shape)} in the model")
            elif entry.dtype not in _FLOATS:
                wrong.append(f"{tensor.name} is {entry.dtype} in the files; valid are {', '.join(_FLOATS)}")
    tied = {name for names in aliases.values() for name in names}
    ignored = (*_OF_NO_USE, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()))
    surplus = [
        name
        for name in held
        if name not in used
        and not {name, base + name} & tied
        and not any(re.search(pattern, name) for pattern in ignored)
    ]
    problems = [
        *_phrase("missing", missing),
        *_phrase("of another shape or type", wrong),
        *_phrase("unexpected", surplus),
    ]
    return sources, problems


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    """Other names of tied parameters, by their first name."""
    first: dict[int, str] = {}
    found: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        if known != name:
            found.setdefault(known, []).append(name)
    return found


def _candidates(
    source: str, tensors: Sequence[FileTensor], aliases: Sequence[str], base: str
) -> Iterable[Sequence[FileTensor]]:
    """Names under which a parameter may be stored: as it is saved today, or whole under its own name or a tied one, and
    each of these without the prefix of the model without head."""
    forms = [list(tensors)]
    shape = tuple(max(t.region[dim].stop for t in tensors) for dim in range(len(tensors[0].region)))
    region = tuple(slice(0, size) for size in shape)
    forms += [[FileTensor(name, shape, source, region, tuple(range(len(shape))))] for name in (source, *aliases)]
    for form in forms:
        yield form
        if all(tensor.name.startswith(base) for tensor in form):
            yield [
                FileTensor(tensor.name.removeprefix(base), tensor.shape, source, tensor.region, tensor.dims)
                for tensor in form
            ]


def _phrase(what: str, names: Sequence[str]) -> list[str]:
    if not names:
        return []
    more = f", and {len(names) - 3} more" if len(names) > 3 else ""
    return [f"{len(names)} {what}: {', '.join(names[:3])}{more}"]


def _digest(held: Mapping[str, _StoredTensor]) -> str:
    """Digest of all headers and of the last bytes of each file, which differ for other weights of the same shapes."""
    digest = hashlib.blake2b(digest_size=6)
    digest.update(repr(sorted((name, entry.shape, entry.dtype) for name, entry in held.items())).encode())
    for file in sorted({entry.file for entry in held.values()}):
        size = file.stat().st_size
        with file.open("rb") as stream:
            stream.seek(max(0, size - _SAMPLE))
            digest.update(stream.read(_SAMPLE) + size.to_bytes(8, "little"))
    return digest.hexdigest()
