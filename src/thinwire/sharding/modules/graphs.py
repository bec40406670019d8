"""Refuses CUDA graphs, which replay a computation at the addresses that it had when it was captured."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, Final

from torch import nn

from thinwire.errors import UsageError

_KEY: Final = "triton.cudagraphs"
_MODES: Final = 'valid modes of torch.compile are "default" and "max-autotune-no-cudagraphs"'


def cuda_graphs_error(setting: str, remedy: str) -> UsageError:
    """The error about CUDA graphs, for which a setting asks (``key = value``)."""
    return UsageError(
        f"{setting}: a CUDA graph replays kernels at fixed addresses, while units are freed and gathered elsewhere, "
        f"and lanes may still read the gradients that its next run overwrites; {remedy}"
    )


def refuse_cuda_graphs(model: nn.Module) -> None:
    """Raise a :class:`UsageError` if torch compiles something of a model with CUDA graphs: a module, or a function that
    is running and calls the model."""
    for name, module in model.named_modules():
        compiled = module._compiled_call_impl or module
        if (get := getattr(compiled, "get_compiler_config", None)) is not None:
            _refuse(name or type(module).__name__, get())
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper":  # what torch.compile returns
            _refuse("what calls the model", getattr(frame.f_locals.get("self"), "compiler_config", None))
        frame = frame.f_back


def _refuse(what: str, config: dict[str, Any] | None) -> None:
    """Refuse something that is compiled under these options of inductor; ``None`` under another backend."""
    if config is None:
        return
    if config[_KEY]:
        raise cuda_graphs_error(f"{what} is compiled with {_KEY} = True", f"{_MODES}; leave the option out")
    if sys.modules["torch._inductor.config"].triton.cudagraphs:
        raise cuda_graphs_error(f"torch._inductor.config.{_KEY} = True", f"set it to False; {_MODES}")
