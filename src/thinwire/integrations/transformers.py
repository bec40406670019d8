"""Hugging Face's ``Trainer`` over thinwire: a mixin for any trainer that is built on it, and a ready class.

The trainer keeps its loop. Where it creates its optimizer, the mixin shards the model and makes the optimizer over
shares. Weights are saved as ``save_pretrained`` writes them; beside them, each checkpoint has a directory ``thinwire``
with the sharded state, which loads under any plan and on any number of ranks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from types import MethodType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from transformers import Trainer, TrainingArguments

import thinwire as tw
from thinwire.errors import UsageError
from thinwire.integrations.accelerate import STATE, SteppingOptimizer
from thinwire.integrations.common.automatic import AutoPlan, automatic_plan
from thinwire.integrations.common.optimizers import begin_micro_batch, is_sharded, names_of, over_shares
from thinwire.integrations.common.plans import chosen_plan, launched_mesh
from thinwire.integrations.common.typed_state import decoded, encoded
from thinwire.sharding.checkpointing.full_state import whole_value
from thinwire.sharding.checkpointing.streaming import with_whole_state
from thinwire.sharding.optimizer.sharded_optimizer import ShardedOptimizer
from thinwire.sharding.runtime.generating import generates
from thinwire.sharding.runtime.runtime import plan_of
from thinwire.sharding.step.loss_scale import LossScale
from thinwire.spec import Plan

_REFUSED: Final = {
    "fsdp": "thinwire shards the model itself; choose the sharding with plan=",
    "deepspeed": "thinwire shards the model itself; `thinwire convert ds_config.json` makes a plan of it",
    "parallelism_config": "use thinwire.parallelize for tensor and pipeline parallelism",
    # TRL's: it calls generate_batch, whose forwards run in a thread, as many on each rank as its own completions take.
    "use_transformers_continuous_batching": "leave it out; completions are generated inside thinwire.generating",
}
"""Arguments that ask for another engine, and what to do instead."""

_REMEDY: Final = "pass the model and its optimizer to one trainer"
_PLAIN: Final = "Look at state_dict() of your learning-rate scheduler"


@dataclass
class ThinwireArguments(TrainingArguments):
    """``TrainingArguments`` with a plan."""

    plan: str = field(
        default="zero3",
        metadata={"help": "How the model is sharded: the name of a preset, a plan file (.toml), or auto."},
    )
    profile: str | None = field(
        default=None, metadata={"help": "With plan=auto: a profile of the cluster (.json), in place of a measurement."}
    )
    sequence_length: int | None = field(default=None, metadata={"help": "With plan=auto: tokens in a sequence."})
    codecs: str = field(
        default="lossless",
        metadata={
            "help": "With plan=auto: how lossy codecs may be: none, lossless, standard or aggressive.",
            "choices": ["none", "lossless", "standard", "aggressive"],
        },
    )


class ThinwireTrainerMixin:
    """Lets a trainer train a sharded model. Put it before the trainer: ``class Mine(ThinwireTrainerMixin, Trainer)``.

    Args:
        *args: See the trainer.
        plan: How the model is sharded: a plan, the name of a preset, a plan file, or ``"auto"``, which measures the
            cluster and chooses. By default, the ``plan`` of the arguments, or ``zero3``. Presets compute in bfloat16
            with ``bf16=True``, in float16 with ``fp16=True``, else in float32.
        frozen: Where checkpoints keep frozen parameters, see :func:`thinwire.save`; by default, in the directory that
            the checkpoints are in.
        **kwargs: See the trainer.

    Attributes:
        loss_scale: Scale of the losses of a plan with float16, in place of torch's ``GradScaler``; ``None`` for other
            plans, and before the model is sharded.

    Raises:
        UsageError: The arguments ask for what thinwire cannot do in this loop.
    """

    args: Any
    model: Any
    optimizer: Any
    accelerator: Any
    lr_scheduler: Any
    is_in_train: bool

    def __init__(
        self, *args: Any, plan: Plan | str | Path | None = None, frozen: str | Path | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        _refuse(self.args)
        self._plan = plan if plan is not None else getattr(self.args, "plan", "zero3")
        self._frozen = frozen
        self.loss_scale: LossScale | None = None
        # The trainer's own way for models that place their parameters and combine their gradients themselves.
        self.is_distributed_loading_by_transformers = True

    # -- sharding ----------------------------------------------------------------------------------------------

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Shard the model at the first call, and let the trainer's optimizer, or the user's, train its shares."""
        del model
        if isinstance(self.optimizer, SteppingOptimizer):
            return self.optimizer
        names = names_of(self.model)
        if not is_sharded(self.model):
            tw.shard(self.model, self._resolved_plan())
            if hasattr(self.model, "generate"):
                self.model.generate = MethodType(generate_gathered, self.model)  # a copy's is bound to the copy
        if plan_of(self.model).scales_loss:
            self._scale_losses()
        trainer: Any = super()
        made = self.optimizer if self.optimizer is not None else trainer.create_optimizer()
        (optimizer,) = over_shares(self.model, [made], names, remedy=_REMEDY, loss_scale=self.loss_scale)
        if self.loss_scale is not None and not isinstance(optimizer, ShardedOptimizer):
            raise UsageError(
                f"fp16=True: {type(made).__name__} updates some of the parameters or has hooks, and the loss scale "
                "needs one that updates all and has none; freeze the others, or train with bf16=True"
            )
        self.optimizer = SteppingOptimizer(optimizer, [self.model], self.accelerator.ddp_handler)
        self.accelerator._optimizers.append(self.optimizer)
        return self.optimizer  # type: ignore[no-any-return]

    def _resolved_plan(self) -> Plan:
        args = self.args
        dtype = "bfloat16" if args.bf16 else "float16" if args.fp16 else None
        named = "zero3" if self._plan == "auto" else self._plan
        template = chosen_plan(named, launched_mesh(args.world_size), dtype).with_(
            micro_batch=args.per_device_train_batch_size, micro_batches=args.gradient_accumulation_steps
        )
        if self._plan != "auto":
            return template
        length = getattr(args, "sequence_length", None) or getattr(args, "max_length", None)
        if length is None:
            raise UsageError(
                'plan="auto": the length of sequences is unknown, on which memory and time depend; set '
                "ThinwireArguments(sequence_length=...), or max_length of TRL's configurations"
            )
        # Under the new name of that argument, or the old one.
        names = ("activation_checkpointing", "gradient_checkpointing")
        recomputes = any(bool(getattr(args, name, False)) for name in names)
        auto = AutoPlan(
            length,
            template.micro_batch,
            getattr(args, "profile", None),
            getattr(args, "codecs", "lossless"),
        )
        return automatic_plan(
            self.model,
            auto,
            template.with_(recompute=recomputes),
            args.device,
            clip=bool(args.max_grad_norm),
            steps=args.max_steps if args.max_steps > 0 else None,
        )

    def _scale_losses(self) -> None:
        """Multiply losses by a loss scale of thinwire's before their backwards, and divide gradients by it."""
        self.loss_scale = LossScale()
        accelerator = self.accelerator
        accelerator.scaler = None
        # The trainer scales a loss nowhere else than in its accelerator, which it makes itself. With model_init, each
        # train() comes here.
        backward = functools.partial(type(accelerator).backward, accelerator)
        accelerator.backward = lambda loss, **kwargs: backward(self.loss_scale.scale(loss), **kwargs)
        accelerator.unscale_gradients = lambda *_, **__: tw.clip_grad_norm_(self.model, float("inf"))

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log values; with a loss scale, also the scale and the number of steps that were skipped so far."""
        if self.loss_scale is not None and "loss" in logs:
            logs["loss_scale"], logs["skipped_steps"] = self.loss_scale.value, self.loss_scale.skipped_steps
        trainer: Any = super()
        trainer.log(logs, *args, **kwargs)

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run a micro-batch. Ranks combine gradients in the last one of a step."""
        begin_micro_batch(self.model, last=self.accelerator.sync_gradients)
        trainer: Any = super()
        loss: torch.Tensor = trainer.training_step(model, *args, **kwargs)
        return loss

    def _sync_replicated_trainable_parameters(self, model: nn.Module) -> None:
        """Nothing: thinwire combines the gradients of all parameters."""

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        del model
        return tw.clip_grad_norm_(self.model, self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        del model
        return tw.clip_grad_norm_(self.model, float("inf")) if grad_norm is None else grad_norm

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate. A sharded model computes in the dtype of its plan."""
        trainer: Any = super()
        for name in ("bf16_full_eval", "fp16_full_eval"):
            if getattr(self.args, name) and is_sharded(self.model) and not self.is_in_train:
                raise UsageError(
                    f"{name}=True: the trainer would convert the weights for good, and a sharded model computes in the "
                    "dtype of its plan; leave the argument out, or train with bf16=True"
                )
        return trainer.evaluation_loop(*args, **kwargs)

    # -- saving and loading ------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the weights as ``save_pretrained`` does. Collective."""
        # Releases of transformers differ in the ranks that reach _save, and all of them have to.
        self._save(output_dir)
        if self.args.push_to_hub and not _internal_call:
            trainer: Any = self
            trainer.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Every rank helps to gather the weights, one after another; the first one writes each at once."""
        trainer: Any = super()
        if state_dict is None and is_sharded(self.model):
            if not self.args.save_on_each_node:
                with_whole_state(self.model, self.model, functools.partial(trainer._save, output_dir), "save_model")
                return
            keeps = self.args.should_save
            state_dict = {name: whole_value(item, keep=keeps) for name, item in self.model.state_dict().items()}
        if self.args.should_save:
            trainer._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        extra = {"scheduler": encoded(self.lr_scheduler.state_dict(), _PLAIN)}
        frozen = Path(output_dir).parent if self._frozen is None else self._frozen
        tw.save(self.model, self.optimizer.optimizer, Path(output_dir, STATE), extra=extra, frozen=frozen)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if not Path(checkpoint, STATE).exists():
            _check_weights_only(Path(checkpoint))
            return
        extra = tw.load(self.model, self.optimizer.optimizer, Path(checkpoint, STATE))
        state = extra["scheduler"]
        plain = state.keys() != {"dict"}  # as releases up to 0.2 wrote it
        self.lr_scheduler.load_state_dict(state if plain else decoded(state))


class ThinwireTrainer(ThinwireTrainerMixin, Trainer):
    """``transformers.Trainer`` over thinwire."""


def generate_gathered(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A model's ``generate``, inside ``tw.generating`` if the model is sharded, wherever a trainer calls it."""
    generate = functools.partial(type(self).generate, self)
    if not is_sharded(self) or generates(self):
        return generate(*args, **kwargs)
    with tw.generating(self) as chosen:
        if chosen.kept.exchanges:
            kwargs["synced_gpus"] = True  # Seq2SeqTrainer passes False, since it does not know this engine
        return generate(*args, **kwargs)


def _refuse(arguments: Any) -> None:
    for name, remedy in _REFUSED.items():
        if value := getattr(arguments, name, None):
            raise UsageError(f"{name}={value!r}: {remedy}")
    if getattr(arguments, "use_vllm", False) and arguments.vllm_mode == "server":
        raise UsageError(
            "use_vllm=True, vllm_mode='server': rank 0 alone would read the weights, which takes every rank; "
            "valid is vllm_mode='colocate'"
        )
    if arguments.world_size > 1 and not dist.is_initialized():
        raise UsageError("torch.distributed is not initialised: start the script with torchrun")


def _check_weights_only(checkpoint: Path) -> None:
    """Accept a checkpoint of ``save_only_model``, after which the trainer starts optimizer and schedule anew."""
    for name in ("optimizer.pt", "optimizer.bin", "scheduler.pt"):
        if (checkpoint / name).exists():
            raise UsageError(
                f"resume_from_checkpoint={str(checkpoint)!r}: {name} was saved without thinwire, and its states cannot "
                "be loaded into shares; copy the checkpoint without optimizer and scheduler to go on from its weights"
            )
