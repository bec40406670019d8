"""torchtitan's ``Trainer`` over thinwire: the trainer keeps its loop, and thinwire shards the model.

:func:`sharded` turns a trainer's configuration into one of :class:`ThinwireTrainer`. That trainer gives torchtitan
:func:`parallelize` as the model's ``parallelize_fn``, and activates three overrides: :func:`sharded_optimizers`,
:func:`sharded_checkpoints` and :func:`whole_loss`.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.checkpointer import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    TRAIN_STATE,
    BaseCheckpointManager,
    CheckpointManager,
)
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.quantization.utils import has_quantization
from torchtitan.config.override import OverrideConfig, derive, override
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.tools import filesystem
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import get_local_device
from torchtitan.trainer import Trainer

import thinwire as tw
from thinwire.checkpoint.manifest import MANIFEST_NAME
from thinwire.collectives.group import control
from thinwire.errors import UsageError
from thinwire.integrations.typed_state import decoded, encoded
from thinwire.sharding.foreign import INNER
from thinwire.sharding.memory.initial import Region
from thinwire.sharding.optim import ShardedOptimizer
from thinwire.sharding.runtime import runtime_of

__all__ = [
    "ShardedCheckpoints",
    "ShardedOptimizers",
    "ThinwireTrainer",
    "dense_attention",
    "parallelize",
    "sharded",
    "sharded_checkpoints",
    "sharded_optimizers",
    "whole_loss",
]

_OVERRIDES: Final = ("sharded_optimizers", "sharded_checkpoints", "whole_loss")
_STATES: Final = (TRAIN_STATE, LR_SCHEDULER)
"""Parts of the trainer that are equal on every rank."""

_REMEDY: Final = "Look at state_dict() of your data loader"


class ThinwireTrainer(Trainer):
    """torchtitan's ``Trainer`` over a sharded model. Make its configuration with :func:`sharded`.

    Args:
        config: Configuration of the run.

    Raises:
        UsageError: The configuration asks for what thinwire cannot do in this loop.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """The trainer's configuration, with a plan."""

        plan: str = "zero3"
        """How the model is sharded: the name of a preset, or a plan file (.toml)."""

    def __init__(self, config: Config) -> None:
        if not config.training.disable_cuda_graphs:
            raise UsageError(
                "training.disable_cuda_graphs = False: a captured graph cannot contain thinwire's collectives; set it "
                "to True"
            )
        if config.checkpoint.create_seed_checkpoint:
            raise UsageError(
                "checkpoint.create_seed_checkpoint = True: every plan starts from the same values for a debug.seed; "
                "leave it out"
            )
        assert config.model_spec is not None
        split = functools.partial(parallelize, plan=config.plan)
        config.model_spec = dataclasses.replace(config.model_spec, parallelize_fn=split)
        ours = [f"{__name__}.{name}" for name in _OVERRIDES]
        others = [target for target in config.override.imports if target not in ours]
        config.override = OverrideConfig(imports=[*ours, *others])
        super().__init__(config)

    def forward_backward_step(self, **batch: Any) -> torch.Tensor:
        """Run a micro-batch. Ranks combine gradients in the last one of a step."""
        runtime = runtime_of(self.model_parts[0])
        number = runtime.schedule.backwards
        runtime.begin_micro_batch(number, last=number == self.gradient_accumulation_steps - 1)
        loss: torch.Tensor = super().forward_backward_step(**batch)
        return loss


def sharded(config: Trainer.Config, plan: str | Path = "zero3") -> ThinwireTrainer.Config:
    """Turn the configuration of torchtitan's trainer into one that shards by a plan. CUDA graphs are switched off.

    Args:
        config: Configuration of ``torchtitan.trainer.Trainer``.
        plan: Name of a preset, or a plan file (``.toml``). ``--plan`` on torchtitan's command line replaces it.

    Raises:
        UsageError: The configuration belongs to another trainer.
    """
    if type(config) is not Trainer.Config:
        raise UsageError(
            f"{type(config).__qualname__}: thinwire.integrations.torchtitan.sharded takes a configuration of "
            "torchtitan.trainer.Trainer; other trainers have a loop of their own"
        )
    training = dataclasses.replace(config.training, disable_cuda_graphs=True)
    ours: ThinwireTrainer.Config = derive(config, ThinwireTrainer.Config, plan=str(plan), training=training)
    return ours


# -- the model ----------------------------------------------------------------------------------------------------


def parallelize(
    model: nn.Module,
    *,
    parallel_dims: Any,
    training: Any,
    parallelism: Any,
    compile_config: Any,
    plan: str = "zero3",
    **recomputation: Any,
) -> nn.Module:
    """Shard a model of torchtitan: a ``parallelize_fn`` with a plan.

    The model's parameters come on the meta device and get no values here. torchtitan initialises them afterwards, as
    shares, with the values that a single process would draw. No rank holds the whole model, unless the plan says so.

    Args:
        model: Model on the meta device, with its blocks in ``layers``.
        parallel_dims: Degrees of parallelism; all ranks are data-parallel.
        training: Training options, of which this reads dtypes, ``enable_cpu_offload`` and ``local_batch_size``.
        parallelism: Options of parallelism. Those of FSDP must keep their defaults.
        compile_config: Compilation, which may cover the loss but not the model.
        plan: Name of a preset, or a plan file.
        **recomputation: ``ac_config``, the activation checkpointing of blocks (``None`` for none), and ``dump_folder``,
            the directory for its output.

    Returns:
        The same object.

    Raises:
        UsageError: The options ask for what thinwire cannot do here.
        SpecError: There is no such preset or file, or the plan is for another number of ranks.
    """
    _refuse_parallelism(parallel_dims, parallelism)
    _refuse_options(model, training, compile_config)
    local = get_local_device()
    device = torch.device("cpu") if local.type == "cpu" else local
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros_like(buffer, device=device)
    chosen = resolved(plan, parallel_dims.world_size, training)
    tw.shard(model, chosen, units=list(_units(model)), values=_Unset(), device=device)
    # torchtitan would now allocate the parameters, but they are in place.
    model.to_empty = lambda *, device, recurse=True: model  # type: ignore[method-assign]
    if recomputation["ac_config"] is not None:
        recomputation["ac_config"].build(dump_folder=recomputation["dump_folder"]).apply(model)
    logger.info("Sharded the model by the plan %s", plan)
    return model


def resolved(plan: str, world: int, training: Any) -> tw.Plan:
    """The plan of a run: gradients are summed over ranks, because torchtitan's losses are divided by all tokens.

    Args:
        plan: Name of a preset, or a plan file.
        world: Number of ranks.
        training: Training options, of which this reads ``mixed_precision_param`` and ``local_batch_size``.

    Raises:
        SpecError: There is no such preset or file.
        UsageError: A plan file computes in another dtype than the trainer.
    """
    dtype = training.mixed_precision_param
    if plan.endswith(".toml"):
        chosen = tw.Plan.load(plan)
        if chosen.compute_dtype != dtype:
            raise UsageError(
                f"plan.compute_dtype = {chosen.compute_dtype!r}, but training.mixed_precision_param = {dtype!r}: set "
                "one of them to match the other"
            )
    else:
        local = min(int(os.environ.get("LOCAL_WORLD_SIZE", world)), world)
        chosen = tw.Plan.preset(plan, nodes=world // local, local=local, compute_dtype=dtype)
    return chosen.with_(grad_reduce="sum", micro_batch=training.local_batch_size)


class _Unset:
    """Initial values of parameters that torchtitan initialises later."""

    def open(self) -> str:
        """Identify the values."""
        return "zeros"

    def read(self, name: str, region: Region) -> torch.Tensor:
        """Zeros of the region's shape."""
        del name
        return torch.zeros([part.stop - part.start for part in region])


def _units(model: nn.Module) -> Iterator[nn.Module]:
    """Blocks, and leaves outside of them, such as the embedding and the head. The root takes shared parameters."""
    for child in model.children():
        if isinstance(child, nn.ModuleDict | nn.ModuleList):
            yield from child.children()
        elif sum(parameter.numel() for parameter in child.parameters()) > 1 << 16:
            yield child


def _refuse_parallelism(parallel_dims: Any, parallelism: Any) -> None:
    for name, degree in (
        ("tensor_parallel_degree", parallel_dims.tp),
        ("pipeline_parallel_degree", parallel_dims.pp),
        ("context_parallel_degree", parallel_dims.cp),
        ("expert_parallel_degree", parallel_dims.ep),
    ):
        if degree > 1:
            raise UsageError(
                f"parallelism.{name} = {degree}: thinwire shards over data-parallel ranks here; set it to 1"
            )
    if parallel_dims.dp_replicate > 1:
        raise UsageError(
            f"parallelism.data_parallel_replicate_degree = {parallel_dims.dp_replicate}: the plan says what is "
            "replicated, for example 'hsdp' or 'zero1-node'; leave it at 1"
        )
    if parallelism.fsdp_reshard_after_forward != "default":
        raise UsageError(
            f"parallelism.fsdp_reshard_after_forward = {parallelism.fsdp_reshard_after_forward!r}: the plan's "
            "keep_gathered says what stays gathered; leave it at 'default'"
        )
    if parallelism.enable_fsdp_symm_mem:
        raise UsageError("parallelism.enable_fsdp_symm_mem = True: it is FSDP's; leave it out")
    if parallelism.spmd_backend == "full_dtensor":
        raise UsageError(
            "parallelism.spmd_backend = 'full_dtensor': inputs would be DTensors; use 'spmd_types' or 'partial_dtensor'"
        )


def _refuse_options(model: nn.Module, training: Any, compile_config: Any) -> None:
    if compile_config.enable and "model" in compile_config.components:
        raise UsageError(
            "compile.components has 'model': blocks of a sharded model are not compiled here; compile 'loss' alone or "
            "set compile.enable = False"
        )
    if training.enable_cpu_offload:
        raise UsageError("training.enable_cpu_offload = True: thinwire keeps shares on the device; leave it out")
    if training.dtype != "float32":
        raise UsageError(
            f"training.dtype = {training.dtype!r}: masters are float32; use training.mixed_precision_param to compute "
            "in bfloat16"
        )
    if has_quantization(getattr(model, "config", None)):
        raise UsageError(
            "the model has float8 or other quantized layers, which gather weights themselves: use it without converters"
        )


# -- optimizers ---------------------------------------------------------------------------------------------------


class ShardedOptimizers(OptimizersContainer):
    """torchtitan's optimizers container with one optimizer over this rank's shares.

    Args:
        config: Parameter groups, which all name the same optimizer.
        model_parts: The sharded model.

    Raises:
        UsageError: Groups name several optimizers, or one that does not suit shares.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """The container's configuration."""

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        names = {group.optimizer_name for group in config.param_groups}
        if len(names) != 1:
            raise UsageError(
                f"optimizer.param_groups name {', '.join(sorted(names)) or 'no optimizer'}: all groups of a sharded "
                "model have one and the same"
            )
        (name,) = names
        optimizer_class = self._resolve_optimizer_factory(name)
        if not isinstance(optimizer_class, type):
            raise UsageError(f"optimizer_name = {name!r}: it shards parameters by itself; use 'Adam' or 'AdamW'")
        if config.implementation == "fused_opt_states_bf16":
            raise UsageError(
                "optimizer.implementation = 'fused_opt_states_bf16': states of shares are float32; use 'fused', "
                "'foreach' or 'for-loop'"
            )
        self.model_parts = model_parts
        options = self._build_impl_kwargs(config)
        groups, patterns = self._build_param_groups(model_parts[0], config.param_groups, options)
        owned = [{key: value for key, value in group.items() if key != "param_names"} for group in groups[name]]
        options |= config.optimizer_factory_kwargs_by_name.get(name, {})
        self.optimizers: list[ShardedOptimizer] = [
            tw.optimizer(model_parts[0], optimizer_class, param_groups=owned, **options)
        ]
        everything = [parameter for group in groups[name] for parameter in group["params"]]
        self._validate_params(everything)
        self._log_optimizer(self.optimizers[0].inner, 0, patterns[name])
        self._post_init(everything)
        object.__setattr__(self, INNER, True)  # its step is that of thinwire's optimizer, not one beside it

    def state_dict(self) -> dict[str, Any]:
        """Refuse to make a state dict, which would hold only this rank's shares."""
        return self.optimizers[0].state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuse to load a state dict; see :meth:`state_dict`."""
        self.optimizers[0].load_state_dict(state_dict)


@override(target=OptimizersContainer.Config, description="One optimizer over thinwire's shares")
def sharded_optimizers(config: OptimizersContainer.Config) -> ShardedOptimizers.Config:
    """Override of torchtitan's optimizers container, for a model that :func:`parallelize` has sharded."""
    ours: ShardedOptimizers.Config = derive(config, ShardedOptimizers.Config)
    return ours


# -- checkpoints --------------------------------------------------------------------------------------------------


class _WholeModel:
    """The weights of the whole model, for exports and for loading them. Collective.

    Args:
        model: Sharded model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Weights and buffers in fp32, on the CPU of every rank."""
        return tw.full_state_dict(self.model)

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        """Copy weights and buffers into the shares."""
        self.model.load_state_dict(state_dict)


class ShardedCheckpoints(CheckpointManager):
    """torchtitan's checkpoint manager, with checkpoints of shares that load under any plan and on any number of ranks.

    When to save, what to keep and what to load follow torchtitan's rules. Checkpoints of weights alone (the last one by
    default, and in Hugging Face's format on request) are those that torchtitan writes and reads itself.

    Args:
        config: Configuration of the manager.
        **parts: See torchtitan's manager.

    Raises:
        UsageError: The folder is remote, or saving is asynchronous.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """The manager's configuration."""

    def __init__(self, config: Config, **parts: Any) -> None:
        super().__init__(config, **parts)
        if not self.enable:
            return
        if filesystem.is_remote(self.folder):
            raise UsageError(f"checkpoint.folder = {config.folder!r}: checkpoints go to a local directory")
        if config.async_mode != "disabled":
            raise UsageError(f"checkpoint.async_mode = {config.async_mode!r}: shares are saved at once; use 'disabled'")
        self.states[MODEL] = _WholeModel(parts["model_parts"][0])

    def dcp_save(self, state_dict: dict[str, Any], checkpoint_id: str, *rest: Any, **options: Any) -> Any:
        """Save all states as shares, or weights alone as torchtitan does. Collective."""
        if MODEL not in state_dict:
            return super().dcp_save(state_dict, checkpoint_id, *rest, **options)
        extra = {name: encoded(state_dict[name].state_dict(), _REMEDY) for name in _STATES}
        extra[DATALOADER] = control().all_gather_object(_position(state_dict[DATALOADER]))
        optim = state_dict[OPTIMIZER].optimizers[0]
        tw.save(state_dict[MODEL].model, optim, checkpoint_id, extra={"torchtitan": extra})
        return None

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Load the states that ``state_dict`` names, or weights alone. Collective."""
        ours, model = Path(checkpoint_id, MANIFEST_NAME).is_file(), self.states[MODEL].model
        if ours and MODEL not in state_dict:
            tw.load(model, None, checkpoint_id)
        elif MODEL not in state_dict:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
        elif not ours:
            raise UsageError(
                f"{checkpoint_id} has no states of thinwire's shares: to start from its weights, name it in "
                "checkpoint.initial_load_path and use another checkpoint.folder"
            )
        else:
            optim = state_dict[OPTIMIZER].optimizers[0] if OPTIMIZER in state_dict else None
            extra = tw.load(model, optim, checkpoint_id)["torchtitan"]
            for name in state_dict.keys() & set(_STATES):
                state_dict[name].load_state_dict(decoded(extra[name]))
            if DATALOADER in state_dict:
                _continue(state_dict[DATALOADER], extra[DATALOADER])

    def _find_load_step(self, folder: str = "") -> int:
        saved = Path(folder or self.folder).glob(f"step-*/{MANIFEST_NAME}")
        steps = [int(match[1]) for path in saved if (match := re.fullmatch(r"step-(\d+)", path.parent.name))]
        return max(steps, default=-1) if max(steps, default=-1) >= 0 else super()._find_load_step(folder)

    def _flattened_model_states_sd(self, state_dict: dict[str, Any] | None = None) -> dict[str, Any]:
        return dict(self.states if state_dict is None else state_dict)


def _position(loader: Any) -> Any:
    """The position of this rank in the data. torchtitan's loaders would give it as a pickle."""
    state = (
        StatefulDataLoader.state_dict(loader) if isinstance(loader, ParallelAwareDataloader) else loader.state_dict()
    )
    return encoded(state, _REMEDY)


def _continue(loader: Any, positions: list[Any]) -> None:
    """Move a loader to this rank's position.

    Raises:
        UsageError: Positions of another number of ranks differ, so that this rank has none.
    """
    ranks = control()
    if len(positions) == ranks.size:
        state = decoded(positions[ranks.rank])
    elif not isinstance(loader, ParallelAwareDataloader) and all(other == positions[0] for other in positions):
        state = decoded(positions[0])
    else:
        raise UsageError(
            f"the checkpoint has the positions of {len(positions)} ranks in the data, and this job has {ranks.size} "
            "ranks: torchtitan cannot cut them anew; to start the data from its beginning, set "
            "checkpoint.exclude_from_loading to dataloader"
        )
    if isinstance(loader, ParallelAwareDataloader):
        StatefulDataLoader.load_state_dict(loader, state)
    else:
        loader.load_state_dict(state)


@override(target=BaseCheckpointManager.Config, description="Checkpoints of thinwire's shares")
def sharded_checkpoints(config: BaseCheckpointManager.Config) -> ShardedCheckpoints.Config:
    """Override of torchtitan's checkpoint managers, for a model that :func:`parallelize` has sharded."""
    ours: ShardedCheckpoints.Config = derive(config, ShardedCheckpoints.Config)
    return ours


# -- parts of the model -------------------------------------------------------------------------------------------


@override(target=ChunkedLossWrapper.Config, description="The loss of whole sequences")
def whole_loss(config: ChunkedLossWrapper.Config) -> Any:
    """Override of torchtitan's chunked loss by the loss that it wraps, of whole sequences.

    The chunked loss runs the head outside of the model's forward, with a backward for each chunk. Ranks would combine
    the head's gradients once for each chunk.
    """
    logger.info("The loss is computed over whole sequences instead of %d chunks", config.num_chunks)
    return config.loss_fn


@override(target=FlexAttention.Config, description="Causal attention without masks, for CPUs")
def dense_attention(config: FlexAttention.Config) -> ScaledDotProductAttention.Config:
    """Override of ``flex`` attention for rehearsals on CPUs, where it has no backward. It does not separate the
    documents of a sequence."""
    del config
    return ScaledDotProductAttention.Config()
