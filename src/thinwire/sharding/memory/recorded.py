"""Builds models without the memory for them: large tensors are freed once they are made, and made again when needed.

Inside a :class:`Recording`, every operation runs as usual, and those that write to large tensors are noted, with the
state of the random generator. A large tensor that was not used for a while is freed. What was noted makes it again:
when the model uses it once more, and when a rank reads its shard. Afterwards, parameters are on the meta device.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, NoReturn, final

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from thinwire.errors import UsageError
from thinwire.sharding.memory.initial import Region, give_back_freed_memory

_aten: Final = torch.ops.aten

_UNSET: Final = frozenset(
    (
        _aten.empty.memory_format,
        _aten.empty_strided.default,
        _aten.empty_like.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
    )
)
"""Operations whose results have no value. If nothing writes to them, they are NaN."""

_OVERWRITES: Final = frozenset(
    (_aten.uniform_.default, _aten.normal_.default, _aten.zero_.default, _aten.fill_.Scalar, _aten.copy_.default)
)
"""Operations after which the earlier value of their first argument does not matter."""


class _Place(NamedTuple):
    """Where the elements of a tensor lie."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Place:
        address = tensor.untyped_storage()._cdata
        return cls(address, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def within(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor in other memory."""
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(
            storage, self.offset, self.size, self.stride
        )


_Memory = dict[int, torch.UntypedStorage]
"""Memory of tensors that are made again, by the address of the storage for which it stands."""


@dataclass(frozen=True)
class _Outside:
    """A large tensor that was not made in the recording, such as one that was read from a file."""

    tensor: torch.Tensor
    version: int

    def value(self) -> torch.Tensor:
        """The tensor, which may not have changed."""
        if self.tensor._version != self.version:
            raise UsageError(
                f"a tensor of shape {list(self.tensor.shape)}, of which parameters were made, was changed later; make "
                "them of a copy"
            )
        return self.tensor


@dataclass(frozen=True)
class _Operation:
    """An operation to run again: among its arguments, recorded tensors are places.

    Attributes:
        outputs: Places of the tensors that it returns.
        state: State of the generator before it; ``None`` if it draws no random numbers.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[_Place, ...]
    state: torch.Tensor | None = None

    def run(self, memory: _Memory) -> None:
        """Run the operation; adds memory of tensors that it makes."""

        def value(leaf: Any) -> Any:
            if isinstance(leaf, _Place):
                return leaf.within(memory[leaf.storage])
            return leaf.value() if isinstance(leaf, _Outside) else leaf

        args, kwargs = tree_map(value, (self.args, self.kwargs), is_leaf=_is_place)
        if self.state is not None and kwargs.get("generator") is not None:
            kwargs["generator"] = torch.Generator().set_state(self.state)
        elif self.state is not None:
            torch.set_rng_state(self.state)
        for place, result in zip(self.outputs, _tensors(self.function(*args, **kwargs)), strict=True):
            if place.storage not in memory:
                memory[place.storage] = result.untyped_storage()
                if self.function in _UNSET and result.is_floating_point():
                    result.fill_(torch.nan)

    def identity(self) -> bytes:
        """Bytes that are equal for equal operations on different ranks."""
        leaves = tree_leaves((self.args, self.kwargs), is_leaf=_is_place)
        numbers = [leaf for leaf in leaves if isinstance(leaf, int | float | bool)]
        shapes = [(place.dtype, place.size, place.stride) for place in self.outputs]
        text = repr((str(self.function), numbers, shapes)).encode()
        return text if self.state is None else text + self.state.numpy().tobytes()


@dataclass(eq=False)
class _Group:
    """Storages, by their addresses, whose values depend on each other: they are made again together, by the operations
    that made them, in order."""

    operations: list[_Operation]
    addresses: list[int]


class _History:
    """How recorded storages were made."""

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}  # by the address of a storage
        self._again: tuple[_Group, _Memory] | None = None

    def append(self, operation: _Operation, addresses: Sequence[int]) -> None:
        """Add an operation that uses or makes some storages, at least one."""
        self._again = None
        group, *others = {self._groups.setdefault(address, _Group([], [address])): None for address in addresses}
        for other in others:
            # What a group was made by does not depend on what another was made by before they met.
            group.operations += other.operations
            group.addresses += other.addresses
            self._groups |= dict.fromkeys(other.addresses, group)
        group.operations.append(operation)

    def is_alone(self, address: int) -> bool:
        """Whether the value of a storage depends on no other, nor any other on it."""
        return len(self._groups[address].addresses) == 1

    def restart(self, place: _Place) -> None:
        """Forget how a tensor that is alone was made, except for its size, because it is overwritten."""
        fresh = _Operation(_aten.empty_strided.default, (place.size, place.stride), {"dtype": place.dtype}, (place,))
        self._groups[place.storage].operations = [fresh]

    def made_again(self, address: int) -> _Memory:
        """Run the operations of a storage's group on other memory."""
        group = self._groups[address]
        if self._again is None or self._again[0] is not group:
            self._again = None  # freed before the next one is made
            memory: _Memory = {}
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                for operation in group.operations:
                    operation.run(memory)
            self._again = group, memory
        return self._again[1]

    def fingerprint(self) -> str:
        """Text that is equal on ranks with equal histories."""
        digest = hashlib.sha256()
        for group in dict.fromkeys(self._groups.values()):
            for operation in group.operations:
                digest.update(operation.identity())
        return digest.hexdigest()[:12]


class _Storages:
    """Recorded storages, which are freed and made again.

    Attributes:
        sizes: Bytes of each storage when it is not freed, by address.
    """

    def __init__(self, history: _History) -> None:
        self._history = history
        self.sizes: dict[int, int] = {}
        self._references: dict[int, StorageWeakRef] = {}  # weak references keep addresses from being used again
        self._present: dict[int, None] = {}  # those that are not freed, the latest used last

    def add(self, storage: torch.UntypedStorage) -> None:
        """Add a storage."""
        self._references[storage._cdata] = StorageWeakRef(storage)
        self.sizes[storage._cdata], self._present[storage._cdata] = storage.nbytes(), None

    def use(self, storage: torch.UntypedStorage, *, with_value: bool) -> None:
        """Make sure that a storage has memory, and its value if it is needed."""
        address = storage._cdata
        if address not in self._present:
            storage.resize_(self.sizes[address])
            if with_value:
                storage.copy_(self._history.made_again(address)[address])
        self._present.pop(address, None)
        self._present[address] = None

    def free(self, *, below: int, except_for: set[int]) -> None:
        """Free storages, those first that were not used for the longest time, until few bytes are left."""
        left = sum(self.sizes[address] for address in self._present)
        for address in [address for address in self._present if address not in except_for]:
            if left <= below:
                return
            left -= self.sizes[address]
            self._release(address)

    def free_only(self, addresses: set[int]) -> None:
        """Free some storages, and make all others again."""
        for address in self.sizes:
            if address in addresses and address in self._present:
                self._release(address)
            elif address not in addresses and (storage := self._living(address)) is not None:
                self.use(storage, with_value=True)

    def _release(self, address: int) -> None:
        del self._present[address]
        if (storage := self._living(address)) is not None:
            storage.resize_(0)

    def _living(self, address: int) -> torch.UntypedStorage | None:
        return torch.UntypedStorage._new_with_weak_ptr(self._references[address].cdata)


@final
class Recording(TorchDispatchMode):
    """Records how large tensors are made on the CPU, and frees those that were not used for a while.

    After the block, parameters of the modules that were built in it are on the meta device; everything else is as
    usual.

    Args:
        smallest: Number of bytes from which on a tensor is recorded.
        kept: Number of bytes of recorded tensors that are kept.
    """

    def __init__(self, smallest: int = 1 << 16, kept: int = 1 << 24) -> None:
        super().__init__()
        self._smallest, self._kept = smallest, kept
        self._history = _History()
        self._storages = _Storages(self._history)
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._parameters: dict[int, tuple[nn.Parameter, _Place]] = {}  # by id
        self._undo: list[Callable[[], None]] = []
        self._refusals: list[Callable[[], None]] = []

    def __enter__(self) -> Any:
        """Begin to record."""
        give_back_freed_memory()
        hook: Any = lambda module, _name, _parameter: self.watch(module)  # noqa: E731
        self._undo.append(register_module_parameter_registration_hook(hook).remove)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """End recording, and put parameters on the meta device."""
        super().__exit__(*error)
        self._undo.pop()()
        parameters = {id(p): p for m in self._modules for p in m._parameters.values() if p is not None and self.has(p)}
        addresses = {parameter.untyped_storage()._cdata for parameter in parameters.values()}
        husks = {key: self._husk(parameter) for key, parameter in parameters.items()}
        for module in self._modules:
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in husks:
                    module._parameters[name] = husks[id(parameter)]
            self._refusals.append(module.register_load_state_dict_pre_hook(_refuse_load).remove)
        self._modules.clear()
        self._storages.free_only(addresses)

    def watch(self, module: nn.Module) -> None:
        """Put parameters of a module on the meta device when the recording ends."""
        self._modules.add(module)

    def is_recorded(self, parameter: nn.Parameter) -> bool:
        """Whether the recording knows the value of a parameter on the meta device."""
        return id(parameter) in self._parameters

    def accept(self) -> None:
        """Let modules load state dicts again."""
        while self._refusals:
            self._refusals.pop()()

    def value(self, parameter: nn.Parameter) -> torch.Tensor:
        """The value of a recorded parameter. Later calls may return the same memory: do not write to it."""
        place = self._parameters[id(parameter)][1]
        return place.within(self._history.made_again(place.storage)[place.storage])

    def fingerprint(self) -> str:
        """Text that is equal on ranks with equal recordings."""
        return self._history.fingerprint()

    # -- recording ---------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and note it if it writes to a large tensor."""
        kwargs = kwargs or {}
        inputs = _tensors((args, kwargs))
        recorded = [tensor for tensor in inputs if self.has(tensor)]
        overwritten = self._is_overwritten(func, args)
        for tensor in recorded:
            self._storages.use(tensor.untyped_storage(), with_value=not (overwritten and tensor is args[0]))
        if _is_view(func):
            return func(*args, **kwargs)
        placed = tree_map(self._placed, (args, kwargs)) if recorded else None
        state = _generator_state(func, kwargs)
        result = func(*args, **kwargs)
        known = {_address(tensor) for tensor in inputs}
        new = [output for output in _tensors(result) if _address(output) not in known and self._is_large(output)]
        if new or any(self.has(tensor) for tensor in _written(func, args, kwargs)):
            if overwritten:
                self._history.restart(_Place.of(args[0]))
            self._note(func, placed or tree_map(self._placed, (args, kwargs)), result, state, [*recorded, *new])
        self._storages.free(below=self._kept, except_for={_address(item) for item in (*recorded, *new)})
        return result

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is recorded."""
        return _address(tensor) in self._storages.sizes

    def _is_large(self, tensor: torch.Tensor) -> bool:
        if _address(tensor) == 0 or self.has(tensor):
            return False
        storage = tensor.untyped_storage()
        return storage.nbytes() >= self._smallest and storage.resizable()

    def _is_overwritten(self, func: Any, args: Sequence[Any]) -> bool:
        """Whether an operation writes to every element of a tensor on which no other one depends."""
        if func not in _OVERWRITES or not self.has(args[0]):
            return False
        target, address = args[0], _address(args[0])
        if any(_address(tensor) == address for tensor in _tensors(args[1:])):
            return False
        covered = target.nbytes == self._storages.sizes[address] and target.is_contiguous()
        return covered and self._history.is_alone(address)

    def _note(
        self, func: Any, placed: tuple[Any, Any], result: Any, state: torch.Tensor | None, used: Sequence[torch.Tensor]
    ) -> None:
        for tensor in used:
            if not self.has(tensor):
                self._storages.add(tensor.untyped_storage())
        args, kwargs = placed
        outputs = tuple(map(_Place.of, _tensors(result)))
        self._history.append(_Operation(func, args, kwargs, outputs, state), [_address(tensor) for tensor in used])

    def _placed(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if self.has(leaf):
            return _Place.of(leaf)
        return leaf.detach().clone() if leaf.nbytes < self._smallest else _Outside(leaf, leaf._version)

    def _husk(self, parameter: nn.Parameter) -> nn.Parameter:
        empty = torch.empty_strided(parameter.size(), parameter.stride(), dtype=parameter.dtype, device="meta")
        husk = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        self._parameters[id(husk)] = husk, _Place.of(parameter)
        return husk


@final
class RecordedValues:
    """Initial values of a model that was built in a recording, which has ended. All of its parameters are on the meta
    device then."""

    def __init__(self, model: nn.Module, recording: Recording) -> None:
        self._recording, self._others = recording, dict[str, torch.Tensor]()
        recording.accept()
        self._parameters = dict(model.named_parameters())
        husks: dict[int, nn.Parameter] = {}
        for name, parameter in self._parameters.items():
            if not recording.is_recorded(parameter):
                self._others[name] = parameter.detach()
                husks[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        for module in model.modules():
            for name, own in module._parameters.items():
                if own is not None and id(own) in husks:
                    module._parameters[name] = husks[id(own)]

    def open(self) -> str:
        """Describe the values. There is nothing to check."""
        return f"recorded values {self._recording.fingerprint()}"

    def read(self, name: str, region: Region) -> torch.Tensor:
        """Return a part of a parameter; see :class:`thinwire.sharding.memory.initial.InitialValues`."""
        if name in self._others:
            return self._others[name][region].cpu()
        return self._recording.value(self._parameters[name])[region]


def initialize_meta_modules(model: nn.Module, recording: Recording) -> None:
    """Record ``reset_parameters()`` of every module of a model whose tensors were made on the meta device, in the
    model's order. The recording has ended before.

    Raises:
        UsageError: A module has no such method.
    """
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            owners.setdefault(id(parameter), []).append((module, name))
    for path, module in model.named_modules():
        before = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
        valueless = [parameter for parameter in before.values() if not recording.is_recorded(parameter)]
        if not any(tensor.is_meta for tensor in (*valueless, *module.buffers(recurse=False))):
            continue
        reset: Callable[[], object] | None = getattr(module, "reset_parameters", None)
        if reset is None:
            raise UsageError(
                f"{path or 'the model'} is a {type(module).__name__} on the meta device without reset_parameters(), "
                "which would give its tensors values: add this method, or build it without torch.device('meta')"
            )
        with recording:
            recording.watch(module)
            module.to_empty(device="cpu", recurse=False)
            for name, parameter in before.items():  # tied parameters stay tied
                for owner, own_name in owners[id(parameter)]:
                    owner._parameters[own_name] = module._parameters[name]
                    recording.watch(owner)
            reset()


def _refuse_load(module: nn.Module, *_: Any) -> NoReturn:
    raise UsageError(
        f"{type(module).__name__} was built without memory and has no place for a state dict yet: load it once the "
        "model is sharded"
    )


def _generator_state(func: Any, kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The state of the generator that an operation on the CPU uses; ``None`` if it uses none."""
    generator = kwargs.get("generator") or torch.default_generator
    if torch.Tag.nondeterministic_seeded not in func.tags or generator.device.type != "cpu":
        return None
    state: torch.Tensor = generator.get_state()
    return state


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(item.alias_info is not None and not item.alias_info.is_write for item in returns)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The arguments to which an operation writes."""
    arguments = func._schema.arguments
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | dict(kwargs)
    return _tensors([given.get(item.name) for item in arguments if item.alias_info and item.alias_info.is_write])


def _is_place(value: Any) -> bool:
    return isinstance(value, _Place)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _address(tensor: torch.Tensor) -> int:
    """Address of a tensor's storage on the CPU; 0 for other tensors."""
    strided = tensor.layout is torch.strided and tensor.device.type == "cpu"
    return tensor.untyped_storage()._cdata if strided else 0
