"""Any Hugging Face causal language model, from a directory or from a configuration."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from thinwire.errors import DataError, UsageError
from thinwire.sharding.memory.initial import InitialValues, parameters_on_meta
from thinwire.spec.recipe import ModelRecipe
from thinwire.train.models.common import CausalOutput, cross_entropy
from thinwire.train.models.fresh import InitializedValues
from thinwire.train.weights.loading import LoadedValues

_LONGEST: Final = 300
"""Characters of somebody else's message: transformers names every architecture it knows."""

PREFIX: Final = "model."
"""Of the names that a wrapped model's parameters have here."""


class HuggingFaceCausal(nn.Module):
    """A ``transformers`` causal language model with our convention for labels and our loss.

    ``transformers`` shifts labels inside the model and makes a float32 copy of all logits; here labels are
    already the next tokens, as everywhere in thinwire, and the loss is
    :func:`~thinwire.train.models.common.cross_entropy`.

    Args:
        model: the ``transformers`` model.
        recompute: whether backward recomputes each block.
    """

    def __init__(self, model: nn.Module, recompute: bool = False) -> None:
        super().__init__()
        self.model = model
        config: Any = model.config
        self.balance = float(getattr(config, "router_aux_loss_coef", 0.0) or 0.0)
        self.has_router = bool(getattr(config, "output_router_logits", False))
        if recompute:
            _enable_recomputation(model)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> CausalOutput:
        """Predict the next tokens.

        Args:
            input_ids: int64, shape ``(B, T)``.
            labels: int64, shape ``(B, T)``: the token that follows each input.

        Returns:
            Logits, and with labels the loss, including a mixture-of-experts' balance loss where the
            configuration sets ``output_router_logits``.
        """
        output = self.model(input_ids=input_ids, use_cache=False)
        logits: Tensor = output.logits
        if labels is None:
            return CausalOutput(logits)
        loss = cross_entropy(logits, labels)
        if self.has_router and output.aux_loss is not None:
            loss = loss + self.balance * output.aux_loss.float()
        return CausalOutput(logits, loss)


def _enable_recomputation(model: nn.Module) -> None:
    """Ask a ``transformers`` model to recompute; the method and its argument were renamed in version 5."""
    for word in ("activation", "gradient"):
        enable: Any = getattr(model, f"{word}_checkpointing_enable", None)
        if enable is not None:
            enable(**{f"{word}_checkpointing_kwargs": {"use_reentrant": False}})
            return
    raise UsageError(f"{type(model).__name__} cannot recompute activations; set train.recompute = false")


def draft_huggingface(
    recipe: ModelRecipe, config: Mapping[str, Any], *, seed: int, recompute: bool = False
) -> tuple[HuggingFaceCausal, InitialValues]:
    """Build a model on the meta device, and find its values.

    Args:
        recipe: A model recipe of ``kind = "huggingface"``.
        config: The model's configuration; see :func:`read_config`.
        seed: Seed of random values.
        recompute: Whether the backward recomputes each block.

    Returns:
        The model, parameters on the meta device, and where their values are: in the directory's safetensors files, or
        made by the model's own initialiser.

    Raises:
        DataError: The configuration describes no causal language model.
    """
    model = on_meta(recipe, config)
    values: InitialValues
    if recipe.starts_from_files:
        assert recipe.path is not None, "a rule of the recipe"
        values = LoadedValues(Path(recipe.path).expanduser(), model, PREFIX)
    else:
        skeleton = on_meta(recipe, config)
        values = InitializedValues(skeleton, skeleton._init_weights, PREFIX, seed)
    return HuggingFaceCausal(model, recompute), values


def on_meta(recipe: ModelRecipe, config: Mapping[str, Any]) -> Any:
    """The ``transformers`` model of a recipe, with its parameters on the meta device and buffers on CPU.

    Raises:
        DataError: The configuration describes no causal language model.
    """
    what = "model.config" if recipe.path is None else f"model.path = {recipe.path}"
    return causal_on_meta(config, what)


def read_config(recipe: ModelRecipe) -> dict[str, Any]:
    """The configuration of a recipe's Hugging Face model.

    Args:
        recipe: of ``kind = "huggingface"``.

    Returns:
        What its ``config.json`` holds.

    Raises:
        DataError: there is none.
    """
    if recipe.path is not None:
        return _read_config("model.path", recipe.path)
    assert recipe.config is not None, "the recipe's own rule demands path or config"
    return _read_config("model.config", recipe.config) if isinstance(recipe.config, str) else dict(recipe.config)


def causal_on_meta(table: Mapping[str, Any], what: str) -> Any:
    """Build a causal language model from its configuration, with parameters on the meta device.

    Args:
        table: a ``config.json``'s.
        what: where it comes from, for messages.

    Returns:
        A ``transformers`` model.

    Raises:
        DataError: it describes no causal language model, or one of quantised weights.
    """
    transformers = _transformers()
    table = dict(table)
    kind = table.pop("model_type", None)
    if not isinstance(kind, str):
        raise DataError(f'{what} has no model_type; write for example model_type = "mixtral"')
    if table.get("quantization_config"):
        raise DataError(f"{what}: quantised weights cannot be trained; give the model's weights in bf16, fp16 or fp32")
    with _quiet(transformers), torch.random.fork_rng(devices=[]), parameters_on_meta():
        try:
            made = transformers.AutoConfig.for_model(kind, **table)
            model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.float32)
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(f"{what} with model_type = {kind!r} gives no model: {_first_line(error)}") from error
    if any(getattr(module, "is_decoder", None) is False for module in model.modules()):
        raise DataError(
            f"{what} with model_type = {kind!r} is an encoder, whose tokens see those that they should predict: only "
            "causal models can be trained; set is_decoder = true in its configuration to make it one"
        )
    return model


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            'model.kind = "huggingface" needs transformers; install it with: pip install "transformers>=4.56"'
        ) from error
    return transformers


def _read_config(what: str, path: str) -> dict[str, Any]:
    file = Path(path).expanduser()
    if file.is_dir() or what == "model.path":
        file /= "config.json"
    if not file.is_file():
        raise DataError(
            f"{what}: {path} holds no config.json; give a directory written by save_pretrained (nothing is downloaded)"
            if what == "model.path"
            else f"{what}: {path} is no readable config.json: there is no such file"
        )
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{what}: {path} is no readable config.json: {error}") from error
    if not isinstance(table, dict):
        raise DataError(f"{what}: {path} should hold a JSON object")
    return table


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
