"""Exports a run's checkpoint to a directory that ``transformers`` loads, with one tensor in memory at a time.

Tensors are read from the checkpoint, cast and written one by one. The directory gets its name once everything is on
disk. Configuration and tokenizer are copies in the run's directory, so that it can be exported when the originals are
gone.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor

from thinwire.checkpoint.storage import TensorEntry, write_tensors
from thinwire.errors import CheckpointError, DataError, UsageError
from thinwire.sharding.checkpointing.saved_model import SavedModel
from thinwire.spec.plan import Dtype
from thinwire.spec.recipe import Recipe
from thinwire.train.checkpoint import Checkpoint, checkpoints
from thinwire.train.data.packing import Dataset
from thinwire.train.data.tokenizer import Tokenizer
from thinwire.train.directory import RunDirectory, copy_atomically, write_json, writing
from thinwire.train.export.layout import Layout, layout_of_huggingface, layout_of_ours
from thinwire.train.models.build import draft
from thinwire.train.models.fresh import LastMade
from thinwire.train.models.gpt import GPT
from thinwire.train.models.llama import Llama
from thinwire.train.models.loaded import INDEX, SINGLE

_TOKENIZER_FILES: Final = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files that may accompany a ``tokenizer.json``."""

_GENERATION: Final = "generation_config.json"


@final
@dataclass(frozen=True)
class Exported:
    """An exported model, which the class ``architecture`` of ``transformers`` loads; ``averaged`` says whether its
    weights are the average that the run kept."""

    step: int
    architecture: str
    parameters: int
    files: tuple[str, ...]
    num_bytes: int
    tokenizer: bool
    averaged: bool


def export(
    run: RunDirectory,
    to: Path,
    *,
    step: int | None = None,
    dtype: Dtype = "float32",
    max_shard_bytes: int = 5 * 10**9,
    force: bool = False,
) -> Exported:
    """Write a run's model, of its newest checkpoint or that of ``step``, and its tokenizer in the format of
    ``transformers``. A file has at most ``max_shard_bytes``, unless a single tensor is larger. ``force`` replaces a
    model in a directory that is not empty.

    Raises:
        UsageError: There is no such run, or the directory is not empty.
        CheckpointError: The checkpoint is missing or corrupt, or does not fit the run's model, or the disk is full.
        DataError: Files that the run keeps of its model are missing.
    """
    if not run.recipe.is_file():
        raise UsageError(f"{run.path} holds no run: it has no {run.recipe.name}")
    if to.exists() and not to.is_dir():
        raise UsageError(f"{to} is a file; give a directory to write to")
    if to.is_dir() and any(to.iterdir()) and not force:
        raise UsageError(f"{to} is not empty; choose another directory, or add --force to replace the model in it")
    recipe = Recipe.load(run.recipe)
    checkpoint = _chosen(run, step)
    saved = SavedModel(checkpoint.path)
    layout, length = _layout(run, recipe, saved)
    _check_fits(layout, saved, checkpoint)
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{to.name}.", suffix=".part", dir=to.parent))
        try:
            files = _write(staging, layout, saved, getattr(torch, dtype), max_shard_bytes)
            end = _write_tokenizer(run, staging, length)
            write_json(staging / "config.json", _config(layout, dtype, end, own=recipe.data.tokenizer == "bpe"))
            staging.chmod(0o755)
            _publish(staging, to)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(
            f"{to}: cannot export: {error.strerror or error}; free some space or export elsewhere"
        ) from error
    architecture = str(layout.config["architectures"][0])
    size = sum(entry.num_bytes for shard in files.values() for entry in shard)
    parameters = size // getattr(torch, dtype).itemsize
    return Exported(checkpoint.step, architecture, parameters, tuple(files), size, end is not None, saved.averaged)


def _chosen(run: RunDirectory, step: int | None) -> Checkpoint:
    known = {checkpoint.step: checkpoint for checkpoint in checkpoints(run.checkpoints)}
    if not known:
        raise CheckpointError(f"{run.path} has no checkpoint to export; train until the first, see checkpoint.every")
    if step is None:
        step = max(known)
    if step not in known:
        raise CheckpointError(f"--step {step}: {run.path} has checkpoints of steps {', '.join(map(str, known))}")
    return known[step]


def _layout(run: RunDirectory, recipe: Recipe, saved: SavedModel) -> tuple[Layout, int]:
    """Of the run's model; and the longest sequence that it takes."""
    if recipe.model.kind == "huggingface":
        config = _kept_config(run)
        longest = config.get("max_position_embeddings") or config.get("n_positions") or recipe.train.seq
        return layout_of_huggingface(config, str(run.model / "config.json")), int(longest)
    name = next((name for name in ("embed_tokens.weight", "embed_in.weight") if name in saved.shapes), None)
    if name is None:
        raise CheckpointError(f"{run.path}: the checkpoint is of no model of this recipe: it has no embedding")
    rows = saved.shapes[name][0]
    model = draft(recipe.model, vocab=rows, seq=recipe.train.seq, seed=0).model
    assert isinstance(model, Llama | GPT)
    return layout_of_ours(model), model.config.seq


def _check_fits(layout: Layout, saved: SavedModel, checkpoint: Checkpoint) -> None:
    differences = [
        f"{name} is {there or 'missing'} in the checkpoint, {here or 'missing'} in the model"
        for name in {**layout.shapes, **saved.shapes}
        if (there := saved.shapes.get(name)) != (here := layout.shapes.get(name))
    ]
    if differences:
        more = f", and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise CheckpointError(f"{checkpoint.path}: of another model than the run's: {'; '.join(differences[:3])}{more}")


def _config(layout: Layout, dtype: Dtype, end: int | None, *, own: bool) -> dict[str, Any]:
    """The configuration with the end-of-text id. An id that it already has is of the model's original tokenizer."""
    config = {key: value for key, value in layout.config.items() if key not in ("dtype", "torch_dtype")}
    ends = {} if end is None else {"bos_token_id": end, "eos_token_id": end}
    return {**ends, **config, **(ends if own else {}), "torch_dtype": dtype}


# -- copies that a run keeps -----------------------------------------------------------------------------------


def keep_sources(directory: RunDirectory, recipe: Recipe, dataset: Dataset, config: Mapping[str, Any] | None) -> None:
    """Copy the small files that an export needs. One process of the run calls it."""
    model = recipe.model
    with writing(directory.model):
        directory.model.mkdir(exist_ok=True)
    home = None
    if config is not None:
        write_json(directory.config, config)
        home = Path(model.source).expanduser() if isinstance(model.source, str) else None
        home = home.parent if home is not None and home.is_file() else home
        if home is not None:
            _copy(home, directory.model, (_GENERATION,))
    if dataset.tokenizer is not None:
        copy_atomically(dataset.tokenizer, directory.tokenizer)
        if recipe.data.tokenizer != "bpe":
            named = Path(recipe.data.tokenizer).expanduser()
            _copy(named.parent if named.is_file() else named, directory.model, _TOKENIZER_FILES)
    elif home is not None and model.starts_from_files and (home / "tokenizer.json").is_file():
        # Bins without a tokenizer, for a model that has one: its embedding knows these ids and no others.
        copy_atomically(home / "tokenizer.json", directory.tokenizer)
        _copy(home, directory.model, _TOKENIZER_FILES)


def _kept_config(directory: RunDirectory) -> dict[str, Any]:
    """Read the configuration from which a run's Hugging Face model was built.

    Raises:
        DataError: The run has no configuration.
    """
    file = directory.config
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file}, the configuration that the run kept, cannot be read: {error}") from error
    if not isinstance(table, dict):
        raise DataError(f"{file} should hold a JSON object")
    return table


def _write_tokenizer(directory: RunDirectory, to: Path, length: int) -> int | None:
    """Write a run's tokenizer and its model's generation settings, for sequences of at most ``length``, in the format
    of ``transformers``; returns the end-of-text id, or ``None`` if the run has no tokenizer."""
    _copy(directory.model, to, (_GENERATION,))
    if not directory.tokenizer.is_file():
        return None
    tokenizer = Tokenizer.load(directory.tokenizer)
    copy_atomically(directory.tokenizer, to / "tokenizer.json")
    _copy(directory.model, to, _TOKENIZER_FILES)
    if not (to / "tokenizer_config.json").exists():
        end = tokenizer.backend.id_to_token(tokenizer.end)
        about = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": end,  # our documents begin where one has ended
            "eos_token": end,
            "unk_token": None,
            "clean_up_tokenization_spaces": False,
            "model_max_length": length,
        }
        write_json(to / "tokenizer_config.json", about)
    return tokenizer.end


def _copy(source: Path, to: Path, names: tuple[str, ...]) -> None:
    for name in names:
        if (source / name).is_file():
            copy_atomically(source / name, to / name)


# -- files -----------------------------------------------------------------------------------------------------


def _write(
    directory: Path, layout: Layout, saved: SavedModel, dtype: torch.dtype, max_shard_bytes: int
) -> dict[str, list[TensorEntry]]:
    """Write the tensors, by file, and the index of several files."""
    entries = []
    for tensor in layout.tensors:
        stand_in = torch.empty(layout.shapes[tensor.source], dtype=torch.float32, device="meta")
        entries.append(TensorEntry(tensor.name, dtype, tensor.make(stand_in).shape))
    shards = list(_dealt(entries, max_shard_bytes))
    tensors = {tensor.name: tensor for tensor in layout.tensors}
    parameter = LastMade[Tensor]()  # several tensors may be parts of one

    def made(name: str) -> Tensor:
        return tensors[name].make(parameter.of(tensors[name].source, saved.read)).to(dtype)

    written = {}
    for number, shard in enumerate(shards, start=1):
        name = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(directory / name, shard, made, {"format": "pt"})
        written[name] = shard
    if len(written) > 1:
        index = {
            "metadata": {"total_size": sum(entry.num_bytes for entry in entries)},
            "weight_map": {entry.name: name for name, shard in written.items() for entry in shard},
        }
        write_json(directory / INDEX, index)
    return written


def _dealt(entries: Sequence[TensorEntry], max_shard_bytes: int) -> Iterator[list[TensorEntry]]:
    """Consecutive tensors, as many to a file as fit."""
    shard: list[TensorEntry] = []
    size = 0
    for entry in entries:
        if shard and size + entry.num_bytes > max_shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(entry)
        size += entry.num_bytes
    yield shard


def _publish(staging: Path, to: Path) -> None:
    """Give the directory its name; in one that exists, replace the model and leave other files alone.

    The configuration goes first and comes last: meanwhile, and after an interruption, nobody takes a mixture of two
    models for one.
    """
    if not to.exists():
        staging.rename(to)
        return
    names = ("config.json", INDEX, "tokenizer.json", *_TOKENIZER_FILES, _GENERATION)
    for stale in (*(to / name for name in names), *to.glob("model*.safetensors")):
        stale.unlink(missing_ok=True)
    for file in sorted(staging.iterdir(), key=lambda file: file.name == "config.json"):
        file.replace(to / file.name)
