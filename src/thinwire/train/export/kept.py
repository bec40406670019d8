"""Copies of a model's configuration and tokenizer in the run's directory, so that it can be exported when the originals
are gone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from thinwire.errors import DataError
from thinwire.spec.recipe import Recipe
from thinwire.train.data.packing import Dataset
from thinwire.train.data.tokenizer import Tokenizer
from thinwire.train.directory import RunDirectory, copy_atomically, write_json, writing

TOKENIZER_FILES: Final = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files that may accompany a ``tokenizer.json``."""

GENERATION: Final = "generation_config.json"


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
            _copy(home, directory.model, (GENERATION,))
    if dataset.tokenizer is not None:
        copy_atomically(dataset.tokenizer, directory.tokenizer)
        if recipe.data.tokenizer != "bpe":
            named = Path(recipe.data.tokenizer).expanduser()
            _copy(named.parent if named.is_file() else named, directory.model, TOKENIZER_FILES)
    elif home is not None and model.starts_from_files and (home / "tokenizer.json").is_file():
        # Bins without a tokenizer, for a model that has one: its embedding knows these ids and no others.
        copy_atomically(home / "tokenizer.json", directory.tokenizer)
        _copy(home, directory.model, TOKENIZER_FILES)


def kept_config(directory: RunDirectory) -> dict[str, Any]:
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


def write_tokenizer(directory: RunDirectory, to: Path, length: int) -> int | None:
    """Write a run's tokenizer and its model's generation settings, for sequences of at most ``length``, in the format
    of ``transformers``; returns the end-of-text id, or ``None`` if the run has no tokenizer."""
    _copy(directory.model, to, (GENERATION,))
    if not directory.tokenizer.is_file():
        return None
    tokenizer = Tokenizer.load(directory.tokenizer)
    copy_atomically(directory.tokenizer, to / "tokenizer.json")
    _copy(directory.model, to, TOKENIZER_FILES)
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
