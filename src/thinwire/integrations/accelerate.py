"""Hugging Face's ``Accelerator`` over thinwire, for loops that are written by hand.

``prepare`` shards the model and makes the optimizer anew over shares. The rest of the loop stays as it is. A checkpoint
of ``save_state`` has a directory ``thinwire`` with the sharded state, which loads under any plan and on any number of
ranks.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import MethodType
from typing import Any, Final

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DistributedType,
    DynamoBackend,
    convert_outputs_to_fp32,
)
from torch import nn

import thinwire as tw
from thinwire.errors import UsageError
from thinwire.integrations.common.automatic import AutoPlan, plan_for
from thinwire.integrations.common.buffers import SharedBuffers
from thinwire.integrations.common.mixed import scale_like
from thinwire.integrations.common.optimizers import (
    begin_micro_batch,
    combines,
    is_sharded,
    names_of,
    over_shares,
    without_sync,
)
from thinwire.integrations.common.plans import launched_mesh
from thinwire.sharding.checkpointing.streaming import with_whole_state
from thinwire.sharding.optimizer.sharded_optimizer import ShardedOptimizer
from thinwire.sharding.runtime.runtime import plan_of
from thinwire.sharding.step.loss_scale import LossScale
from thinwire.sharding.tensors.arguments import tensors_among
from thinwire.sharding.tensors.tensor import ShareTensor
from thinwire.spec import Plan

__all__ = ["AutoPlan", "STATE", "SteppingOptimizer", "ThinwireAccelerator"]

STATE: Final = "thinwire"
"""Name of the directory with the sharded state of the first model inside a checkpoint."""

_TOGETHER: Final = "pass the model and the optimizer to one call of prepare"
_ONE_SCALE: Final = (
    'mixed_precision = "fp16" trains one model by one optimizer that updates all of it and has no hooks; use "bf16"'
)
_COMPUTE_DTYPES: Final = {"no": None, "bf16": "bfloat16", "fp16": "float16"}
"""Values of ``mixed_precision``, and the ``compute_dtype`` that has the same effect; ``None``: the plan's own."""

_ENGINES: Final = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM")
"""Variables by which accelerate's arguments and its launcher ask for another engine."""

_KINDS: Final = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
"""Kinds of jobs in which accelerate itself leaves the model whole."""


class SteppingOptimizer(AcceleratedOptimizer):
    """accelerate's wrapper of an optimizer, over shares: it reports the steps that a loss scale skipped, and gives all
    ranks the first one's buffers, of the models that it updates."""

    optimizer: Any

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        models: Iterable[nn.Module],
        handler: DistributedDataParallelKwargs | None,
    ) -> None:
        # accelerate would move the optimizer's state to the device by a state dict of everything.
        super().__init__(optimizer, device_placement=False)
        self._is_accelerate_prepared = True
        self._skipped_before = 0
        self._buffers = SharedBuffers(models if handler is None or handler.broadcast_buffers else ())

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Make a step, if this is the last micro-batch of one."""
        if self._has_loss_scale:
            self._skipped_before = self.optimizer.skipped_steps
        super().step(closure)
        if self.gradient_state.sync_gradients:
            self._buffers.share()

    @property
    def step_was_skipped(self) -> bool:
        """Whether the latest step was skipped because its gradient was not finite."""
        return self._has_loss_scale and self.optimizer.skipped_steps > self._skipped_before

    @property
    def _has_loss_scale(self) -> bool:
        return getattr(self.optimizer, "loss_scale", None) is not None


class ThinwireAccelerator(Accelerator):
    """An ``Accelerator`` that shards the model it prepares: ``ThinwireAccelerator(plan="zero3")``.

    Args:
        *args: See ``accelerate.Accelerator``.
        plan: How the model is sharded: a plan, the name of a preset, a plan file (``.toml``), or an
            :class:`AutoPlan`. Presets compute in the dtype of ``mixed_precision``, and in float32 without one.
        frozen: Where ``save_state`` keeps frozen parameters, see :func:`thinwire.save`; by default, in the directory
            that the checkpoint is in, or in that of the project if accelerate names the checkpoints.
        **kwargs: See ``accelerate.Accelerator``.

    Attributes:
        loss_scale: Scale of the losses of a plan with float16, in place of torch's ``GradScaler``; ``None`` for other
            plans, and before a model is prepared.

    Raises:
        UsageError: The arguments, or the configuration of ``accelerate launch``, ask for what thinwire cannot do.
    """

    loss_scale: LossScale | None
    step: int
    _models: list[nn.Module]
    _optimizers: list[Any]
    _custom_objects: list[Any]

    def __init__(
        self, *args: Any, plan: Plan | AutoPlan | str | Path = "zero3", frozen: str | Path | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        _refuse(self)
        self._plan, self._frozen = plan, frozen
        self._names: dict[int, dict[int, str]] = defaultdict(dict)
        self._forget()
        # A loss scale takes the place of torch's GradScaler.
        self.native_amp, self.scaler = self.mixed_precision != "no", None
        self.register_save_state_pre_hook(self._save_shares)
        self.register_load_state_pre_hook(self._load_shares)

    # -- models and optimizers --------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Shard models, let their optimizers train shares, and prepare the rest as accelerate does.

        Args:
            *args: Models, optimizers, data loaders and schedulers. Pass a model together with its optimizers and
                schedulers. A model without trainable parameters stays whole.
            device_placement: Whether to place each object on the device; by default, accelerate's own choice.

        Returns:
            The prepared objects in the same order.

        Raises:
            UsageError: An optimizer is of no model that is prepared, or a model has optimizers already.
        """
        placements = [None] * len(args) if device_placement is None else device_placement
        for item, placement in zip(args, placements, strict=False):  # accelerate checks their number
            if isinstance(item, nn.Module) and _is_trained(item):
                self._shard(item, placement)
        made = self._over_shares([item for item in args if _is_plain_optimizer(item)])
        self._names.clear()
        return super().prepare(*(made.get(id(item), item) for item in args), device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shard a model; see :meth:`prepare`. One that is only evaluated stays whole."""
        if evaluation_mode or not _is_trained(model):
            whole: nn.Module = super().prepare_model(model, device_placement, evaluation_mode=True)
            return whole
        self._shard(model, device_placement)
        self._names.clear()
        return model

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> torch.optim.Optimizer:
        """Make an optimizer anew over shares; see :meth:`prepare`."""
        if _is_plain_optimizer(optimizer):
            if not any(optimizer is item for items in self._updating.values() for item in items):
                optimizer = self._over_shares([optimizer])[id(optimizer)]
            optimizer = SteppingOptimizer(optimizer, self._owners(optimizer), self.ddp_handler)
        prepared: torch.optim.Optimizer = super().prepare_optimizer(optimizer, device_placement)
        return prepared

    def free_memory(self, *objects: Any) -> Any:
        """Forget everything that was prepared, so that another model can be."""
        self._forget()
        return super().free_memory(*objects)

    def _forget(self) -> None:
        self._trained: list[nn.Module] = []
        self._updating: dict[int, list[torch.optim.Optimizer]] = {}
        self.loss_scale = None

    def _shard(self, model: Any, device_placement: bool | None) -> None:
        self._names[id(model)] = names_of(model)
        dtype = _COMPUTE_DTYPES[self.mixed_precision]
        if not is_sharded(model):
            if self.device_placement if device_placement is None else device_placement:
                model.to(self.device)
            mesh = launched_mesh(self.num_processes)
            micro_batches = self.gradient_accumulation_steps
            tw.shard(model, plan_for(model, self._plan, mesh, dtype, self.device, micro_batches=micro_batches))
            if not hasattr(model, "no_sync"):
                model.no_sync = MethodType(without_sync, model)  # which loops call on the wrapper that DDP returns
            if self.state.dynamo_plugin.backend != DynamoBackend.NO:
                model.compile(**self.state.dynamo_plugin.to_kwargs())
        if dtype is not None and not getattr(model, "_is_accelerate_prepared", False):
            # As accelerate's own: losses in the forward are those of float32, and so are outputs. Parameters are not
            # cast here, so that there is nothing to cache.
            autocast = torch.autocast(self.device.type, dtype=getattr(torch, dtype), cache_enabled=False)
            model.forward = convert_outputs_to_fp32(autocast(model.forward))
        if not any(model is known for known in self._trained):
            self._trained.append(model)
        if plan_of(model).scales_loss:
            if len(self._trained) > 1:
                raise UsageError(f"prepare({type(model).__name__}): {_ONE_SCALE}")
            given = {} if self.scaler_handler is None else self.scaler_handler.to_dict()
            self.loss_scale = self.loss_scale or scale_like(torch.amp.GradScaler("cpu", **given))
        model._is_accelerate_prepared = True
        if not any(model is known for known in self._models):
            self._models.append(model)

    def _over_shares(self, optimizers: Sequence[torch.optim.Optimizer]) -> dict[int, torch.optim.Optimizer]:
        """Let optimizers train the shares of the models whose parameters they hold; returns what becomes of each, by
        ``id``."""
        made: dict[int, torch.optim.Optimizer] = {}
        owners = [self._owners(optimizer) for optimizer in optimizers]
        for model in self._trained:
            given = [item for item, of_item in zip(optimizers, owners, strict=True) if model in of_item]
            if not given:
                continue
            kind = type(given[0]).__name__
            if id(model) in self._updating:
                raise UsageError(
                    f"prepare({kind}): the model has an optimizer: pass all that train it together to one prepare; or, "
                    "to go on with a new one, call accelerator.free_memory(), and prepare the model with it"
                )
            names = self._names[id(model)]
            trained = over_shares(model, given, names, remedy=_TOGETHER, loss_scale=self.loss_scale)
            if self.loss_scale is not None and not isinstance(trained[0], ShardedOptimizer):
                raise UsageError(f"prepare({kind}): {_ONE_SCALE}")
            self._updating[id(model)] = trained
            made |= {id(old): new for old, new in zip(given, trained, strict=True)}
        return made

    def _owners(self, optimizer: torch.optim.Optimizer) -> list[nn.Module]:
        """The trained models whose parameters an optimizer holds."""
        if not self._trained:
            raise UsageError(f"prepare({type(optimizer).__name__}): no model is prepared; {_TOGETHER}")
        held = {id(item) for group in optimizer.param_groups for item in group["params"]}
        owners = [model for model in self._trained if held & (self._names[id(model)].keys() | names_of(model).keys())]
        return owners or self._trained[-1:]  # whose names tell that the parameters are strange

    # -- steps ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Run a micro-batch. Ranks combine gradients in the last one of a step."""
        sharded = [(model, combines(model)) for model in models if is_sharded(model)]
        with super().accumulate(*models):
            for model, outside in sharded:
                if self.sync_gradients and not outside:
                    raise UsageError(
                        f"accumulate({type(model).__name__}): it ends a step inside no_sync, which LocalSGD enters as "
                        "well, and ranks would train apart; leave it out, and choose codecs in the plan's wire to send "
                        "less"
                    )
                begin_micro_batch(model, last=self.sync_gradients)
            yield
            for model, outside in sharded:
                begin_micro_batch(model, last=outside)

    def no_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Combine no gradients in the backward inside: more micro-batches of the step follow."""
        return without_sync(model) if is_sharded(model) else super().no_sync(model)

    @staticmethod
    @contextlib.contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
        """Combine gradients in the backward inside, although its forward ran in :meth:`no_sync`."""
        if is_sharded(model):
            begin_micro_batch(model, last=True)
        yield

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Any:
        """Refuse to join ranks, because torch's ``Join`` works only with DDP's own wrapper."""
        del joinables, even_batches
        raise UsageError(
            "join_uneven_inputs: torch's Join does not know shares; leave even_batches = True, or iterate over "
            "thinwire.join(model, batches)"
        )

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run the backward of a loss, divided by the number of micro-batches and multiplied by the loss scale."""
        super().backward(loss if self.loss_scale is None else self.loss_scale.scale(loss), **kwargs)

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Clip the gradient of parameters by their norm.

        Args:
            parameters: Parameters of one prepared model or of several, all or some.
            max_norm: Upper bound of the norm; ``inf`` only measures.
            norm_type: Order of the norm.

        Returns:
            The norm before clipping, 0-D, fp32; equal on every rank.

        Raises:
            UsageError: More micro-batches of the step follow, or no model is prepared.
        """
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        self._prepare_clipping("clip_grad_norm_")
        given = {id(item) for item in parameters}
        for model in self._trained:
            everything = list(model.parameters())
            trained = {id(item) for item in everything if item.requires_grad}
            if trained <= given <= {id(item) for item in everything}:
                return tw.clip_grad_norm_(model, float(max_norm), float(norm_type))  # in one pass
        return nn.utils.clip_grad_norm_(parameters, float(max_norm), float(norm_type))

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float) -> None:
        """Clip each element of the gradient of parameters.

        Args:
            parameters: Parameters of prepared models, all or some.
            clip_value: Largest magnitude of an element.

        Raises:
            UsageError: More micro-batches of the step follow, or no model is prepared.
        """
        self._prepare_clipping("clip_grad_value_")
        nn.utils.clip_grad_value_(parameters, clip_value)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide the gradient by the loss scale, if there is one; once in a step, whatever clips it afterwards.

        Raises:
            UsageError: More micro-batches of the step follow, or no model is prepared.
        """
        del optimizer
        if self.mixed_precision == "fp16":
            self._prepare_clipping("unscale_gradients")

    def _prepare_clipping(self, call: str) -> None:
        if not self._trained:
            raise UsageError(f"{call}: no model is prepared for training; call prepare before")
        if not self.sync_gradients:
            raise UsageError(
                f"{call}: ranks combine gradients in the last micro-batch of a step, and more of them follow; call it "
                "under `if accelerator.sync_gradients:`"
            )
        if self.loss_scale is not None:
            tw.clip_grad_norm_(self._trained[0], float("inf"))  # divides by the scale, which one model has

    # -- saving and loading -----------------------------------------------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """The whole state dict on every rank: fp32 masters and buffers on the CPU. Collective.

        Args:
            model: A prepared model.
            unwrap: See ``accelerate.Accelerator``.
        """
        if not is_sharded(model):
            whole: dict[str, torch.Tensor] = super().get_state_dict(model, unwrap)
            return whole
        weights = tw.full_state_dict(model)
        first: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            # Names of one parameter share one tensor, as in the state dict of a whole model.
            weights[name] = weights[first.setdefault(id(parameter), name)]
        return weights

    def save_model(self, model: nn.Module, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Write the whole weights, which ranks gather one by one; see ``accelerate.Accelerator``. Collective."""
        save: Any = super().save_model
        if not is_sharded(model):
            save(model, save_directory, *args, **kwargs)
            return

        def write(state: dict[str, torch.Tensor]) -> None:
            self.get_state_dict = lambda *_, **__: state  # type: ignore[method-assign]
            try:
                save(model, save_directory, *args, **kwargs)
            finally:
                del self.get_state_dict

        with_whole_state(model, model, write, "save_model")

    @contextlib.contextmanager
    def _set_aside(self) -> Iterator[None]:
        """Keep accelerate from the shares of models and of their optimizers, which the hooks below save and load."""
        everything = self._models, self._optimizers
        self._everything, self._loaded = everything, dict[str, Any]()
        self._models = [model for model in self._models if not is_sharded(model)]
        self._optimizers = [item for item in self._optimizers if not isinstance(item, SteppingOptimizer)]
        try:
            yield
        finally:
            self._models, self._optimizers = everything

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """Save the shares, schedulers, random states and registered objects; see ``accelerate.Accelerator``.
        Collective.

        Raises:
            UsageError: A registered object's state holds shares, such as an average of a model's parameters.
        """
        for item in self._custom_objects:
            if any(isinstance(value, ShareTensor) for value in tensors_among(item.state_dict())):
                raise UsageError(
                    f"register_for_checkpointing({type(item).__name__}): its state holds shares of a model, and "
                    "accelerate would write one rank's; do not register it, and average weights with "
                    "thinwire.average(model, ...), which save_state saves"
                )
        with self._set_aside():
            return super().save_state(output_dir, safe_serialization, **kwargs)

    def load_state(self, input_dir: Any = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Load a state that was saved under any plan and on any number of ranks; see ``accelerate.Accelerator``.
        Collective."""
        with self._set_aside():
            super().load_state(input_dir, load_kwargs, **kwargs)
        # accelerate keeps the step with the random states of each rank, of which another job may have had fewer.
        self.step = self._loaded.get("step", self.step)

    def _save_shares(self, models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        del models, weights
        self._models = self._everything[0]  # the hooks that follow are given all models
        # accelerate counts, and deletes, whatever is in the directory of the checkpoints that it names itself.
        named_here = self.project_configuration.automatic_checkpoint_naming
        frozen = self._frozen or (self.project_dir if named_here else Path(output_dir).parent)
        for place, model in self._places(output_dir):
            tw.save(model, self._updating.get(id(model)), place, extra={"step": self.step}, frozen=frozen)

    def _load_shares(self, models: list[nn.Module], input_dir: str) -> None:
        del models
        for place, model in self._places(input_dir):
            self._loaded = tw.load(model, self._updating.get(id(model)), place)

    def _places(self, directory: str) -> Iterator[tuple[Path, nn.Module]]:
        """The directory of each trained model inside a checkpoint, numbered as accelerate numbers files."""
        for number, model in enumerate(self._trained):
            yield Path(directory, f"{STATE}_{number}" if number else STATE), model


def _refuse(accelerator: Accelerator) -> None:
    state = accelerator.state
    remedy = (
        "thinwire shards the model itself; choose the sharding with plan=, and start the script with torchrun or with "
        "a configuration of accelerate that names no engine"
    )
    for variable in _ENGINES:
        if os.environ.get(variable, "false").lower() in ("true", "1"):
            raise UsageError(f"{variable}={os.environ[variable]}: {remedy}")
    if accelerator.distributed_type not in _KINDS:
        raise UsageError(f"distributed_type = {accelerator.distributed_type.value}: {remedy}")
    if accelerator.mixed_precision not in _COMPUTE_DTYPES:
        valid = ", ".join(map(repr, _COMPUTE_DTYPES))
        raise UsageError(f"mixed_precision = {accelerator.mixed_precision!r}: thinwire knows {valid}")
    if accelerator.parallelism_config is not None:
        raise UsageError("parallelism_config: use thinwire.parallelize for tensor and pipeline parallelism")
    if state.dynamo_plugin.backend != DynamoBackend.NO and state.dynamo_plugin.use_regional_compilation:
        raise UsageError("use_regional_compilation = True: leave it out; thinwire compiles unit by unit")
    if accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False):
        raise UsageError(
            "sync_each_batch = True: choose a plan that shards gradients, such as zero2: it reduces each micro-batch"
        )
    handler = accelerator.ddp_handler
    if handler is not None and handler.comm_hook != DDPCommunicationHookType.NO:
        raise UsageError(f"comm_hook = {handler.comm_hook.value}: choose codecs in the plan's wire instead")


def _is_trained(model: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in model.parameters())


def _is_plain_optimizer(item: Any) -> bool:
    return isinstance(item, torch.optim.Optimizer) and not isinstance(item, AcceleratedOptimizer)
