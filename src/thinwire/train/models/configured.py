"""Builds any Hugging Face model that predicts the next token, from a directory or from a configuration."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from thinwire.errors import DataError, UsageError
from thinwire.extras import missing_sentence
from thinwire.sharding.memory.initial import InitialValues, parameters_on_meta
from thinwire.spec.models.huggingface import FLOAT
from thinwire.spec.recipe import ModelRecipe
from thinwire.train.models.fresh import InitializedValues
from thinwire.train.models.huggingface import HuggingFaceCausal
from thinwire.train.models.loaded import LoadedValues

_LONGEST: Final = 300
"""Characters of somebody else's message: transformers names every architecture it knows."""


def draft_huggingface(
    recipe: ModelRecipe, config: Mapping[str, Any], *, seed: int
) -> tuple[HuggingFaceCausal, InitialValues]:
    """Build the model of a configuration, with parameters on the meta device, and say where their values are: in the
    directory's safetensors files, or made from a seed by the model's own initialiser.

    Raises:
        DataError: The configuration describes no causal language model.
    """
    what = "model.config" if recipe.path is None else f"model.path = {recipe.path}"
    model = causal_on_meta(config, what)
    values: InitialValues
    if recipe.starts_from_files:
        assert recipe.path is not None, "a rule of the recipe"
        values = LoadedValues(Path(recipe.path).expanduser(), model)
    else:
        skeleton = causal_on_meta(config, what)
        values = InitializedValues(skeleton, _initializer(skeleton), seed)
    return HuggingFaceCausal(model), values


def _initializer(model: nn.Module) -> Callable[[nn.Module], None]:
    """What initialises one module: the method of the innermost ``transformers`` model around it, as in
    ``transformers`` itself. A vision tower, and some text models, have rules of their own."""
    methods: dict[int, Callable[[nn.Module], None]] = {}

    def walk(module: nn.Module, method: Any) -> None:
        method = getattr(module, "_init_weights", method)
        methods[id(module)] = method
        for child in module.children():
            walk(child, method)

    walk(model, None)
    return lambda module: methods[id(module)](module)


def _untagged(value: Any) -> Any:
    """A configuration with its infinities and NaN."""
    if isinstance(value, Mapping):
        if set(value) == {FLOAT}:
            return float(value[FLOAT])
        return {key: _untagged(item) for key, item in value.items()}
    return [_untagged(item) for item in value] if isinstance(value, list | tuple) else value


def causal_on_meta(table: Mapping[str, Any], what: str) -> Any:
    """Build a causal language model of ``transformers`` from its configuration, with parameters on the meta device.

    Raises:
        DataError: it describes no causal language model, or one of quantised weights.
    """
    transformers = _transformers()
    from huggingface_hub.errors import StrictDataclassError

    fields: dict[str, Any] = _untagged(table)
    kind = fields.pop("model_type", None)
    if not isinstance(kind, str):
        raise DataError(f'{what} has no model_type; write for example model_type = "mixtral"')
    if fields.get("quantization_config"):
        raise DataError(f"{what}: quantised weights cannot be trained; give the model's weights in bf16, fp16 or fp32")
    with _quiet(transformers), torch.random.fork_rng(devices=[]), parameters_on_meta():
        try:
            config = transformers.AutoConfig.for_model(kind, **fields)
            model = _auto_class(transformers, kind, config, what).from_config(config, dtype=torch.float32)
        except DataError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, ImportError, StrictDataclassError) as error:
            raise DataError(f"{what} with model_type = {kind!r} gives no model: {_first_line(error)}") from error
    _check_trains_on_text(model, kind, what)
    return model


def _auto_class(transformers: Any, kind: str, config: Any, what: str) -> Any:
    """The class of ``transformers`` that makes a language model of a configuration.

    Raises:
        DataError: it makes none that predicts the next token from the tokens before.
    """
    known = transformers.models.auto.modeling_auto
    sees_all = getattr(config, "attn_type", None) == "bi"  # XLNet
    if kind in known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not sees_all:
        return transformers.AutoModelForCausalLM
    text = config.get_text_config()
    pair = config.is_encoder_decoder or getattr(text, "is_encoder_decoder", False)
    if kind in known.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES and not pair:
        return transformers.AutoModelForImageTextToText
    if pair or kind in known.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        nature = "an encoder-decoder, which needs pairs of texts"
    elif sees_all or kind in known.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        nature = "an encoder, which fills in masked tokens"
    else:
        nature = "no language model"
    raise DataError(
        f"{what} with model_type = {kind!r} describes {nature}: `thinwire train` predicts the next token of a text. "
        "Give a causal model, or train this one in a loop of your own with thinwire.shard (docs/huggingface.md)"
    )


def _check_trains_on_text(model: nn.Module, kind: str, what: str) -> None:
    """Raise unless a model computes from tokens alone, each from those before it.

    Raises:
        DataError: it does not.
    """
    required = [
        name
        for name, parameter in inspect.signature(model.forward).parameters.items()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    if set(required) - {"input_ids"}:
        raise DataError(
            f"{what} with model_type = {kind!r} takes {' and '.join(required)} in every batch, and `thinwire train` "
            "has text alone; train it in a loop of your own with thinwire.shard (docs/huggingface.md)"
        )
    # Towers for images may see all of an image.
    if getattr(model.config, "vision_config", None) is None and any(
        getattr(module, "is_decoder", None) is False for module in model.modules()
    ):
        raise DataError(
            f"{what} with model_type = {kind!r} is an encoder, whose tokens see those that they should predict: only "
            "causal models can be trained; set is_decoder = true in its configuration to make it one"
        )


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UsageError(missing_sentence('model.kind = "huggingface"', ("transformers",), "transformers")) from error
    return transformers


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Keep loading bars of every rank off the terminal."""
    logging = transformers.utils.logging
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        logging.enable_progress_bar()


def _first_line(error: BaseException) -> str:
    line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST].rsplit(' ', 1)[0]} ..."
