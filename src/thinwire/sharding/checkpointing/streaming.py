"""Whole weights of a sharded model in the files of other libraries, one tensor at a time.

[Note: deferred tensors]

``save_pretrained`` of transformers and peft renames, splits and joins the tensors of a state dict, deals them out to
files, and calls the library ``safetensors`` for each. Here, the state dict holds tensors without values, which know how
to get them. What is done to such a tensor is put off as well. A file gets the bytes that the library would write, but
from one tensor after another: the first rank asks for it, all ranks gather it, and it is let go.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import safetensors.torch
import torch
from torch import nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from thinwire.agreement import NOTHING
from thinwire.checkpoint.manifest import SAFETENSORS_CODES
from thinwire.checkpoint.storage import TensorEntry, in_library_order, write_tensors
from thinwire.collectives.group import Control
from thinwire.errors import CheckpointError
from thinwire.sharding.checkpointing.full_state import whole_value
from thinwire.sharding.modules.quantized import is_wrapper
from thinwire.sharding.runtime.runtime import runtime_of
from thinwire.sharding.tensors.tensor import ShareTensor

_NAMES: Final = ("save_file", "safe_save_file")
"""Names that modules give the function of ``safetensors``."""
_INITIAL: Final = "path_initial_model_for_weight_conversion"
"""Option with which peft loads a further adapter while it saves. It finds that one in its own state dict only."""
_PROMPT: Final = "get_prompt_embedding_to_save"
"""Method of peft's models that the first rank alone would call."""


def stream_saves(model: nn.Module) -> list[Callable[[], None]]:
    """Let ``save_pretrained``, which transformers and peft give their models, write whole parameters, which ranks
    gather one by one: that of a sharded model, and of modules inside it. Returns functions that undo it."""
    saving = [module for module in model.modules() if hasattr(module, "save_pretrained")]
    for module in saving:
        object.__setattr__(module, "save_pretrained", _streamed(model, module))
    return [functools.partial(object.__delattr__, module, "save_pretrained") for module in saving]


def _streamed(model: nn.Module, module: Any) -> Callable[..., None]:
    """The ``save_pretrained`` of a module of a sharded model."""
    method, holds = module.save_pretrained, runtime_of(model).holds

    @functools.wraps(method)
    def save_pretrained(*args: Any, **kwargs: Any) -> None:
        """As without sharding. Every rank calls it, and the first one writes fp32 masters; inside
        ``thinwire.full_parameters`` any rank may, by itself."""
        if kwargs.get("state_dict") is not None or holds.depth:
            method(*args, **kwargs)
            return
        kwargs["is_main_process"] = True

        def write(state: dict[str, Any]) -> None:
            given = {} if kwargs.get(_INITIAL) else {"state_dict": state}
            method(*args, **{**kwargs, **given})

        with_whole_state(model, module, write, "save_pretrained")

    return save_pretrained


def with_whole_state(model: nn.Module, module: nn.Module, write: Callable[[dict[str, Any]], object], what: str) -> None:
    """Let the first rank write the whole state of a sharded model, or of a module inside it, by calling ``write`` with
    the state dict, which writes it by functions of ``safetensors``. The tensors of shares have no values, see [Note:
    deferred tensors]; nothing may change them. ``what`` the user has called is for messages. Collective.

    Raises:
        CheckpointError: The first rank cannot write.
    """
    ranks = runtime_of(model).control
    state = module.state_dict(keep_vars=True)  # which tells tied parameters
    # transformers takes the wrappers of a model that it has quantized apart itself.
    at_once = {
        id(value): whole_value(value, keep=ranks.rank == 0)
        for value in state.values()
        if is_wrapper(value) and not isinstance(value, ShareTensor) and "hf_quantizer" in vars(module)
    }
    shared = {
        id(value): value
        for value in state.values()
        if (isinstance(value, ShareTensor) or is_wrapper(value)) and id(value) not in at_once
    }
    prompts, encoders = _prompts(module)
    gathering = _Gathering(ranks, list(shared.values()))

    def action() -> None:
        if ranks.rank != 0:
            gathering.follow()
            return
        deferred = {
            key: Deferred.of(
                torch.empty(value.shape, dtype=value.dtype, device="meta"), functools.partial(gathering.read, number)
            )
            for number, (key, value) in enumerate(shared.items())
        }
        others = {id(value): value.detach() for value in state.values() if isinstance(value, torch.Tensor)}
        stands_for = {**others, **at_once, **deferred}
        whole = {name: stands_for.get(id(value), value) for name, value in state.items()}
        former = {name for name, _ in module.named_parameters()}

        # transformers asks a model that it has quantized once more, and peft one into which it loads an adapter.
        def state_dict(*_: Any, **__: Any) -> dict[str, Any]:
            return whole | {name: value.detach() for name, value in module.named_parameters() if name not in former}

        object.__setattr__(module, "state_dict", state_dict)
        if prompts:
            object.__setattr__(module, _PROMPT, prompts.__getitem__)
        try:
            with _writing_deferred(), _reparametrize_module(module, encoders, tie_weights=True):
                write(whole)
        finally:
            object.__delattr__(module, "state_dict")
            vars(module).pop(_PROMPT, None)
            gathering.end()

    ranks.agree(action, lambda problems: CheckpointError(f"{what}: {next(iter(problems.values()))}"), NOTHING)


@torch.no_grad()
def _prompts(module: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What peft computes by the prompt encoder of each adapter while it saves, and the encoders' parameters, some of
    which it reads: by fp32 masters. Collective."""
    model: Any = module
    configs = model.peft_config if hasattr(model, _PROMPT) else {}
    prompts, encoders = {}, dict[str, torch.Tensor]()
    for name in [name for name, config in configs.items() if config.is_prompt_learning]:
        state = model.prompt_encoder[name].state_dict(keep_vars=True, prefix=f"prompt_encoder.{name}.")
        encoders |= {key: whole_value(value, keep=True) for key, value in state.items()}
        with _reparametrize_module(model, encoders, tie_weights=True):
            prompts[name] = getattr(model, _PROMPT)(name)
    return prompts, encoders


class _Gathering:
    """Whole values, in the same order on every rank, one at a time, as the first rank asks for them."""

    def __init__(self, ranks: Control, values: Sequence[Any]) -> None:
        self._ranks, self._values = ranks, values
        self._latest: tuple[int, Any] = _NONE

    def read(self, number: int) -> Any:
        """Gather a value, on the first rank. The latest one is kept, as several tensors may be parts of it."""
        if self._latest[0] != number:
            self._latest = _NONE  # before the next is gathered
            self._announce(number)
            self._latest = number, whole_value(self._values[number], keep=True)
        return self._latest[1]

    def end(self) -> None:
        """Let the other ranks go, on the first rank."""
        self._latest = _NONE
        self._announce(-1)

    def follow(self) -> None:
        """Help to gather what the first rank asks for, on the other ranks."""
        while (number := self._announce(-1)) >= 0:
            whole_value(self._values[number], keep=False)

    def _announce(self, number: int) -> int:
        """The number that the first rank says."""
        told = torch.tensor(number, device="cpu")
        self._ranks.broadcast(told)
        return int(told)


_NONE: Final = (-1, None)


class _Memory:
    """The memory that a deferred tensor would have: an address by which libraries find tensors that overlap."""

    _numbers: Final = itertools.count(1)

    def __init__(self, num_bytes: int) -> None:
        self._address, self._num_bytes = next(self._numbers) << 48, num_bytes

    def data_ptr(self) -> int:
        """An address that no other memory has."""
        return self._address

    def nbytes(self) -> int:
        """Size in bytes."""
        return self._num_bytes


class Deferred(torch.Tensor):
    """A tensor without values that passes for one on the CPU; see [Note: deferred tensors]. To read its values in any
    other way than by :attr:`compute` raises an error, because torch knows it as a tensor on the meta device."""

    outline: torch.Tensor
    """A plain tensor on the meta device."""
    compute: Callable[[], Any]
    """Returns the tensor itself, on the CPU."""
    memory: _Memory
    """What views have in common."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    device = torch.device("cpu")

    @staticmethod
    def of(outline: torch.Tensor, compute: Callable[[], Any], memory: _Memory | None = None) -> Deferred:
        """A tensor with the layout of one on the meta device."""
        made: Deferred = torch.Tensor._make_subclass(Deferred, outline)
        made.outline, made.compute = outline, compute
        made.memory = memory or _Memory(outline.untyped_storage().nbytes())
        return made

    def untyped_storage(self) -> Any:
        """Something like memory."""
        return self.memory

    def data_ptr(self) -> int:
        """Address of the first element."""
        return self.memory.data_ptr() + int(self.storage_offset()) * self.itemsize

    def __getitem__(self, index: Any) -> Any:
        """As of a tensor on the CPU. Torch would put lists on the meta device, where they have no values."""
        return super().__getitem__(
            tuple(
                torch.tensor(one, dtype=None if one else torch.long, device="cpu") if isinstance(one, list) else one
                for one in (index if isinstance(index, tuple) else (index,))
            )
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Put an operation off; one that needs values is performed."""
        inputs = (args, kwargs or {})
        if func._schema.is_mutable:
            raise NotImplementedError(f"{func} changes a weight of a sharded model while it is saved; clone it before")

        def evaluate() -> Any:
            args, kwargs = tree_map_only(Deferred, lambda item: item.compute(), inputs)
            return func(*args, **kwargs)

        memories: dict[int, _Memory] = {}

        def outlined(item: Deferred) -> torch.Tensor:
            memories[_storage(item.outline)] = item.memory
            return item.outline

        outlines = tree_map_only(Deferred, outlined, inputs)
        try:
            results, structure = tree_flatten(func(*outlines[0], **outlines[1]))
        except RuntimeError:  # it reads values
            return evaluate()
        put_off = [
            Deferred.of(item, functools.partial(_result, evaluate, place), memories.get(_storage(item)))
            if isinstance(item, torch.Tensor)
            else item
            for place, item in enumerate(results)
        ]
        return tree_unflatten(put_off, structure)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the values, for ``safe_serialization=False``."""
        return self.compute().__reduce_ex__(protocol)


def _storage(outline: torch.Tensor) -> int:
    place: int = outline.untyped_storage()._cdata
    return place


def _result(evaluate: Callable[[], Any], place: int) -> Any:
    return tree_flatten(evaluate())[0][place]


@contextlib.contextmanager
def _writing_deferred() -> Iterator[None]:
    """Let libraries write deferred tensors: in their modules, another function stands for that of ``safetensors``."""
    library = safetensors.torch.save_file
    loaded = [getattr(module, "__dict__", {}) for module in list(sys.modules.values())]
    replaced = [(names, name) for names in loaded for name in _NAMES if names.get(name) is library]
    save_file = functools.partial(_save_file, library)
    for names, name in replaced:
        names[name] = save_file
    try:
        yield
    finally:
        for names, name in replaced:
            names[name] = library


def _save_file(
    library: Callable[..., None],
    tensors: Mapping[str, torch.Tensor],
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """``safetensors.torch.save_file`` that writes one tensor after another."""

    def read(name: str) -> torch.Tensor:
        tensor = tensors[name]
        return tensor.compute() if isinstance(tensor, Deferred) else tensor

    if any(tensor.dtype not in SAFETENSORS_CODES for tensor in tensors.values()):
        library({name: read(name) for name in tensors}, filename, metadata)
        return
    entries = in_library_order(TensorEntry(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items())
    part = Path(f"{os.fspath(filename)}.part")
    part.unlink(missing_ok=True)
    try:
        write_tensors(part, entries, read, metadata)
        part.replace(filename)
    finally:
        part.unlink(missing_ok=True)
