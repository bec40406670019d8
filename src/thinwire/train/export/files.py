"""Exports a run's checkpoint to a directory that ``transformers`` loads, with one tensor in memory at a time.

Tensors are read from the checkpoint, cast and written one by one. The directory gets its name once everything is on
disk.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from thinwire.checkpoint.tensor_files import TensorEntry, write_tensors
from thinwire.errors import CheckpointError, UsageError
from thinwire.sharding.checkpointing.saved_model import SavedModel
from thinwire.spec.plan import Dtype
from thinwire.spec.recipe import Recipe
from thinwire.train.checkpoint import Checkpoint, checkpoints
from thinwire.train.directory import RunDirectory, write_json
from thinwire.train.export.kept import GENERATION, TOKENIZER_FILES, kept_config, write_tokenizer
from thinwire.train.export.layout import Layout, layout_of_huggingface, layout_of_ours
from thinwire.train.models.build import draft
from thinwire.train.models.fresh import LastMade
from thinwire.train.models.gpt import GPT
from thinwire.train.models.llama import Llama
from thinwire.train.models.loaded import INDEX, SINGLE


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
            end = write_tokenizer(run, staging, length)
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
        config = kept_config(run)
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
    names = ("config.json", INDEX, "tokenizer.json", *TOKENIZER_FILES, GENERATION)
    for stale in (*(to / name for name in names), *to.glob("model*.safetensors")):
        stale.unlink(missing_ok=True)
    for file in sorted(staging.iterdir(), key=lambda file: file.name == "config.json"):
        file.replace(to / file.name)
