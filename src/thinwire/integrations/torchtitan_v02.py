"""torchtitan 0.2's ``Trainer`` over thinwire, whose configuration is a ``JobConfig``.

:class:`ThinwireTrainer` exchanges ``parallelize_fn`` and ``build_optimizers_fn`` of the model's ``TrainSpec``, and
the checkpoint manager. ``python -m thinwire.integrations.torchtitan_v02`` is torchtitan's command with ``--plan``.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from thinwire.errors import UsageError
from thinwire.integrations.torchtitan_release import wrong_release

try:
    from torchtitan.protocols.train_spec import TrainSpec
except ModuleNotFoundError as missing:
    raise wrong_release(__name__) from missing

from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.models.llama3.infra.parallelize import _op_sac_save_list
from torchtitan.tools import utils
from torchtitan.tools.logging import init_logger
from torchtitan.train import Trainer

from thinwire.integrations.optimizers import over_shares
from thinwire.integrations.torchtitan_parts import (
    CheckpointsOfShares,
    StepsOfShares,
    refuse_other_jobs,
    refuse_other_parallelism,
    refuse_training,
    shard,
)
from thinwire.sharding.optimizer.sharded_optimizer import ShardedOptimizer
from thinwire.sharding.optimizer.stock_optimizers import INNER

__all__ = ["PlannedJob", "ShardedCheckpoints", "ShardedOptimizers", "ThinwireTrainer", "main", "parallelize"]


@dataclass
class PlannedJob(JobConfig):
    """A job's configuration with a plan, which the command line and the file can set."""

    plan: str = "zero3"
    """How the model is sharded: the name of a preset, or a plan file (.toml)."""


class ThinwireTrainer(StepsOfShares, Trainer):
    """torchtitan's ``Trainer`` over a sharded model.

    Args:
        job_config: Configuration of the job.
        plan: Name of a preset, or a plan file (``.toml``). A :class:`PlannedJob` has one of its own.

    Raises:
        UsageError: The configuration asks for what thinwire cannot do in this loop.
        SpecError: There is no such preset or file, or the plan is for another number of ranks.
    """

    checkpointer: ShardedCheckpoints

    def __init__(self, job_config: JobConfig, plan: str | Path | None = None) -> None:
        self.plan = str(plan if plan is not None else getattr(job_config, "plan", "zero3"))
        _refuse_job(job_config)
        super().__init__(job_config)
        if not self.parallel_dims.fsdp_enabled:  # a single rank, where torchtitan would enter autocast
            self.maybe_enable_amp = nullcontext()
            if job_config.validation.enable:
                self.validator.maybe_enable_amp = self.maybe_enable_amp
        self.checkpointer.close()
        adapter, model_args = self.train_spec.state_dict_adapter, self.model_args
        self.checkpointer = ShardedCheckpoints(
            dataloader=self.dataloader,
            model_parts=self.model_parts,
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            states={"train_state": self},
            checkpoint_config=job_config.checkpoint,
            sd_adapter=adapter(model_args, job_config.model.hf_assets_path) if adapter else None,
            base_folder=job_config.job.dump_folder,
        )

    @property
    def train_spec(self) -> TrainSpec:
        """The model's specification, whose model is sharded by the plan."""
        return self._train_spec

    @train_spec.setter
    def train_spec(self, spec: TrainSpec) -> None:
        split = functools.partial(parallelize, plan=self.plan, saved=_saved_operations(spec))
        build = functools.partial(_sharded_optimizers, build=spec.build_optimizers_fn)
        self._train_spec = dataclasses.replace(spec, parallelize_fn=split, build_optimizers_fn=build)


def _refuse_job(job_config: JobConfig) -> None:
    refuse_other_jobs(job_config)
    if job_config.model.converters:
        raise UsageError(
            f"model.converters = {job_config.model.converters!r}: float8 and other converted layers gather weights "
            "themselves; use the model without converters"
        )
    if job_config.optimizer.early_step_in_backward:
        raise UsageError(
            "optimizer.early_step_in_backward = True: thinwire updates a unit as soon as its gradients have arrived; "
            "leave it out"
        )


# -- the model ----------------------------------------------------------------------------------------------------


def parallelize(
    model: nn.Module, parallel_dims: Any, job_config: JobConfig, *, plan: str = "zero3", saved: Any = _op_sac_save_list
) -> nn.Module:
    """Shard a model of torchtitan 0.2: a ``parallelize_fn`` with a plan.

    The model's parameters come on the meta device and get no values here. torchtitan initialises them afterwards, as
    shares, with the values that a single process would draw. No rank holds the whole model, unless the plan says so.

    Args:
        model: Model on the meta device, with its blocks in ``layers``.
        parallel_dims: Degrees of parallelism; all ranks are data-parallel.
        job_config: Configuration of the job.
        plan: Name of a preset, or a plan file.
        saved: Operations whose results selective activation checkpointing keeps.

    Returns:
        The same object.

    Raises:
        UsageError: The options ask for what thinwire cannot do here.
        SpecError: There is no such preset or file, or the plan is for another number of ranks.
    """
    refuse_other_parallelism(parallel_dims, job_config.parallelism)
    refuse_training(job_config.training, job_config.compile)
    device = torch.device(utils.device_type, int(os.environ["LOCAL_RANK"]))
    shard(model, plan, job_config.training, parallel_dims.world_size, device)
    if job_config.activation_checkpoint.mode != "none":
        apply_ac(
            model,
            job_config.activation_checkpoint,
            op_sac_save_list=saved,
            base_folder=job_config.job.dump_folder,
        )
    return model


def _saved_operations(spec: TrainSpec) -> Any:
    """Operations whose results a model's own ``parallelize_fn`` keeps under selective activation checkpointing."""
    module = sys.modules.get(getattr(spec.parallelize_fn, "__module__", ""))
    return getattr(module, "_op_sac_save_list", _op_sac_save_list)


# -- optimizers ---------------------------------------------------------------------------------------------------


class ShardedOptimizers(OptimizersContainer):
    """torchtitan's optimizers container with one optimizer over this rank's shares.

    Args:
        made: The container that the model's own ``build_optimizers_fn`` made. Its hooks stay in place.

    Raises:
        UsageError: It has another number of optimizers than one, or the optimizer does not suit shares.
    """

    def __init__(self, made: OptimizersContainer) -> None:
        if len(made) != 1:
            raise UsageError(f"{type(made).__name__} has {len(made)} optimizers: a sharded model has one")
        self.model_parts = made.model_parts
        (model,), (inner,) = made.model_parts, made.optimizers
        names = {id(parameter): _canonical(name) for name, parameter in model.named_parameters()}
        remedy = "leave build_optimizers_fn as torchtitan has it"
        self.optimizers: list[ShardedOptimizer] = [over_shares(model, inner, names, remedy=remedy)]
        self._post_init([parameter for group in made.param_groups for parameter in group["params"]], made.defaults)
        self._optimizer_step_pre_hooks = made._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = made._optimizer_step_post_hooks
        object.__setattr__(self, INNER, True)  # its step is that of thinwire's optimizer, not one beside it

    def state_dict(self) -> dict[str, Any]:
        """Refuse to make a state dict, which would hold only this rank's shares."""
        return self.optimizers[0].state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuse to load a state dict; see :meth:`state_dict`."""
        self.optimizers[0].load_state_dict(state_dict)


def _canonical(name: str) -> str:
    """The name of a parameter without the wrapper of activation checkpointing."""
    return name.replace("_checkpoint_wrapped_module.", "")


def _sharded_optimizers(*args: Any, build: Callable[..., OptimizersContainer], **options: Any) -> ShardedOptimizers:
    """Build the optimizers of a model as its specification does, and make them anew over shares."""
    return ShardedOptimizers(build(*args, **options))


# -- checkpoints --------------------------------------------------------------------------------------------------


class ShardedCheckpoints(CheckpointsOfShares):
    """torchtitan's checkpoint manager, with checkpoints of shares that load under any plan and on any number of ranks.

    Args:
        **parts: See torchtitan's manager.

    Raises:
        UsageError: Saving is asynchronous.
    """

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        if self.enable:
            self.hold_shares_of(parts["model_parts"][0], parts["checkpoint_config"].async_mode)


# -- the command --------------------------------------------------------------------------------------------------


def main() -> None:
    """Train as ``torchtitan.train`` does, with ``--plan``."""
    init_logger()
    config = ConfigManager(PlannedJob).parse_args(sys.argv[1:])
    trainer = ThinwireTrainer(config)
    try:
        trainer.train()
    finally:
        trainer.close()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
