"""The context of a behaviour: the same calls for one process, for thinwire and for FSDP2."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.behaviours.plans import drawn_plan
from torch import nn

import thinwire as tw
from thinwire.sharding.api import runtime

__all__ = [
    "DRAWN",
    "LOSSY",
    "PRESETS",
    "ON_HOST",
    "ROWS",
    "WIDTH",
    "Alone",
    "Context",
    "OnFSDP2",
    "OnThinwire",
    "preset_plan",
]

WIDTH = 8
"""Features of every activation."""
ROWS = 3
"""Samples of a rank in a micro-batch."""
PRESETS = ("ddp", "zero1", "zero2", "zero3", "hpz")
ON_HOST = " on the host"
"""Behind the name of a preset: states, gradients and parameters live on the host."""
DRAWN = "drawn "
"""Before the seed of a random exact plan, in the place of a preset."""
LOSSY = "lossy "
"""Before the seed of a random plan that computes in bf16 or encodes messages lossily."""


def preset_plan(preset: str, world: int, **changes: Any) -> tw.Plan:
    """A preset for 2 ranks of one node, or for 4 ranks of two nodes; fp32 by default. Its states may be ``on the
    host``. Or a random plan."""
    if preset.startswith(DRAWN):
        return drawn_plan(int(preset.removeprefix(DRAWN)), world).with_(**changes)
    if preset.startswith(LOSSY):
        return drawn_plan(int(preset.removeprefix(LOSSY)), world, lossy=True).with_(**changes)
    preset, on_host, _ = preset.partition(ON_HOST)
    if on_host:
        changes = {"residence": {"optimizer": "host-update", "gradients": "host", "params": "host"}, **changes}
    nodes = 2 if world > 2 else 1
    return tw.Plan.preset(preset, nodes=nodes, local=world // nodes, **{"compute_dtype": "float32", **changes})


class Context:
    """One run of one behaviour.

    Args:
        world: number of ranks.
        folder: an empty directory that all ranks see.

    Attributes:
        ranks: whose data this process has: its own, or that of all where it is alone.
    """

    def __init__(self, world: int, ranks: Sequence[int], folder: Path) -> None:
        self.world, self.ranks, self.folder = world, tuple(ranks), folder

    @property
    def alone(self) -> bool:
        """Whether one process does the work of all ranks."""
        return len(self.ranks) == self.world

    @property
    def rank(self) -> int:
        """This process; 0 where it is alone."""
        return self.ranks[0]

    # -- models and data ---------------------------------------------------------------------------------------

    def build(self, make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
        """A model with the same values on every rank."""
        torch.default_generator.manual_seed(seed)
        return make()

    def x(self, step: int = 0, micro: int = 0) -> torch.Tensor:
        """The samples of ``ranks``, ``[rows, WIDTH]``, fp32."""
        return torch.cat([self.x_of(rank, step, micro) for rank in self.ranks])

    def x_of(self, rank: int, step: int = 0, micro: int = 0) -> torch.Tensor:
        """One rank's samples, ``[ROWS, WIDTH]``, fp32."""
        generator = torch.Generator().manual_seed(1000 * rank + 10 * step + micro)
        return torch.randn(ROWS, WIDTH, generator=generator)

    def ids(self, step: int = 0, *, vocabulary: int = 17, length: int = 6) -> torch.Tensor:
        """The tokens of ``ranks``, ``[rows, length]``, int64."""
        parts = []
        for rank in self.ranks:
            generator = torch.Generator().manual_seed(1000 * rank + step)
            parts.append(torch.randint(0, vocabulary, (ROWS, length), generator=generator))
        return torch.cat(parts)

    # -- calls with a counterpart on every side ----------------------------------------------------------------

    def shard(self, model: nn.Module, units: Any = None, **changes: Any) -> nn.Module:
        """Shard a model.

        Args:
            model: the model.
            units: modules or names of modules, as ``tw.shard`` takes them.
            **changes: fields of the plan.
        """
        raise NotImplementedError

    def micro_batches(self, model: nn.Module, items: Sequence[Any]) -> Iterator[Any]:
        """Iterate over the micro-batches of a step."""
        raise NotImplementedError

    def fast_optimizer(self, model: nn.Module, kind: type[torch.optim.Optimizer], **options: Any) -> Any:
        """The library's own optimizer, if it has one."""
        return kind(model.parameters(), **options)

    def clip(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        """The library's own clipping, if it has one."""
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm)

    def full_parameters(self, model: nn.Module, *, write: bool = False) -> contextlib.AbstractContextManager[None]:
        """Whole parameters on every rank."""
        raise NotImplementedError

    def register_forward_method(self, model: nn.Module, name: str) -> None:
        """Have a method behave as forward does."""
        raise NotImplementedError

    def join(self, model: nn.Module, batches: Iterable[Any]) -> Iterator[Any]:
        """Iterate over batches of which ranks have different numbers."""
        raise NotImplementedError

    def mean(self, value: torch.Tensor) -> float:
        """Mean over ranks of a number."""
        raise NotImplementedError

    def save(self, model: nn.Module, optim: Any, path: Path) -> None:
        """Write a checkpoint."""
        raise NotImplementedError

    def load(self, model: nn.Module, optim: Any, path: Path) -> None:
        """Read a checkpoint."""
        raise NotImplementedError

    def barrier(self) -> None:
        """Wait for all ranks."""
        if not self.alone:
            dist.barrier()

    def close(self) -> None:
        """Stop what the behaviour started."""

    # -- results -----------------------------------------------------------------------------------------------

    def full(self, value: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor, whole."""
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        return whole.detach().clone().as_subclass(torch.Tensor)

    def whole(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Copies of a model's whole parameters, by name."""
        return {name: self.full(parameter) for name, parameter in model.named_parameters()}

    def gradients(self, model: nn.Module) -> dict[str, torch.Tensor | None]:
        """Copies of whole gradients, by name of the parameter."""
        return {
            name: None if parameter.grad is None else self.full(parameter.grad)
            for name, parameter in model.named_parameters()
        }

    # -- the ordinary loop -------------------------------------------------------------------------------------

    def adamw(self, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
        """The user's AdamW. A large eps makes an update follow the gradient's size, so that a wrong mean shows."""
        return torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, "eps": 1e-1, **options})

    def train(
        self,
        model: nn.Module,
        optim: Any,
        *,
        steps: int = 3,
        loss: Callable[[int], torch.Tensor] | None = None,
        before_step: Callable[[int], None] | None = None,
        after_step: Callable[[int], None] | None = None,
    ) -> dict[str, Any]:
        """Some ordinary steps; losses and whole parameters.

        Args:
            model: the model.
            optim: its optimizer.
            steps: how many.
            loss: of a step; by default the mean square of the model's output.
            before_step: called with gradients in place.
            after_step: called with updated parameters.
        """
        losses = []
        for step in range(steps):
            value = loss(step) if loss is not None else model(self.x(step)).square().mean()
            value.backward()
            if before_step is not None:
                before_step(step)
            optim.step()
            optim.zero_grad()
            if after_step is not None:
                after_step(step)
            losses.append(self.mean(value.detach()))
        return {"losses": losses, "parameters": self.whole(model)}

    def fit(self, make: Callable[[], nn.Module], **options: Any) -> dict[str, Any]:
        """Build, shard, train with AdamW; ``units`` and fields of the plan besides arguments of :meth:`train`."""
        ours = ("steps", "loss", "before_step", "after_step")
        training = {key: options.pop(key) for key in ours if key in options}
        model = self.shard(self.build(make), **options)
        return self.train(model, self.adamw(model), **training)


class Alone(Context):
    """One process with the data of all ranks, on plain torch."""

    def __init__(self, world: int, folder: Path) -> None:
        super().__init__(world, range(world), folder)

    def shard(self, model: nn.Module, units: Any = None, **changes: Any) -> nn.Module:
        """Nothing to do."""
        del units, changes
        return model

    def micro_batches(self, model: nn.Module, items: Sequence[Any]) -> Iterator[Any]:
        """One after the other."""
        del model
        return iter(items)

    def full_parameters(self, model: nn.Module, *, write: bool = False) -> contextlib.AbstractContextManager[None]:
        """They are whole."""
        del model, write
        return contextlib.nullcontext()

    def register_forward_method(self, model: nn.Module, name: str) -> None:
        """Nothing to do."""

    def join(self, model: nn.Module, batches: Iterable[Any]) -> Iterator[Any]:
        """One after the other."""
        del model
        return iter(batches)

    def mean(self, value: torch.Tensor) -> float:
        """The number itself."""
        return float(value)


class _OnRanks(Context):
    """One rank of a job."""

    def __init__(self, folder: Path) -> None:
        super().__init__(dist.get_world_size(), [dist.get_rank()], folder)

    def mean(self, value: torch.Tensor) -> float:
        """Mean over ranks."""
        total = torch.as_tensor(value).detach().double().clone()
        dist.all_reduce(total)
        return float(total) / self.world


class OnThinwire(_OnRanks):
    """One rank under thinwire.

    Args:
        preset: of the plan.
        folder: an empty directory that all ranks see.
    """

    def __init__(self, preset: str, folder: Path) -> None:
        super().__init__(folder)
        self.preset = preset
        self._models: list[nn.Module] = []

    def shard(self, model: nn.Module, units: Any = None, **changes: Any) -> nn.Module:
        """By the preset."""
        self._models.append(model)
        return tw.shard(model, preset_plan(self.preset, self.world, **changes), units=units)

    def micro_batches(self, model: nn.Module, items: Sequence[Any]) -> Iterator[Any]:
        """``tw.micro_batches``."""
        return tw.micro_batches(model, items)

    def fast_optimizer(self, model: nn.Module, kind: type[torch.optim.Optimizer], **options: Any) -> Any:
        """``tw.optimizer``."""
        return tw.optimizer(model, kind, **options)

    def clip(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        """``tw.clip_grad_norm_``."""
        return torch.as_tensor(tw.clip_grad_norm_(model, max_norm))

    def full_parameters(self, model: nn.Module, *, write: bool = False) -> contextlib.AbstractContextManager[None]:
        """``tw.full_parameters``."""
        return tw.full_parameters(model, write=write)

    def register_forward_method(self, model: nn.Module, name: str) -> None:
        """``tw.register_forward_method``."""
        tw.register_forward_method(model, name)

    def join(self, model: nn.Module, batches: Iterable[Any]) -> Iterator[Any]:
        """``tw.join``."""
        return tw.join(model, batches)

    def save(self, model: nn.Module, optim: Any, path: Path) -> None:
        """``tw.save``."""
        tw.save(model, optim, path)

    def load(self, model: nn.Module, optim: Any, path: Path) -> None:
        """``tw.load``."""
        tw.load(model, optim, path)

    def close(self) -> None:
        """Stop the lanes of every model."""
        for model in self._models:
            if hasattr(model, "_thinwire_runtime"):
                runtime(model).lanes.close()
        self._models.clear()


class OnFSDP2(_OnRanks):
    """One rank under torch's ``fully_shard``, its default arguments, on a mesh of all ranks."""

    def shard(self, model: nn.Module, units: Any = None, **changes: Any) -> nn.Module:
        """Elements of module lists first, or ``units``; then the root."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (self.world,))}
        if "compute_dtype" in changes:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=getattr(torch, changes["compute_dtype"]))
        if units is None:
            lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
            units = [element for elements in lists for element in elements]
        modules = {model.get_submodule(unit) if isinstance(unit, str) else unit for unit in units}
        for module in reversed(list(model.modules())):  # what lies inside comes first
            if module in modules:
                fully_shard(module, **options)
        return fully_shard(model, **options)

    def micro_batches(self, model: Any, items: Sequence[Any]) -> Iterator[Any]:
        """``set_requires_gradient_sync`` before the last."""
        for number, item in enumerate(items):
            model.set_requires_gradient_sync(number == len(items) - 1)
            yield item

    @contextlib.contextmanager
    def full_parameters(self, model: Any, *, write: bool = False) -> Iterator[None]:
        """``unshard`` and ``reshard`` of every module."""
        from torch.distributed.fsdp import FSDPModule

        del write
        wrapped = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for module in wrapped:
            module.unshard()
        yield
        for module in wrapped:
            module.reshard()

    def register_forward_method(self, model: nn.Module, name: str) -> None:
        """``register_fsdp_forward_method``."""
        from torch.distributed.fsdp import register_fsdp_forward_method

        register_fsdp_forward_method(model, name)
