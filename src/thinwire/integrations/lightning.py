"""A strategy for Lightning's ``Trainer``: the trainer keeps its loop, and thinwire shards the module.

Importing this module registers the strategies ``thinwire`` and, by preset, ``thinwire_zero1``, ``thinwire_zero2`` and
``thinwire_zero3``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

import torch
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

import thinwire as tw
from thinwire.checkpoint import store
from thinwire.collectives import group
from thinwire.errors import UsageError
from thinwire.integrations.common.automatic import AutoPlan
from thinwire.integrations.common.buffers import SharedBuffers
from thinwire.integrations.common.building import Building
from thinwire.integrations.common.mixed import (
    ShardedPrecision,
    checked_precision,
    register,
    restore_scaler,
    scaler_state,
)
from thinwire.integrations.common.optimizers import combines, is_sharded, names_of, over_shares, without_sync
from thinwire.integrations.common.typed_state import decoded, encoded
from thinwire.sharding.checkpointing.full_state import load_whole_state, whole_state, whole_value
from thinwire.sharding.optimizer.sharded_optimizer import ShardedOptimizer

__all__ = ["AutoPlan", "ThinwirePrecision", "ThinwireStrategy"]

_REMEDY: Final = "Look at state_dict() of your callbacks and at save_hyperparameters()"


class ThinwirePrecision(ShardedPrecision, MixedPrecision):
    """The trainer's precision, which the plan's ``compute_dtype`` implements."""

    def pre_backward(self, tensor: torch.Tensor, module: Any) -> torch.Tensor:
        """Multiply a loss by the loss scale, if there is one."""
        scaled = tensor if self.loss_scale is None else self.loss_scale.scale(tensor)
        prepared: torch.Tensor = super().pre_backward(scaled, module)
        return prepared

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Make a step. With a loss scale, hooks see gradients that are divided by it, as Lightning's own do."""
        if self.loss_scale is None:
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        result = closure()
        has_gradients = result is not None or not model.automatic_optimization  # or training_step has returned nothing
        if has_gradients:
            tw.clip_grad_norm_(model, float("inf"))
        self._after_closure(model, optimizer)
        return optimizer.step(**kwargs) if has_gradients else result

    def state_dict(self) -> dict[str, Any]:
        """The loss scale, as torch's ``GradScaler`` describes it."""
        return super().state_dict() if self.loss_scale is None else scaler_state(self.loss_scale)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the loss scale of a checkpoint."""
        if self.loss_scale is None:
            super().load_state_dict(state_dict)
        else:
            restore_scaler(self.loss_scale, state_dict)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Clip by the norm of the gradient of what the optimizer updates, and keep it in ``strategy.gradient_norm``."""
        if isinstance(_plain(optimizer), ShardedOptimizer):
            norm = tw.clip_grad_norm_(self._strategy.lightning_module, float(clip_val))
        else:
            norm = nn.utils.clip_grad_norm_(self.main_params(optimizer), clip_val)
        self._strategy.gradient_norm = norm


def _plain(optimizer: Any) -> Any:
    """An optimizer without Lightning's wrapper."""
    return getattr(optimizer, "_optimizer", optimizer)


def _rename(checkpoint: dict[str, Any], old: str, new: str) -> None:
    if old in checkpoint:
        checkpoint[new] = checkpoint.pop(old)


class ThinwireStrategy(DDPStrategy):
    """Shards a ``LightningModule`` by a plan: ``Trainer(strategy=ThinwireStrategy("zero3"))``.

    A single optimizer of the whole module is made anew over this rank's share, with the same class, groups and options.
    Others train shares as they are. Checkpoints are directories that load under any plan and on any number of ranks.

    Args:
        plan: How the module is sharded: a plan, the name of a preset, a plan file (``.toml``), or an
            :class:`AutoPlan`. Presets compute in the trainer's precision.
        state_dict_type: What checkpoints are: ``"sharded"``, a directory of shares, or ``"full"``, an ordinary file of
            Lightning with whole weights and whole optimizer states, for which the first rank needs memory. Both kinds
            are loaded, whatever this says.
        frozen: Where checkpoints keep frozen parameters; see :func:`thinwire.save`.
        **options: See ``lightning.pytorch.strategies.ParallelStrategy``, and ``process_group_backend`` and ``timeout``;
            ``broadcast_buffers=False`` keeps buffers apart.

    Raises:
        UsageError: The trainer or the module asks for what thinwire cannot do in this loop.
    """

    strategy_name = "thinwire"

    optimizers: Any
    gradient_norm: torch.Tensor | None
    """Norm of the gradient of the latest step before clipping, 0-D, fp32; ``None`` without ``gradient_clip_val``."""

    def __init__(
        self,
        plan: tw.Plan | AutoPlan | str | Path = "zero3",
        *,
        state_dict_type: str = "sharded",
        frozen: str | Path | None = None,
        **options: Any,
    ) -> None:
        if state_dict_type not in ("sharded", "full"):
            raise UsageError(f"state_dict_type = {state_dict_type!r}: valid are 'sharded' and 'full'")
        self._writes_whole, self._frozen = state_dict_type == "full", frozen
        self.gradient_norm = None
        self._building = Building(self, plan)
        super().__init__(**options)

    def _share_buffers(self) -> None:
        """Take the first rank's buffers, such as running statistics, as DDP does."""
        self._buffers_of(self.lightning_module).share()

    def _buffers_of(self, module: nn.Module) -> SharedBuffers:
        return SharedBuffers([module] if self._ddp_kwargs.get("broadcast_buffers", True) else ())

    on_validation_start = on_test_start = on_predict_start = _share_buffers

    # -- precision ---------------------------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> Any:
        """The precision, which the plan's ``compute_dtype`` implements."""
        return self._precision_plugin or ThinwirePrecision("32-true", self)

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        if plugin is None or isinstance(plugin, ThinwirePrecision):
            self._precision_plugin = plugin
        else:
            name = checked_precision(plugin, (Precision, MixedPrecision))
            self._precision_plugin = ThinwirePrecision(name, self, getattr(plugin, "scaler", None))

    # -- module and optimizer ----------------------------------------------------------------------------------

    def model_sharded_context(self) -> AbstractContextManager[None]:
        """Let ``configure_model`` build layers without memory for their parameters."""
        return self._building.context()

    def setup(self, trainer: Any) -> None:
        """Shard the module, unless an earlier run has, and make the optimizer over shares."""
        self.accelerator.setup(trainer)
        module = self.lightning_module
        if trainer.state.fn == TrainerFn.FITTING and self._layer_sync and not is_sharded(module):
            self._layer_sync.apply(module)
        with _trained_later(module) if _unfreezes(trainer) else nullcontext():
            self._building.shard(
                module,
                str(self.precision_plugin.precision),
                micro_batches=trainer.accumulate_grad_batches,
                clip=bool(trainer.gradient_clip_val),
                steps=trainer.max_steps if trainer.max_steps > 0 else None,
            )
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        self._buffers, self._has_combined = self._buffers_of(module), False

    def setup_optimizers(self, trainer: Any) -> None:
        """Let the optimizers of ``configure_optimizers`` train the shares; one of the whole module is made anew."""
        super().setup_optimizers(trainer)
        made = over_shares(
            self.lightning_module,
            self.optimizers,
            names_of(self.lightning_module),
            remedy="do so inside configure_optimizers",
            loss_scale=self.precision_plugin.loss_scale,
            fixed=not _unfreezes(trainer),
            whole_states=self._writes_whole or not trainer.checkpoint_callbacks,
        )
        if isinstance(made[0], ShardedOptimizer):
            for config in self.lr_scheduler_configs:
                config.scheduler.optimizer = made[0]  # by which Lightning's callbacks tell whose scheduler it is
        else:
            self.precision_plugin.scale_each_optimizer()
        self.optimizers = made

    def teardown(self) -> None:
        """End the run. Unlike DDP's, this moves nothing to the CPU: the module stays sharded."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    # -- steps -------------------------------------------------------------------------------------------------

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Combine no gradients in the backward inside: more micro-batches of the step follow."""
        return without_sync(self.lightning_module)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of a micro-batch, or all of a manual optimization."""
        module = self.lightning_module
        if self._has_combined:  # as DDP, which shares buffers before the first forward of a step
            self._buffers.share()
        self._has_combined = combines(module)
        if module.automatic_optimization:
            return self._run_step("training_step", *args, **kwargs)
        with self.precision_plugin.forward_context():  # it updates parameters, which are shares outside of forwards
            return module.training_step(*args, **kwargs)

    def _run_step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        # Root parameters are gathered for the module's forward, in whose place the step runs. The batch is no argument
        # of it, so that targets keep their dtype.
        module, forward = self.lightning_module, self.lightning_module.forward

        def step() -> Any:
            module.forward = forward  # the step itself may call it
            return getattr(module, name)(*args, **kwargs)

        with self.precision_plugin.forward_context():
            module.forward = step
            try:
                return module()
            finally:
                module.forward = forward

    validation_step = functools.partialmethod(_run_step, "validation_step")
    test_step = functools.partialmethod(_run_step, "test_step")
    predict_step = functools.partialmethod(_run_step, "predict_step")

    # -- checkpoints -------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: values are loaded into shares."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The state of the module: of shares only what is no tensor, as :meth:`save_checkpoint` writes the others.
        Collective."""
        entries, first = self.lightning_module.state_dict().items(), group.control().rank == 0
        if not self._writes_whole:
            return {name: value for name, value in entries if not isinstance(value, torch.Tensor)}
        whole = {name: whole_value(value, keep=first) for name, value in entries}
        return whole if first else {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The state of the optimizer: of shares nothing, as :meth:`save_checkpoint` writes each rank's. Collective."""
        return whole_state(_plain(optimizer)) if self._writes_whole else {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load a module's state, except the shares that :meth:`load_checkpoint` has loaded."""
        if states := checkpoint["state_dict"]:
            of_shares = not any(isinstance(value, torch.Tensor) for value in states.values())
            self.lightning_module.load_state_dict(states, strict=strict and not of_shares)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load an optimizer's state, except the shares that :meth:`load_checkpoint` has loaded."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            if state:
                load_whole_state(optimizer, state)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write a checkpoint: a directory of shares, atomically, with the trainer's state of rank 0 inside, or
        Lightning's own file. Collective."""
        if self._writes_whole:
            _rename(checkpoint, ThinwirePrecision.__qualname__, MixedPrecision.__qualname__)
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if storage_options is not None:
            raise UsageError("storage_options: the strategy 'thinwire' writes to a local directory; leave them out")
        if any(isinstance(value, torch.Tensor) for value in checkpoint["state_dict"].values()):
            raise UsageError(
                "a callback or on_save_checkpoint has put tensors into the checkpoint's state_dict, whose place shares "
                "take: use ThinwireStrategy(..., state_dict_type='full')"
            )
        weights_only = "optimizer_states" not in checkpoint
        path, trainer_state = self.broadcast((str(filepath), encoded(checkpoint, _REMEDY)))
        optimizers = None if weights_only else self.optimizers
        tw.save(self.lightning_module, optimizers, path, extra={"lightning": trainer_state}, frozen=self._frozen)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load the shares of any plan and number of ranks from a directory, or read a file of Lightning's; returns the
        trainer's state. Collective."""
        if not Path(checkpoint_path).is_dir():
            options = {} if weights_only is None else {"weights_only": weights_only}
            checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, **options)
            _rename(checkpoint, MixedPrecision.__qualname__, ThinwirePrecision.__qualname__)
            self._add_groups(checkpoint)
            return checkpoint
        # Of a directory, nothing is read by running pickled code.
        extra = store.open_checkpoint(Path(checkpoint_path)).manifest.values.get("extra", {})
        if "lightning" not in extra:
            raise UsageError(
                f"{checkpoint_path} was not written by Lightning's Trainer: load it with thinwire.load(...)"
            )
        state: dict[str, Any] = decoded(extra["lightning"])
        self._add_groups(state)
        fits = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        tw.load(self.lightning_module, self.optimizers if fits else None, Path(checkpoint_path))
        return state

    def _add_groups(self, state: Mapping[str, Any]) -> None:
        """Give optimizers the groups that callbacks had added before a checkpoint. Lightning's order would be too late:
        it starts callbacks before it loads values into shares."""
        trainer = self.lightning_module.trainer
        for callback in trainer.callbacks:
            if isinstance(callback, BaseFinetuning) and (kept := state.get("callbacks", {}).get(callback.state_key)):
                callback.load_state_dict(kept)
                callback.on_fit_start(trainer, self.lightning_module)


def _unfreezes(trainer: Any) -> bool:
    """Whether a callback unfreezes parameters and adds them to an optimizer in the middle of training."""
    return any(isinstance(callback, BaseFinetuning) for callback in trainer.callbacks)


@contextmanager
def _trained_later(module: nn.Module) -> Iterator[None]:
    """Let a module be sharded with masters for its frozen parameters, which are frozen again afterwards."""
    frozen = [name for name, item in module.named_parameters() if item.is_floating_point() and not item.requires_grad]
    for name in frozen:
        module.get_parameter(name).requires_grad_(True)
    yield
    for name in frozen:
        module.get_parameter(name).requires_grad_(False)


register(StrategyRegistry, ThinwireStrategy)
