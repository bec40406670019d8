"""Random initial values of models on the meta device, by name, equal on every rank and under every plan.

Nothing in this module holds a whole model. Parameters of thinwire's models are drawn one by one from one stream of
random numbers, and equal those of a model that is built on the CPU. Hugging Face models are initialised by their own
code, one block at a time, each from its own seed.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar, final

import torch
from torch import Tensor, nn

from thinwire.errors import UsageError
from thinwire.sharding.memory.initial import Region
from thinwire.train.models.decoder import Decoder
from thinwire.train.models.huggingface import PREFIX

T = TypeVar("T")


@final
class LastMade(Generic[T]):
    """What was made of the last name; it is freed before that of the next one is made."""

    def __init__(self) -> None:
        self._last: tuple[str, T] | None = None

    def of(self, name: str, make: Callable[[str], T]) -> T:
        if self._last is None or self._last[0] != name:
            self._last = None
            self._last = name, make(name)
        return self._last[1]


@final
class DrawnValues:
    """Initial values of one of thinwire's models, as
    :meth:`~thinwire.train.models.decoder.Decoder.init_weights` draws them."""

    def __init__(self, model: Decoder, seed: int) -> None:
        self._draws = [(draw.name, tuple(draw.weight.shape), draw.std) for draw in model.draws()]
        self._places = {name: place for place, (name, _, _) in enumerate(self._draws)}
        self._ones = {
            f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.RMSNorm | nn.LayerNorm)
        }
        self._seed = seed
        generator = torch.Generator().manual_seed(seed)
        self._states = [generator.get_state()]
        """State of the generator before each weight, for those weights that have been reached."""
        self._drawn = LastMade[Tensor]()

    def open(self) -> str:
        """Describe the values. There is nothing to check."""
        return f"random values of seed {self._seed}"

    def read(self, name: str, region: Region) -> Tensor:
        """Return a part of a parameter; see :class:`thinwire.sharding.memory.initial.InitialValues`."""
        if name not in self._places:
            return torch.full(
                [part.stop - part.start for part in region],
                float(name in self._ones),
                dtype=torch.float32,
                device="cpu",
            )
        return self._drawn.of(name, self._draw)[region]

    def _draw(self, name: str) -> Tensor:
        """Draw a whole weight. The first time, all weights before it in the stream are drawn and discarded."""
        place = self._places[name]
        generator = torch.Generator()
        start = min(place, len(self._states) - 1)
        generator.set_state(self._states[start])
        for index in range(start, place + 1):
            _, shape, std = self._draws[index]
            value = nn.init.normal_(torch.empty(shape, dtype=torch.float32, device="cpu"), std=std, generator=generator)
            if index + 1 == len(self._states):
                self._states.append(generator.get_state())
        return value


@final
class InitializedValues:
    """Initial values from a ``transformers`` model's own initialiser, one block at a time.

    A *block* is an element of an outermost module list, or any other module with parameters of its own. While the
    initialiser runs, the parameters of the block are real and all others stay on the meta device, where random numbers
    cost nothing. The initialiser can thus inspect any module.

    Args:
        skeleton: The whole model on the meta device; no other object may use it.
        initialize: Initialises the parameters of one module.
        seed: Combined with the name of a block into the block's seed.
    """

    def __init__(self, skeleton: nn.Module, initialize: Callable[[nn.Module], None], seed: int) -> None:
        self._skeleton, self._initialize, self._seed = skeleton, initialize, seed
        self._blocks: dict[str, dict[str, nn.Parameter]] = {}
        self._block_of: dict[str, str] = {}
        for name, parameter in skeleton.named_parameters():
            block = _block_of(skeleton, name)
            self._blocks.setdefault(block, {})[name] = parameter
            self._block_of[name] = block
        self._made = LastMade[dict[str, Tensor]]()

    def open(self) -> str:
        """Describe the values. There is nothing to check."""
        return f"random values of seed {self._seed}"

    def read(self, name: str, region: Region) -> Tensor:
        """Return a part of a parameter; see :class:`thinwire.sharding.memory.initial.InitialValues`."""
        name = name.removeprefix(PREFIX)
        return self._made.of(self._block_of[name], self._make)[name][region]

    @torch.no_grad()
    def _make(self, block: str) -> dict[str, Tensor]:
        members = {id(parameter): name for name, parameter in self._blocks[block].items()}
        real = {}  # until a value is set, it is NaN
        for name, parameter in self._blocks[block].items():
            unset = torch.full(parameter.shape, math.nan, dtype=parameter.dtype, device="cpu")
            real[name] = nn.Parameter(unset, requires_grad=parameter.requires_grad)
        ancestors = [".".join(block.split(".")[:depth]) for depth in range(block.count(".") + 1)] if block else []
        root = self._skeleton.get_submodule(block)
        modules = [*_children_first(root), *(self._skeleton.get_submodule(name) for name in reversed(ancestors))]
        with _exchanged(modules, members, real), torch.random.fork_rng(devices=[]):
            digest = hashlib.blake2b(f"{self._seed} {block}".encode(), digest_size=8).digest()
            torch.manual_seed(int.from_bytes(digest, "little"))
            for module in modules:
                self._initialize(module)
        for name, value in real.items():
            if math.isnan(float(value.sum())):
                raise UsageError(
                    f"the initialiser of {type(self._skeleton).__name__} leaves {name} as it is: this architecture can "
                    'start from weights only, with model.path and model.weights = "file"'
                )
        return {name: value.detach() for name, value in real.items()}


def _block_of(model: nn.Module, name: str) -> str:
    """The block that a parameter belongs to."""
    path = name.split(".")[:-1]
    for depth in range(1, len(path)):
        if isinstance(model.get_submodule(".".join(path[:depth])), nn.ModuleList):
            return ".".join(path[: depth + 1])
    return ".".join(path)


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    """A module's descendants and itself, in the order in which ``Module.apply`` visits them."""
    for child in module.children():
        yield from _children_first(child)
    yield module


@contextlib.contextmanager
def _exchanged(
    modules: Sequence[nn.Module], members: Mapping[int, str], real: Mapping[str, nn.Parameter]
) -> Iterator[None]:
    """Replace some parameters by real ones inside the context, by identity."""
    replaced: list[tuple[dict[str, Any], str, nn.Parameter]] = []
    for module in modules:
        parameters: dict[str, Any] = module._parameters
        for name, parameter in parameters.items():
            if id(parameter) in members:
                replaced.append((parameters, name, parameter))
                parameters[name] = real[members[id(parameter)]]
    try:
        yield
    finally:
        for parameters, name, parameter in replaced:
            parameters[name] = parameter
