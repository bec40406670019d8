"""The parts of a trainer of torchtitan over thinwire: a model becomes shares, and checkpoints hold them."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.checkpoint import DATALOADER, LR_SCHEDULER, MODEL, OPTIMIZER, TRAIN_STATE, CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.distributed import utils as distributed_utils
from torchtitan.tools.logging import logger

import thinwire as tw
from thinwire.agreement import NOTHING, Typed
from thinwire.checkpoint.manifest import MANIFEST_NAME
from thinwire.collectives.group import control
from thinwire.errors import CheckpointError, UsageError
from thinwire.integrations.common.optimizers import begin_micro_batch
from thinwire.integrations.common.plans import launched_mesh
from thinwire.integrations.common.typed_state import decoded, encoded
from thinwire.sharding.memory.initial import Region
from thinwire.sharding.runtime.runtime import runtime_of

_POSITION: Final[Typed[Any]] = Typed(object)

_STATES: Final = (TRAIN_STATE, LR_SCHEDULER)
"""Parts of the trainer that are equal on every rank."""

_OF_WEIGHTS: Final = (".metadata", "model.safetensors.index.json")
"""Files of torchtitan's own checkpoints, one of which each has."""

_REMEDY: Final = "Look at state_dict() of your data loader"


class StepsOfShares:
    """The steps of torchtitan's trainer over a sharded model. Put it before the trainer among the base classes."""

    model_parts: list[nn.Module]
    gradient_accumulation_steps: int

    def train_step(self, *batches: Any) -> None:
        """Run a step."""
        trainer: Any = super()
        with _clipping_by_the_whole_norm(self.model_parts[0]):
            trainer.train_step(*batches)

    def forward_backward_step(self, **batch: Any) -> torch.Tensor:
        """Run a micro-batch. Ranks combine gradients in the last one of a step."""
        trainer: Any = super()
        model = self.model_parts[0]
        number = runtime_of(model).backwards
        begin_micro_batch(model, last=number == self.gradient_accumulation_steps - 1)
        loss: torch.Tensor = trainer.forward_backward_step(**batch)
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


# -- the model ----------------------------------------------------------------------------------------------------


def shard(model: nn.Module, plan: str, training: Any, world: int, device: torch.device) -> None:
    """Shard a model on the meta device. torchtitan initialises it afterwards, as shares.

    Args:
        model: Model on the meta device, with its blocks in ``layers``.
        plan: Name of a preset, or a plan file.
        training: Training options of torchtitan.
        world: Number of ranks.
        device: Device of the shares.

    Raises:
        SpecError: There is no such preset or file, or the plan is for another number of ranks.
        UsageError: A plan file computes in another dtype than the trainer.
    """
    device = torch.device("cpu") if device.type == "cpu" else device
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros_like(buffer, device=device)
    tw.shard(model, _resolved(plan, world, training), units=list(_units(model)), values=_Unset(), device=device)
    # torchtitan would now allocate the parameters, but they are in place.
    model.to_empty = lambda *, device, recurse=True: model  # type: ignore[method-assign]
    logger.info("Sharded the model by the plan %s", plan)


def _resolved(plan: str, world: int, training: Any) -> tw.Plan:
    """The plan of a run: gradients are summed over ranks, because torchtitan's losses are divided by all tokens."""
    dtype = training.mixed_precision_param
    if plan.endswith(".toml"):
        chosen = tw.Plan.load(plan)
        if chosen.compute_dtype != dtype:
            raise UsageError(
                f"plan.compute_dtype = {chosen.compute_dtype!r}, but training.mixed_precision_param = {dtype!r}: set "
                "one of them to match the other"
            )
    else:
        mesh = launched_mesh(world)
        chosen = tw.Plan.preset(plan, nodes=mesh.nodes, local=mesh.local, compute_dtype=dtype)
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


def refuse_other_jobs(job: Any) -> None:
    """Refuse jobs that do not train on real ranks. Call this before torchtitan joins them.

    Args:
        job: Configuration of the whole job.

    Raises:
        UsageError: The job writes initial values, or has no real ranks.
    """
    if job.checkpoint.create_seed_checkpoint:
        raise UsageError(
            "checkpoint.create_seed_checkpoint = True: every plan starts from the same values for a debug.seed; "
            "leave it out"
        )
    if job.comm.mode != "default":
        raise UsageError(f"comm.mode = {job.comm.mode!r}: thinwire exchanges over real ranks; use 'default'")


def refuse_other_parallelism(parallel_dims: Any, parallelism: Any) -> None:
    """Refuse ranks that are not data-parallel, and options of FSDP.

    Args:
        parallel_dims: Degrees of parallelism.
        parallelism: Options of parallelism.

    Raises:
        UsageError: An option asks for what a plan decides here, or for another parallelism.
    """
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


def refuse_training(training: Any, compile_config: Any) -> None:
    """Refuse options of training that do not suit shares.

    Args:
        training: Training options.
        compile_config: Compilation, which may cover the loss but not the model.

    Raises:
        UsageError: One of them does not.
    """
    if compile_config.enable and "model" in compile_config.components:
        raise UsageError(
            "compile.components has 'model': blocks of a sharded model are not compiled here; compile 'loss' alone or "
            "set compile.enable = False"
        )
    if training.dtype != "float32":
        raise UsageError(
            f"training.dtype = {training.dtype!r}: masters are float32; use training.mixed_precision_param to compute "
            "in bfloat16"
        )


# -- checkpoints --------------------------------------------------------------------------------------------------


class WholeModel:
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


class CheckpointsOfShares(CheckpointManager):
    """torchtitan's checkpoint manager, with checkpoints of shares that load under any plan and on any number of ranks.

    When to save, what to keep and what to load follow torchtitan's rules. Checkpoints of weights alone (the last one by
    default, and in Hugging Face's format on request) are those that torchtitan writes and reads itself.
    """

    def dcp_save(self, state_dict: dict[str, Any], checkpoint_id: str, *rest: Any, **options: Any) -> Any:
        """Save all states as shares, or weights alone as torchtitan does. Collective.

        A checkpoint of the same step is replaced, whatever it holds.
        """
        _make_way(Path(checkpoint_id), shares=MODEL in state_dict)
        if MODEL not in state_dict:
            return super().dcp_save(state_dict, checkpoint_id, *rest, **options)
        extra = {name: encoded(state_dict[name].state_dict(), _REMEDY) for name in _STATES}
        extra[DATALOADER] = control().all_gather_typed(_position(state_dict[DATALOADER]), _POSITION)
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
        place = Path(folder or self.folder)
        saved = place.glob(f"step-*/{MANIFEST_NAME}")
        steps = [int(match[1]) for path in saved if (match := re.fullmatch(r"step-(\d+)", path.parent.name))]
        of_weights: int = super()._find_load_step(folder)
        if not steps:
            return of_weights
        if of_weights > max(steps):
            logger.warning(
                "%s has weights alone: training goes on from step %d", place / f"step-{of_weights}", max(steps)
            )
        return max(steps)

    def _flattened_model_states_sd(self, state_dict: dict[str, Any] | None = None) -> dict[str, Any]:
        return dict(self.states if state_dict is None else state_dict)


def _make_way(directory: Path, *, shares: bool) -> None:
    """Delete the checkpoint of a step that is saved again with other files, as torchtitan overwrites its own.
    Collective."""

    def delete() -> None:
        if control().rank:
            return
        is_ours = Path(directory, MANIFEST_NAME).is_file()
        is_of_weights = not is_ours and any(Path(directory, name).is_file() for name in _OF_WEIGHTS)
        if is_of_weights if shares else is_ours:
            shutil.rmtree(directory)

    control().agree(delete, lambda problems: CheckpointError(f"{directory} cannot be replaced: {problems[0]}"), NOTHING)


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
