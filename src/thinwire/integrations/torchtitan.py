"""torchtitan's ``Trainer`` over thinwire: the trainer keeps its loop, and thinwire shards the model.

:func:`sharded` turns a trainer's configuration into one of :class:`ThinwireTrainer`. That trainer gives torchtitan
:func:`parallelize` as the model's ``parallelize_fn``, and activates three overrides: :func:`sharded_optimizers`,
:func:`sharded_checkpoints` and :func:`whole_loss`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from thinwire.errors import UsageError

try:
    from torchtitan.trainer import Trainer
except ModuleNotFoundError as missing:
    raise ImportError(f"{__name__} needs torchtitan 0.3: pip install 'thinwire[torchtitan]'") from missing

from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.quantization.utils import has_quantization
from torchtitan.config.override import OverrideConfig, derive, override
from torchtitan.distributed import utils as distributed_utils
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import get_local_device

import thinwire as tw
from thinwire.integrations.common.optimizers import begin_micro_batch
from thinwire.integrations.common.plans import chosen_plan, launched_mesh
from thinwire.integrations.torchtitan_checkpoints import ShardedCheckpoints
from thinwire.sharding.memory.initial import Region
from thinwire.sharding.modules.graphs import cuda_graphs_error
from thinwire.sharding.optimizer.sharded_optimizer import ShardedOptimizer
from thinwire.sharding.optimizer.stock_optimizers import INNER
from thinwire.sharding.runtime.runtime import runtime_of

_OVERRIDES: Final = ("sharded_optimizers", "sharded_checkpoints", "whole_loss")


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
            raise cuda_graphs_error("training.disable_cuda_graphs = False", "set it to True")
        same_values = "every plan starts from the same values for a debug.seed; leave it out"
        _require(
            ("checkpoint.create_seed_checkpoint", config.checkpoint.create_seed_checkpoint, False, same_values),
            ("comm.mode", config.comm.mode, "default", "thinwire exchanges over real ranks; use 'default'"),
        )
        assert config.model_spec is not None
        split = functools.partial(parallelize, plan=config.plan)
        config.model_spec = dataclasses.replace(config.model_spec, parallelize_fn=split)
        ours = [f"{__name__}.{name}" for name in _OVERRIDES]
        others = [target for target in config.override.imports if target not in ours]
        config.override = OverrideConfig(imports=[*ours, *others])
        super().__init__(config)

    def train_step(self, *batches: Any) -> None:
        """Run a step."""
        with _clipping_by_the_whole_norm(self.model_parts[0]):
            super().train_step(*batches)

    def forward_backward_step(self, **batch: Any) -> torch.Tensor:
        """Run a micro-batch. Ranks combine gradients in the last one of a step."""
        model = self.model_parts[0]
        begin_micro_batch(model, last=runtime_of(model).backwards == self.gradient_accumulation_steps - 1)
        loss: torch.Tensor = super().forward_backward_step(**batch)
        return loss


@contextlib.contextmanager
def _clipping_by_the_whole_norm(model: nn.Module) -> Iterator[None]:
    """Let a trainer's step clip a model's gradient by its norm, which ranks exchange with the step's agreement.

    torchtitan would ask for the norm of each parameter.
    """

    def clip(
        parameters: Any, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, **way: Any
    ) -> torch.Tensor:
        del parameters, way  # all of the model's; how torchtitan would scale them, and degrees that are refused above 1
        return tw.clip_grad_norm_(model, max_norm, norm_type, error_if_nonfinite)

    theirs = distributed_utils.clip_grad_norm_
    distributed_utils.clip_grad_norm_ = clip
    try:
        yield
    finally:
        distributed_utils.clip_grad_norm_ = theirs


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
        SpecError: There is no such preset or file, or the plan is for another number of ranks or another dtype.
    """
    _refuse_parallelism(parallel_dims, parallelism)
    _refuse_options(model, training, compile_config)
    device = get_local_device()
    device = torch.device("cpu") if device.type == "cpu" else device
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros_like(buffer, device=device)
    resolved = _resolved(plan, parallel_dims.world_size, training)
    tw.shard(model, resolved, units=list(_units(model)), values=_Unset(), device=device)
    # torchtitan would now allocate the parameters, but they are in place.
    model.to_empty = lambda *, device, recurse=True: model  # type: ignore[method-assign]
    logger.info("Sharded the model by the plan %s", plan)
    if recomputation["ac_config"] is not None:
        recomputation["ac_config"].build(dump_folder=recomputation["dump_folder"]).apply(model)
    return model


def _resolved(plan: str, world: int, training: Any) -> tw.Plan:
    """The plan of a run: gradients are summed over ranks, because torchtitan's losses are divided by all tokens."""
    dtype = training.mixed_precision_param
    chosen = chosen_plan(plan, launched_mesh(world), dtype, asked_by="training.mixed_precision_param")
    if training.enable_cpu_offload and chosen.residence.on_device:  # a plan file may say otherwise
        on_host = {"optimizer": "host-stream", "gradients": "host", "params": "host"}
        chosen = chosen.with_(residence=on_host)
    return chosen.with_(grad_reduce="sum", micro_batch=training.local_batch_size)


class _Unset:
    """Initial values of parameters that torchtitan initialises later."""

    def open(self) -> str:
        """Identify the values."""
        return "zeros"

    def read(self, name: str, region: Region) -> torch.Tensor:
        """Zeros of the region's shape."""
        del name
        return torch.zeros([part.stop - part.start for part in region], dtype=torch.float32, device="cpu")


def _units(model: nn.Module) -> Iterator[nn.Module]:
    """Blocks, and leaves outside of them, such as the embedding and the head. The root takes shared parameters."""
    for child in model.children():
        if isinstance(child, nn.ModuleDict | nn.ModuleList):
            yield from child.children()
        elif sum(parameter.numel() for parameter in child.parameters()) > 1 << 16:
            yield child


def _require(*options: tuple[str, object, object, str]) -> None:
    """Refuse options that have another value than they need here: name, value, needed value, and what to do."""
    for name, value, needed, remedy in options:
        if value != needed:
            raise UsageError(f"{name} = {value!r}: {remedy}")


def _refuse_parallelism(parallel_dims: Any, parallelism: Any) -> None:
    """Refuse ranks that are not data-parallel, and what a plan decides here."""
    one = "thinwire shards over data-parallel ranks here; set it to 1"
    replicated = "the plan says what is replicated, for example 'hsdp' or 'zero1-node'; leave it at 1"
    gathered = "the plan's keep_gathered says what stays gathered; leave it at 'default'"
    _require(
        ("parallelism.tensor_parallel_degree", parallel_dims.tp, 1, one),
        ("parallelism.pipeline_parallel_degree", parallel_dims.pp, 1, one),
        ("parallelism.context_parallel_degree", parallel_dims.cp, 1, one),
        ("parallelism.expert_parallel_degree", parallel_dims.ep, 1, one),
        ("parallelism.data_parallel_replicate_degree", parallel_dims.dp_replicate, 1, replicated),
        ("parallelism.fsdp_reshard_after_forward", parallelism.fsdp_reshard_after_forward, "default", gathered),
        ("parallelism.enable_fsdp_symm_mem", parallelism.enable_fsdp_symm_mem, False, "it is FSDP's; leave it out"),
    )
    if parallelism.spmd_backend == "full_dtensor":
        raise UsageError(
            "parallelism.spmd_backend = 'full_dtensor': inputs would be DTensors; use 'spmd_types' or 'partial_dtensor'"
        )


def _refuse_options(model: nn.Module, training: Any, compile_config: Any) -> None:
    """Refuse options that do not suit shares."""
    if compile_config.enable and "model" in compile_config.components:
        raise UsageError(
            "compile.components has 'model': blocks of a sharded model are not compiled here; compile 'loss' alone or "
            "set compile.enable = False"
        )
    masters = "masters are float32; use training.mixed_precision_param to compute in bfloat16"
    _require(("training.dtype", training.dtype, "float32", masters))
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
