"""A strategy for Lightning's ``Fabric``: the loop stays as it is, and thinwire shards the module.

Importing this module registers the strategies ``thinwire`` and, by preset, ``thinwire_zero1``, ``thinwire_zero2`` and
``thinwire_zero3``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
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
from thinwire.errors import UsageError
from thinwire.integrations.building import Building
from thinwire.integrations.mixed import COMPUTE_DTYPES, ShardedPrecision, checked_precision, register
from thinwire.integrations.optimizers import follow, is_sharded, over_shares, without_sync
from thinwire.integrations.plans import chosen_plan
from thinwire.integrations.typed_state import decoded, encoded
from thinwire.sharding.optimizer.sharded_optimizer import ShardedOptimizer
from thinwire.sharding.step.loss_scale import LossScale
from thinwire.spec import Factor

__all__ = ["ThinwireFabricPrecision", "ThinwireFabricStrategy"]

_REMEDY: Final = "Give fabric.save numbers, texts, tensors, and objects with a state_dict() of these"
_TOGETHER: Final = "pass the module and the optimizer to one call of fabric.setup"


class ThinwireFabricPrecision(ShardedPrecision, Precision):
    """Fabric's mixed precision, which the plan's ``compute_dtype`` implements."""

    def convert_output(self, data: Any) -> Any:
        """Return outputs in the default dtype, so that losses outside are computed in it, as Fabric's own does."""

        def convert(value: torch.Tensor) -> torch.Tensor:
            return value.to(torch.get_default_dtype()) if value.is_floating_point() else value

        return apply_to_collection(data, torch.Tensor, convert)

    def backward(self, tensor: torch.Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """Run the backward of a loss, multiplied by the loss scale."""
        super().backward(tensor if self.loss_scale is None else self.loss_scale.scale(tensor), model, *args, **kwargs)


class _SyncControl:
    """How ``fabric.no_backward_sync`` keeps ranks from combining gradients."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Combine no gradients in the backward inside, if ``enabled``."""
        return without_sync(_original(module)) if enabled else nullcontext()


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
        plan: How the module is sharded: a plan, the name of a preset, or a plan file (``.toml``). Presets compute in
            Fabric's precision.
        frozen: Where checkpoints keep frozen parameters; see :func:`thinwire.save`.
        **options: See ``lightning.fabric.strategies.ParallelStrategy``, and ``process_group_backend`` and ``timeout``.

    Raises:
        UsageError: Fabric is asked for what thinwire cannot do in this loop.
    """

    def __init__(
        self, plan: tw.Plan | str | Path = "zero3", *, frozen: str | Path | None = None, **options: Any
    ) -> None:
        self._plan, self._frozen = plan, frozen
        self._building = Building(self.broadcast)
        self._sharded: WeakSet[nn.Module] = WeakSet()
        super().__init__(**options)
        self._backward_sync_control: Any = _SyncControl()

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
        mesh = Factor(local=self.world_size // self.num_nodes, nodes=self.num_nodes)
        dtype = COMPUTE_DTYPES[str(self.precision.precision)]
        self._building.shard(module, lambda: chosen_plan(self._plan, mesh, dtype), self.root_device)
        self._sharded.add(module)
        return _Forward(module)

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[torch.optim.Optimizer], *scheduler: Any
    ) -> tuple[nn.Module, list[torch.optim.Optimizer], Any]:
        """Shard a module, and make its optimizer anew over this rank's share. Collective.

        Args:
            module: The module.
            optimizers: Its optimizer.
            *scheduler: Scheduler of the optimizer, or ``None``; Lightning before 2.6 passes nothing, and expects
                nothing back.

        Raises:
            UsageError: There are several optimizers, the optimizer is not the module's, or a scheduler of it is not
                passed.
        """
        if len(optimizers) != 1:
            raise UsageError(
                f"fabric.setup: {len(optimizers)} optimizers; thinwire updates all parameters of a module by one. "
                "Make one optimizer with a parameter group for each set of options"
            )
        following = [item for item in scheduler if item is not None]
        if not following:
            _refuse_scheduled(
                optimizers[0],
                "pass it along, fabric.setup(model, optimizer, scheduler=scheduler), or make it afterwards",
            )
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        forward = self.setup_module(module)
        sharded = over_shares(module, optimizers[0], names, remedy=_TOGETHER, loss_scale=self._loss_scale)
        for item in following:
            follow(item, sharded)
        parts: Any = (forward, [sharded], *scheduler)
        return parts  # type: ignore[no-any-return]

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Make an optimizer of a sharded module's parameters anew over this rank's share. Collective.

        Raises:
            UsageError: The optimizer was made before the module was sharded, or a scheduler follows it.
        """
        if not isinstance(optimizer, ShardedOptimizer):
            _refuse_scheduled(optimizer, "make it after fabric.setup_optimizers")
            kind = f"fabric.setup_optimizers({type(optimizer).__name__})"
            first = next(iter(optimizer.param_groups[0]["params"]))
            for module in self._sharded:
                names = {id(parameter): name for name, parameter in module.named_parameters()}
                if id(first) in names:
                    return over_shares(module, optimizer, names, remedy=_TOGETHER, loss_scale=self._loss_scale)
            raise UsageError(f"{kind}: make the optimizer after fabric.setup_module, or {_TOGETHER}")
        if optimizer.loss_scale is not self._loss_scale:
            raise UsageError(
                f"fabric.setup_optimizers: the optimizer's loss_scale is {optimizer.loss_scale!r}, and the precision's "
                f"is {self._loss_scale!r}: make it with thinwire.optimizer(..., "
                'loss_scale=getattr(fabric.strategy.precision, "loss_scale", None))'
            )
        return optimizer

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Clip by the norm of the whole model's gradient.

        Returns:
            The norm before clipping, 0-D, fp32; equal on every rank.

        Raises:
            RuntimeError: The norm is not finite, and ``error_if_nonfinite`` is set.
        """
        del optimizer
        norm = tw.clip_grad_norm_(_original(module), float(max_norm), float(norm_type))
        if error_if_nonfinite and not math.isfinite(norm.item()):
            raise RuntimeError(
                f"the norm of the gradients is {norm.item()}; to clip anyway, set error_if_nonfinite = False"
            )
        return norm

    def clip_gradients_value(self, module: nn.Module, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        """Refuse to clip by value."""
        raise UsageError(f"clip_val = {clip_val}: thinwire clips by the norm; use fabric.clip_gradients(max_norm=...)")

    # -- checkpoints -------------------------------------------------------------------------------------------

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any | None = None, filter: Any | None = None
    ) -> None:
        """Write a checkpoint directory atomically, with the other objects of rank 0 inside. Collective.

        Raises:
            UsageError: The state has no sharded module, or what a checkpoint cannot hold.
        """
        for name, value in (("storage_options", storage_options), ("filter", filter)):
            if value:
                raise UsageError(f"{name}: the strategy 'thinwire' writes whole states to a local directory; omit it")
        state = {key: _original(item) for key, item in state.items()}
        module, optim = _sharded_objects("fabric.save", state)
        others = {key: _state_of(item) for key, item in state.items() if item is not module and item is not optim}
        where, content = self.broadcast((str(path), encoded(others, _REMEDY)))
        tw.save(module, optim, where, extra={"fabric": content}, frozen=self._frozen)

    def load_checkpoint(
        self, path: Any, state: Any | None = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint of any plan and number of ranks into the objects of a state. Collective.

        Returns:
            What the checkpoint holds beyond the state.

        Raises:
            UsageError: The state has no sharded module, or the checkpoint is not Fabric's.
            KeyError: The state has a key that the checkpoint lacks, and ``strict`` is set.
        """
        if isinstance(state, nn.Module | torch.optim.Optimizer):  # fabric.load_raw: a file of one state dict
            remainder: dict[str, Any] = super().load_checkpoint(path, state, strict, weights_only)
            return remainder
        found = {key: _original(item) for key, item in (state or {}).items()}
        module, optim = _sharded_objects("fabric.load", found)
        assert state is not None
        extra = tw.load(module, optim, Path(path))
        if "fabric" not in extra:
            raise UsageError(f"{path} was not written by fabric.save: load it with thinwire.load(...)")
        others: dict[str, Any] = decoded(extra["fabric"])
        wanted = [key for key, item in found.items() if item is not module and item is not optim]
        if strict and (missing := [key for key in wanted if key not in others]):
            raise KeyError(f"the checkpoint {path} has no {', '.join(map(repr, missing))}; it has {sorted(others)}")
        for key in (key for key in wanted if key in others):
            value = others.pop(key)
            if hasattr(state[key], "load_state_dict"):
                state[key].load_state_dict(value)
            else:
                state[key] = value
        return others


def _sharded_objects(call: str, state: Mapping[str, Any]) -> tuple[nn.Module, ShardedOptimizer | None]:
    """The sharded module of a state, and its optimizer."""
    modules = [item for item in state.values() if isinstance(item, nn.Module) and is_sharded(item)]
    optimizers = [item for item in state.values() if isinstance(item, ShardedOptimizer)]
    if len(modules) != 1 or len(optimizers) > 1:
        raise UsageError(
            f"{call}: the state has {len(modules)} sharded modules and {len(optimizers)} of their optimizers; give it "
            'one module that fabric.setup returned, and at most one optimizer: {"model": model, "optimizer": optimizer}'
        )
    return modules[0], optimizers[0] if optimizers else None


def _refuse_scheduled(optimizer: torch.optim.Optimizer, remedy: str) -> None:
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        raise UsageError(
            f"fabric.setup: a learning-rate scheduler follows {type(optimizer).__name__}, which is made anew over "
            f"shares; {remedy}"
        )


def _state_of(item: Any) -> Any:
    return item.state_dict() if hasattr(item, "state_dict") else item


register(STRATEGY_REGISTRY, ThinwireFabricStrategy)
