"""The names and cuts that weights have in files of transformers, which engines read.

In memory, a layer's experts are one tensor of transformers; in files, one for each expert and matrix.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from thinwire.errors import UsageError

_STACKED: Final = re.compile(r"\.experts\.\D")
"""Names of tensors of all experts; a single one's have its number."""


def in_files(weights: Mapping[str, torch.Tensor], config: Any) -> Mapping[str, torch.Tensor]:
    """The weights as ``save_pretrained`` would write them, as views. Those of models without experts, or that
    transformers does not know, have the same names there.

    Args:
        weights: Weights by their name in the model.
        config: Configuration of the model, or the directory of its ``config.json``.

    Raises:
        UsageError: It takes transformers, which is not installed.
        OSError: The directory has no configuration that can be read.
    """
    if not any(map(_STACKED.search, weights)):
        return weights
    try:
        import transformers
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError as error:
        raise UsageError(
            "files of a mixture of experts hold every expert by itself, as transformers cuts them: install "
            f"thinwire[transformers] here ({error})"
        ) from error
    try:
        if isinstance(config, Path):
            config = transformers.AutoConfig.from_pretrained(config, trust_remote_code=False)
        kind = getattr(transformers, (config.architectures or [""])[0], None)
        with torch.device("meta"):
            model = (transformers.AutoModelForCausalLM.from_config if kind is None else kind._from_config)(config)
    except ValueError:  # it does not know the model
        return weights
    with Views():
        files: Mapping[str, torch.Tensor] = revert_weight_conversion(model, dict(weights))
    return files


class Views(TorchFunctionMode):
    """Returns the tensor itself where a contiguous copy is asked for, because a copy is no view of the original."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.contiguous:
            return args[0]
        return func(*args, **(kwargs or {}))


def from_files(files: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor], config: Any) -> None:
    """Fill weights from what :func:`in_files` made of others like them.

    Raises:
        ValueError: It makes something else of these.
    """
    try:
        views = in_files(weights, config)
    except OSError as error:
        raise ValueError(f"config.json cannot be read: {error}") from error
    places = {tensor.untyped_storage().data_ptr() for tensor in weights.values()}
    if files.keys() != views.keys() or any(view.untyped_storage().data_ptr() not in places for view in views.values()):
        raise ValueError("config.json, or transformers, cuts the weights otherwise")
    for name, view in views.items():
        view.copy_(files[name])
