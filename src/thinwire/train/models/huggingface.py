"""Any Hugging Face causal language model, from a directory or from a configuration."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.errors import DataError, UsageError
from thinwire.train.models.common import CausalOutput, cross_entropy


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


def load_pretrained(path: str, *, recompute: bool = False) -> HuggingFaceCausal:
    """Read a model with its weights, in float32.

    Args:
        path: a directory written by ``save_pretrained``.
        recompute: whether backward recomputes each block.

    Returns:
        The model on CPU.

    Raises:
        DataError: the directory or its ``config.json`` is missing, or holds no causal language model.
    """
    directory = _model_directory(path)
    transformers = _transformers()
    with _quiet(transformers):
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                directory, dtype=torch.float32, local_files_only=True
            )
        except (OSError, ValueError) as error:
            raise DataError(f"model.path: {path} cannot be loaded: {_first_line(error)}") from error
    return HuggingFaceCausal(model, recompute)


def from_config(config: str | Mapping[str, Any], *, seed: int, recompute: bool = False) -> HuggingFaceCausal:
    """Build a model with fresh float32 weights.

    Args:
        config: a ``config.json``, a directory that holds one, or the configuration itself with its
            ``model_type``.
        seed: of the initial weights.
        recompute: whether backward recomputes each block.

    Returns:
        The model on CPU.

    Raises:
        DataError: the configuration is missing or describes no causal language model.
    """
    transformers = _transformers()
    table = _read_config(config) if isinstance(config, str) else dict(config)
    kind = table.pop("model_type", None)
    if not isinstance(kind, str):
        raise DataError('model.config has no model_type; write for example model_type = "mixtral"')
    with _quiet(transformers), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            made = transformers.AutoConfig.for_model(kind, **table)
            model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.float32)
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(f"model.config with model_type = {kind!r} gives no model: {_first_line(error)}") from error
    return HuggingFaceCausal(model, recompute)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            'model.kind = "huggingface" needs transformers; install it with: pip install "transformers>=4.56"'
        ) from error
    return transformers


def _model_directory(path: str) -> Path:
    directory = Path(path).expanduser()
    if not (directory / "config.json").is_file():
        raise DataError(
            f"model.path: {path} holds no config.json; give a directory written by save_pretrained "
            "(nothing is downloaded)"
        )
    return directory


def _read_config(path: str) -> dict[str, Any]:
    file = Path(path).expanduser()
    if file.is_dir():
        file /= "config.json"
    try:
        table = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"model.config: {path} is no readable config.json: {error}") from error
    if not isinstance(table, dict):
        raise DataError(f"model.config: {path} should hold a JSON object")
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
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
