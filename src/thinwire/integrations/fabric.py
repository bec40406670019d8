"""A strategy for Lightning's ``Fabric``: the loop stays as it is, and thinwire shards the module.

Importing this module registers the strategies ``thinwire`` and, by preset, ``thinwire_zero1``, ``thinwire_zero2`` and
``thinwire_zero3``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final
from weakref import WeakSet

import torch
from lightning.fabric.plugins.precision import MixedPrecision, Precision
from lightning.fabric.strategies import STRATEGY_REGISTRY, DDPStrategy
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn

import thinwire as tw
from thinwire.checkpoint import store
from thinwire.errors import UsageError
from thinwire.integrations.common.automatic import AutoPlan
from thinwire.integrations.common.buffers import SharedBuffers
from thinwire.integrations.common.building import Building
from thinwire.integrations.common.mixed import ShardedPrecision, checked_precision, register
from thinwire.integrations.common.optimizers import is_sharded, names_of, over_shares, without_sync
from thinwire.integrations.common.typed_state import decoded, encoded
from thinwire.sharding.checkpointing.full_state import load_whole_state
from thinwire.sharding.optimizer.sharded_optimizer import ShardedOptimizer
from thinwire.sharding.step.loss_scale import LossScale

__all__ = ["AutoPlan", "ThinwireFabricPrecision", "ThinwireFabricStrategy"]

_REMEDY: Final = "Give fabric.save numbers, texts, tensors, and objects with a state_dict() of these"
_TOGETHER: Final = "pass the module and the optimizer to one call of fabric.setup"


class ThinwireFabricPrecision(ShardedPrecision, MixedPrecision):
    """Fabric's mixed precision, which the plan's ``compute_dtype`` implements."""

    convert_input = Precision.convert_input  # the plan casts what units compute with

    def convert_output(self, data: Any) -> Any:
        """Return outputs in the default dtype, so that losses outside are computed in it, as Fabric's own does."""

        def convert(value: torch.Tensor) -> torch.Tensor:
            return value.to(torch.get_default_dtype()) if value.is_floating_point() else value

        return apply_to_collection(data, torch.Tensor, convert)

    def backward(self, tensor: torch.Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """Run the backward of a loss, multiplied by the loss scale."""
        super().backward(tensor if self.loss_scale is None else self.loss_scale.scale(tensor), model, *args, **kwargs)


class _Forward(nn.Module):
    """What Fabric calls in place of a sharded module, so that it also sends marked methods through its forward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the sharded module."""
        return self.module(*args, **kwargs)


def _original(item: Any) -> Any:
    return item.module if isinstance(item, _Forward) else item


class ThinwireFabricStrategy(DDPStrategy):
    """Shards the module that ``fabric.setup`` takes: ``Fabric(strategy=ThinwireFabricStrategy("zero3"))``.

    The optimizer is made anew over this rank's share, with the same class, groups and options. Checkpoints are
    directories that load under any plan and on any number of ranks.

    Args:
        plan: How the module is sharded: a plan, the name of a preset, a plan file (``.toml``), or an
            :class:`AutoPlan`. Presets compute in Fabric's precision.
        frozen: Where checkpoints keep frozen parameters; see :func:`thinwire.save`.
        **options: See ``lightning.fabric.strategies.ParallelStrategy``, and ``process_group_backend`` and ``timeout``;
            ``broadcast_buffers=False`` keeps buffers apart.

    Raises:
        UsageError: Fabric is asked for what thinwire cannot do in this loop.
    """

    def __init__(
        self, plan: tw.Plan | AutoPlan | str | Path = "zero3", *, frozen: str | Path | None = None, **options: Any
    ) -> None:
        self._frozen, self._building = frozen, Building(self, plan)
        self._sharded: WeakSet[nn.Module] = WeakSet()
        self._buffers: list[SharedBuffers] = []
        super().__init__(**options)
        self._backward_sync_control: Any = self  # whose no_backward_sync Fabric calls

    # -- precision ---------------------------------------------------------------------------------------------

    @property
    def precision(self) -> Precision:
        """The precision, which the plan's ``compute_dtype`` implements."""
        return self._precision or Precision()

    @precision.setter
    def precision(self, plugin: Precision | None) -> None:
        if plugin is None or isinstance(plugin, ThinwireFabricPrecision):
            self._precision = plugin
            return
        name = checked_precision(plugin, (Precision, MixedPrecision))
        scaler = getattr(plugin, "scaler", None)
        self._precision = Precision() if name == "32-true" else ThinwireFabricPrecision(name, self, scaler)

    @property
    def _loss_scale(self) -> LossScale | None:
        return getattr(self.precision, "loss_scale", None)

    # -- module and optimizer ----------------------------------------------------------------------------------

    @contextmanager
    def module_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Let modules be built without memory for their parameters.

        Args:
            empty_init: Whether to leave out the initialisers of ``torch.nn.init``; such parameters are NaN until a
                checkpoint is loaded.
        """
        with super().module_init_context(empty_init), self._building.context():
            yield

    def module_to_device(self, module: nn.Module) -> None:
        """Move a module to this rank's device, unless it has no values yet."""
        if not any(parameter.is_meta for parameter in module.parameters()):
            super().module_to_device(module)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard a module. Collective."""
        self._building.shard(module, str(self.precision.precision))
        self._sharded.add(module)
        if self._ddp_kwargs.get("broadcast_buffers", True):
            self._buffers.append(SharedBuffers([module]))
        return _Forward(module)

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[torch.optim.Optimizer], *scheduler: Any
    ) -> tuple[nn.Module, list[torch.optim.Optimizer], Any]:
        """Shard a module, and let its optimizers train the shares. Collective.

        Args:
            module: The module.
            optimizers: Its optimizers; a single one is made anew.
            *scheduler: Scheduler of the optimizer, or ``None``; Lightning before 2.6 passes nothing, and expects
                nothing back.

        Raises:
            UsageError: An optimizer is not the module's.
        """
        names = names_of(module)
        forward = self.setup_module(module)
        made = self._over_shares(module, optimizers, names)
        parts: Any = (forward, made, *scheduler)
        return parts  # type: ignore[no-any-return]

    def _over_shares(
        self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], names: Mapping[int, str]
    ) -> list[torch.optim.Optimizer]:
        made = over_shares(module, optimizers, names, remedy=_TOGETHER, loss_scale=self._loss_scale)
        if not isinstance(made[0], ShardedOptimizer) and isinstance(self.precision, ThinwireFabricPrecision):
            self.precision.scale_each_optimizer()
        return made

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Make an optimizer of all of a sharded module's parameters anew over this rank's share. Collective.

        Raises:
            UsageError: The optimizer was made before the module was sharded.
        """
        if not isinstance(optimizer, ShardedOptimizer):
            kind = f"fabric.setup_optimizers({type(optimizer).__name__})"
            first = next(iter(optimizer.param_groups[0]["params"]))
            for module in self._sharded:
                if id(first) in (names := names_of(module)):
                    return self._over_shares(module, [optimizer], names)[0]
            raise UsageError(f"{kind}: make the optimizer after fabric.setup_module, or {_TOGETHER}")
        if optimizer.loss_scale is not self._loss_scale:
            raise UsageError(
                f"fabric.setup_optimizers: the optimizer's loss_scale is {optimizer.loss_scale!r}, and the precision's "
                f"is {self._loss_scale!r}: make it with thinwire.optimizer(..., "
                'loss_scale=getattr(fabric.strategy.precision, "loss_scale", None))'
            )
        return optimizer

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Combine no gradients in the backward inside, if ``enabled``."""
        return without_sync(_original(module)) if enabled else nullcontext()

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Make a step, and give all ranks the first one's buffers. Collective."""
        result = super().optimizer_step(optimizer, **kwargs)
        for buffers in self._buffers:
            buffers.share()
        return result

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Clip by the norm of the gradient of what the optimizer updates.

        Returns:
            The norm before clipping, 0-D, fp32; equal on every rank.

        Raises:
            RuntimeError: The norm is not finite, and ``error_if_nonfinite`` is set.
        """
        if not isinstance(optimizer, ShardedOptimizer):
            of_part: torch.Tensor = super().clip_gradients_norm(
                module, optimizer, max_norm, norm_type, error_if_nonfinite
            )
            return of_part
        norm = tw.clip_grad_norm_(_original(module), float(max_norm), float(norm_type))
        if error_if_nonfinite and not math.isfinite(norm.item()):
            raise RuntimeError(
                f"the norm of the gradients is {norm.item()}; to clip anyway, set error_if_nonfinite = False"
            )
        return norm

    def clip_gradients_value(self, module: nn.Module, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        """Clip each element of the gradient of what the optimizer updates."""
        if isinstance(optimizer, ShardedOptimizer) and optimizer.loss_scale is not None:
            tw.clip_grad_norm_(_original(module), math.inf)  # divides by the loss scale
        super().clip_gradients_value(module, optimizer, clip_val)

    # -- checkpoints -------------------------------------------------------------------------------------------

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any | None = None, filter: Any | None = None
    ) -> None:
        """Write a checkpoint directory atomically, with the other objects of rank 0 inside; of several modules, one
        directory inside for each, by its key. Collective.

        Raises:
            UsageError: The state has no sharded module, or what a checkpoint cannot hold.
        """
        for name, value in (("storage_options", storage_options), ("filter", filter)):
            if value:
                raise UsageError(f"{name}: the strategy 'thinwire' writes whole states to a local directory; omit it")
        found = _Sharded("fabric.save", {key: _original(item) for key, item in state.items()})
        others = {key: item.state_dict() if hasattr(item, "state_dict") else item for key, item in found.others.items()}
        where, content = self.broadcast((str(path), encoded(others, _REMEDY)))
        frozen = self._frozen or Path(where).parent
        for place, module, optimizers in found.places(Path(where)):
            tw.save(module, optimizers, place, extra={"fabric": content}, frozen=frozen)

    def load_checkpoint(
        self, path: Any, state: Any | None = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint of any plan and number of ranks into the objects of a state. Collective.

        Returns:
            What the checkpoint holds beyond the state, except for modules and optimizers.

        Raises:
            UsageError: The state has no sharded module, or the checkpoint is not Fabric's.
            KeyError: The state has a key that the checkpoint lacks, and ``strict`` is set.
        """
        if isinstance(state, torch.optim.Optimizer):  # fabric.load_raw: a file of one state dict
            load_whole_state(state, self.checkpoint_io.load_checkpoint(path, weights_only=weights_only))
            return {}
        if isinstance(state, nn.Module):
            remainder: dict[str, Any] = super().load_checkpoint(path, _original(state), strict, weights_only)
            return remainder
        found = _Sharded("fabric.load", {key: _original(item) for key, item in (state or {}).items()})
        assert state is not None
        lacking: set[int] = set()
        for place, _, optimizers in found.places(Path(path)):
            values = store.open_checkpoint(place).manifest.values
            if "fabric" not in (extra := values.get("extra", {})):
                raise UsageError(f"{place} was not written by fabric.save: load it with thinwire.load(...)")
            if "optimizer" not in values:
                lacking |= set(map(id, optimizers))
        others: dict[str, Any] = decoded(extra["fabric"])
        wanted = list(found.others)
        missing = [key for key, item in state.items() if id(item) in lacking or (key in wanted and key not in others)]
        if strict and missing:
            raise KeyError(
                f"the checkpoint {path} has no {', '.join(map(repr, missing))}; beside modules and optimizers it has "
                f"{sorted(others)}; load the rest with strict=False"
            )
        for place, module, optimizers in found.places(Path(path)):
            tw.load(module, [made for made in optimizers if id(made) not in lacking], place)
        for key in (key for key in wanted if key in others):
            value = others.pop(key)
            if hasattr(state[key], "load_state_dict"):
                state[key].load_state_dict(value)
            else:
                state[key] = value
        return others


class _Sharded:
    """The sharded modules of a state, each with its optimizers, and the other objects.

    Raises:
        UsageError: There is no sharded module.
    """

    def __init__(self, call: str, state: Mapping[str, Any]) -> None:
        self.modules = {key: item for key, item in state.items() if isinstance(item, nn.Module) and is_sharded(item)}
        if not self.modules:
            raise UsageError(
                f"{call}: the state has no sharded module; give it a module that fabric.setup returned: "
                '{"model": model, "optimizer": optimizer}'
            )
        self._optimizers: dict[str, list[torch.optim.Optimizer]] = {key: [] for key in self.modules}
        self.others: dict[str, Any] = {}
        owners = {id(item): key for key, module in self.modules.items() for item in module.parameters()}
        for key, item in state.items():
            groups = item.param_groups if isinstance(item, torch.optim.Optimizer) else []
            held = dict.fromkeys(owners.get(id(parameter)) for group in groups for parameter in group["params"])
            for owner in held:
                if owner is not None:
                    self._optimizers[owner].append(item)
            if key not in self.modules and not any(held):
                self.others[key] = item

    def places(self, path: Path) -> Iterator[tuple[Path, nn.Module, list[torch.optim.Optimizer]]]:
        """The directory of each module, the module, and its optimizers."""
        for key, module in self.modules.items():
            yield path if len(self.modules) == 1 else path / key, module, self._optimizers[key]


register(STRATEGY_REGISTRY, ThinwireFabricStrategy)
