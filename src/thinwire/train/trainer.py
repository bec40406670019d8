"""One rank of a run: it steps, validates, saves and loads.

Decisions that all ranks must share (whether to stop, whether a step is finite) follow from values that the ranks have
exchanged, never from the view of a single rank.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import nn

from thinwire.checkpoint.background import PendingSave
from thinwire.collectives.group import control
from thinwire.errors import CheckpointError, DataError
from thinwire.network.order import order_ranks
from thinwire.parallel import parallelize
from thinwire.sharding import api
from thinwire.sharding.checkpointing.saving import finish_save
from thinwire.sharding.lanes.streams import read_later
from thinwire.sharding.optimizer.probes import seed_generators
from thinwire.sharding.step.loss_scale import LossScale
from thinwire.spec.plan import Plan
from thinwire.train.checkpoint import Checkpoint, Position, checkpoint_path, delete_old
from thinwire.train.data.packing import Dataset
from thinwire.train.data.samples import NONE, Batch, BatchesAhead, Duration, Samples, step_batches, validation_batches
from thinwire.train.environment import shares_cores, versions
from thinwire.train.launching.agreement import agree
from thinwire.train.launching.resolved import ResolvedRun
from thinwire.train.models.build import draft
from thinwire.train.models.common import IGNORED, cross_entropy
from thinwire.train.models.flops import flops_per_token
from thinwire.train.observing.links import LinkMeter, LinkPace, meet
from thinwire.train.observing.measure import StepMeter, unpack
from thinwire.train.observing.metrics import StepRecord, finite, known_peak_tflops
from thinwire.train.observing.pace import AllocatorWatch, Pace, summarized
from thinwire.train.observing.replicas import ReplicaChecks
from thinwire.train.updates import Update, Updates, learning_rate_share


class StepOutcome(NamedTuple):
    """What all ranks know after a step.

    Attributes:
        record: The record; ``None`` if this step is not logged.
        stop: Whether any rank wants to stop.
        save_failed: Whether a checkpoint could not be written in the background; :meth:`Trainer.finish_save` says why.
    """

    record: StepRecord | None
    stop: bool
    save_failed: bool


class Trainer:
    """One rank's model, which it builds and shards, optimizer, data and position, from step 0 on. Every rank of the run
    makes one.

    ``config`` is the ``config.json`` of a Hugging Face model, and validations use ``average``. ``ranks`` and ``island``
    are the control groups of all ranks and of this rank's island. ``pace`` is ``None`` where the speeds of ranks cannot
    be compared. ``num_parameters`` counts tied ones once, ``token_flops`` forward and backward, and ``peak_flops`` is
    that of one device. ``recent`` and ``total`` count steps without validation and saving, since the last record and
    the start; ``waits`` are those of all ranks for their data, up to the last record. ``sampler`` is the number of
    this rank among those with data of their own, over all islands.

    Raises:
        MismatchError: On every rank, if ranks have different versions, recipes or tokens.
        SpecError: On every rank, if the plan's topology cannot be read or found.
    """

    def __init__(self, run: ResolvedRun, dataset: Dataset, device: torch.device) -> None:
        recipe, seq = run.recipe, run.recipe.train.seq
        self.run, self.dataset, self.device, self.ranks = run, dataset, device, control()
        hosts = agree(self.ranks, recipe, dataset.fingerprint)
        self.ordered = order_ranks(run.plan, self.ranks, device)
        plan = self.ordered.plan
        self.train = Samples(dataset.train, seq, recipe.train.seed)
        self.validation = Samples(dataset.validation, seq, 0)
        drafted = draft(recipe.model, vocab=dataset.vocab, seq=seq, seed=recipe.train.seed)
        model, self.config = drafted.model, drafted.config
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self.token_flops, undecayed = flops_per_token(model, seq), undecayed_names(model)
        self.model = parallelize(model, plan, loss=cross_entropy, values=drafted.values, device=device)
        settings = recipe.optimizer
        self.optimizer = self.model.optimizer(
            torch.optim.AdamW,
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
            param_groups=[{"params": undecayed, "weight_decay": 0.0}],
            skip_nonfinite=self.model.decides_on_device,
            loss_scale=LossScale(**recipe.loss_scale.to_dict()) if plan.scales_loss else None,
        )
        places = meet(self.ranks, hosts)
        self.average = None if recipe.average.decay is None else self.model.average(decay=recipe.average.decay)
        self.island = control(self.model.grid.island_ranks)
        self.position = Position()
        self.updates = Updates(
            self.ranks,
            self.position,
            self.optimizer.loss_scale,
            # The mean over all ranks is the mean over the ranks that know the loss.
            loss_share=float(run.plan.pp) if self.model.knows_loss else 0.0,
            skips=recipe.train.on_nonfinite == "skip",
            directory=run.directory.checkpoints,
        )
        self.pace = _pace(plan, hosts, device)
        self.step_meter = StepMeter(self.model, self.ranks, device, run.node_ranks)
        self.meter, self.link_pace = LinkMeter(places), LinkPace(places.names)
        self.allocators = AllocatorWatch(hosts)
        self.checks = ReplicaChecks(self.model, self.optimizer, hosts, every=recipe.train.check_replicas)
        self.sampler = self.model.grid.sampler + (recipe.cluster.island or 0) * plan.world
        self.peak_flops = _peak_flops(run, device)
        self.recent = self.total = self.waits = NONE
        self._exchanges: list[dict[str, Any]] = []
        self._ahead = BatchesAhead(self._batches)
        self._pending: PendingSave | None = None
        self._before = 0

    @property
    def validates(self) -> bool:
        """Whether the run validates after the step just made."""
        train = self.run.recipe.train
        return self.position.step >= train.steps or self._has_reached(train.validate_every)

    @property
    def saves(self) -> bool:
        """Whether the run saves after the step just made."""
        recipe = self.run.recipe
        return self.position.step >= recipe.train.steps or self._has_reached(recipe.checkpoint.every)

    def _has_reached(self, every: int) -> bool:
        """Whether the step just made ends at a multiple of a number, or behind one: a slow island jumps to the step of
        the others."""
        return every > 0 and self.position.step // every > self._before // every

    def step(self, wants_stop: bool) -> StepOutcome:
        """Make one update, and exchange losses and measurements with the other ranks. ``wants_stop`` asks all of them
        to stop after it.

        Islands hear of each other at logged steps only: a stop or a failure waits for the next of them.

        Raises:
            NonFiniteError: On all ranks, if the loss or the gradient is not finite and the recipe does not skip such
                steps, or skips too many in a row. A gradient that overflows because of the loss scale is skipped
                until the scale is at its floor.
        """
        self.step_meter.begin()
        self._before = self.position.step
        self._make_step()
        train = self.run.recipe.train
        if self.position.step >= train.steps:
            self.join_islands()
        logged = self.validates or self._has_reached(train.log_every)
        due = self.updates.take(keep_newest=self.model.decides_on_device and not (logged or self.saves))
        seconds = self.step_meter.end()
        self.recent, self.total = self.recent.plus(seconds), self.total.plus(seconds)
        words = []
        if logged:
            words = [*self.meter.take(), *self.step_meter.pack(self.recent.seconds), *self._ahead.take_waits()]
        failed = self._pending is not None and self._pending.failed
        together = logged or self.saves or self.run.plan.job_islands == 1
        with self.step_meter.exchanging():
            losses, (stop, failure, *rest) = self.updates.exchange(
                due, [float(wants_stop), float(failed), *words], None if together else self.island
            )
        if not together:  # the other islands have not heard of it
            stop = failure = 0.0
        return StepOutcome(self._record(due[-1], losses[-1], rest) if logged else None, stop > 0, failure > 0)

    def enter_islands(self) -> None:
        """Begin to train with the other elastic islands, from where they are."""
        cluster = self.run.recipe.cluster
        assert cluster.island is not None, "resolve_run checks it"
        assert cluster.lighthouse is not None, "resolve_run checks it"
        model, optimizer = self.model.chunks[0], self.optimizer.parts[0]
        api.enter_islands(model, optimizer, island=cluster.island, lighthouse=cluster.lighthouse)
        self._follow_islands()

    def join_islands(self) -> None:
        """Give all islands the same parameters, after the last step."""
        self.model.join_islands()
        self._follow_islands()

    def _follow_islands(self) -> None:
        """Move on to the step of the other elastic islands, and note their exchanges."""
        if not self.run.plan.is_elastic:
            return
        model = self.model.chunks[0]
        skipped = api.num_steps(model) - self.position.step
        self.position.step += skipped
        self.position.samples += skipped * self.run.plan.global_batch
        self._exchanges += [exchange._asdict() for exchange in api.take_exchanges(model)]

    def prepare_data(self) -> None:
        """Make the batches of the next step, so that it need not wait for them."""
        wait([self._ahead.prepare(self.position.samples)])

    def validate(self) -> float:
        """Mean loss in nats per token on the fixed validation samples, over all ranks."""
        total, num_labels = 0.0, 0
        batches = validation_batches(
            self.validation,
            number=self.run.recipe.train.validation_samples,
            micro_batch=self.run.plan.micro_batch,
            rank=self.model.grid.sampler,
            world=self.run.plan.job_mesh.ranks // self.run.plan.cp,
        )
        with self.step_meter.aside():
            self.model.train(False)
            with contextlib.nullcontext() if self.average is None else self.average.applied():
                for batch in batches:
                    counted = int((batch.labels != IGNORED).sum())
                    loss = float(self.model.evaluate(batch))
                    if counted and self.model.knows_loss:
                        total += loss * counted
                        num_labels += counted
            self.model.train()
            mean_total, mean_labels = self.ranks.all_reduce_mean([total, float(num_labels)])
        self.position.val_loss = mean_total / mean_labels
        return self.position.val_loss

    def save(self, *, waits: bool = True) -> Path:
        """Save model, optimizer and position, then delete the checkpoints beyond ``checkpoint.keep``; returns the
        checkpoint's directory. Unless this waits until the checkpoint is complete, it returns once the state is copied,
        and a later step or :meth:`finish_save` reports a failure.

        Raises:
            CheckpointError: On every rank, if this save or one that is under way fails.
        """
        with self.step_meter.aside():
            return self._save(waits)

    def _save(self, waits: bool) -> Path:
        scale = self.optimizer.loss_scale
        counted = [float(self.position.skipped), 0.0 if scale is None else scale.value]  # by each island for itself
        _, (skipped, scaled) = self.updates.exchange(self.updates.take(keep_newest=False), counted)
        directory = self.run.directory.checkpoints
        path = checkpoint_path(directory, self.position.step)
        # A validation may end in NaN, and a checkpoint cannot hold it.
        position = {name: finite(getattr(self.position, name)) for name in Position.__dataclass_fields__}
        position["skipped"] = round(skipped)
        extra: dict[str, Any] = {"position": position, "dataset": self.dataset.fingerprint, "versions": versions()}
        if scale is not None:
            extra["loss_scale"] = scaled
        settings = self.run.recipe.checkpoint
        clean_up = functools.partial(delete_old, directory, settings.keep) if self.ranks.rank == 0 else None
        self._pending = self.model.async_save(
            self.optimizer, path, extra=extra, then=clean_up, limit=settings.timeout, copies=not waits
        )
        if waits:
            self.finish_save()
        return path

    def finish_save(self) -> None:
        """Wait for a checkpoint that is being written in the background. All ranks call it.

        Raises:
            CheckpointError: On every rank, if it could not be written.
        """
        self._pending = None
        with self.step_meter.paused():
            finish_save()

    def load(self, checkpoint: Checkpoint) -> str | None:
        """Continue from a checkpoint. Returns a sentence about the loss scale if only the checkpoint or only this run
        has one.

        Raises:
            DataError: The checkpoint was trained on other tokens.
            CheckpointError: It cannot be loaded, or is of no run.
        """
        extra: Mapping[str, Any] = self.model.load(self.optimizer, checkpoint.path)
        if extra.get("dataset") not in (self.dataset.fingerprint, self.dataset.former):
            raise DataError(
                f"{checkpoint.path} was trained on other tokens than data.* gives now (the text, the "
                "tokenizer or validation_share changed); restore them, or start a new run with another --out"
            )
        self.position = Position.of(extra.get("position"), checkpoint.path)
        self.updates.position = self.position
        saved, present = extra.get("loss_scale"), self.optimizer.loss_scale
        if type(saved) not in (NoneType, int, float):
            raise CheckpointError(f"{checkpoint.path}: corrupt: its loss scale is {saved!r:.80}")
        if present is not None and saved is None:
            return f"the checkpoint has no loss scale: it starts from loss_scale.initial = {present.value:g}"
        if present is None and saved is not None:
            return f"the checkpoint's loss scale of {saved:g} has no use: the plan has no float16 gradients"
        return None

    def _make_step(self) -> None:
        """Queue a step. The device skips the update of a gradient that is not finite, and the host goes on; where the
        device cannot, the host waits for the norm."""
        rate = self._set_learning_rate()
        self.model.progress(self.position.step / self.run.recipe.train.steps)
        scale = self.optimizer.loss_scale
        taken = self.position.samples
        batches = self._ahead.take(taken, taken + self.run.plan.global_batch)
        self._seed_dropout()
        with self.updates.at_floor():
            loss = self.model.step(batches)
        step = self.position.step + 1
        if self.checks.due(step):
            self.checks.compare(step, batches)
        norm = self.model.clip_grad_norm_(self.run.recipe.optimizer.clip or math.inf)
        applied = None if scale is None else scale.applied_value
        later_loss, later_norm = read_later(loss), read_later(norm)

        def update() -> Update:
            return Update(step, later_loss(), later_norm(), rate, applied)

        self.updates.queue.append(update)
        if self.model.decides_on_device:
            self.optimizer.step()
        else:
            self._update_if_finite(update())
        if self.average is not None:
            self.average.update()
        self.optimizer.zero_grad()
        self.position.step += 1
        self.position.samples += self.run.plan.global_batch
        self._follow_islands()

    def _seed_dropout(self) -> None:
        """Seed what a model draws in a step by its place alone, so that a run that continues draws the same. The
        tensor-parallel ranks of a stage draw the same, as they hold the same activations."""
        place = self.run.recipe.train.seed, self.position.step, self.sampler, self.model.grid.stage
        digest = hashlib.blake2b(repr(place).encode(), digest_size=8).digest()
        seed_generators(self.device, int.from_bytes(digest, "little"))

    def _batches(self, position: int) -> list[Batch]:
        plan = self.run.plan
        return step_batches(
            self.train,
            position=position,
            micro_batch=plan.micro_batch,
            micro_batches=plan.micro_batches,
            rank=self.sampler,
            world=plan.samplers,
        )

    def _update_if_finite(self, update: Update) -> None:
        if not update.skipped:
            self.optimizer.step()
            return
        if self.optimizer.loss_scale is not None:
            with self.updates.at_floor():
                self.optimizer.step()  # which updates nothing, and lowers the scale
        self.updates.refuse_skip(update, self.updates.num_skipped + 1)

    def _set_learning_rate(self) -> float:
        settings = self.run.recipe.optimizer
        rate = settings.lr * learning_rate_share(
            self.position.step,
            warmup=settings.warmup,
            steps=self.run.recipe.train.steps,
            final=settings.final_lr_share,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _record(self, update: Update, loss: float, means: list[float]) -> StepRecord:
        of_links, means = means[: self.meter.size], means[self.meter.size :]
        *means, waited, wait_seconds = means
        waits = Duration(round(waited * self.ranks.size), wait_seconds * self.ranks.size)
        self.waits = self.waits.plus(waits.seconds, waits.steps)
        measured = unpack(means, self.ranks.size)
        tokens = self.run.plan.global_batch * self.train.seq
        speed = tokens * self.recent.steps / self.recent.seconds
        per_device = speed / self.ranks.size
        own = [seconds / self.recent.steps for seconds in measured.own]
        log_every = self.run.recipe.train.log_every
        record = StepRecord(
            step=self.position.step,
            samples=self.position.samples,
            tokens=self.position.samples * self.train.seq,
            loss=loss,
            grad_norm=update.norm,
            lr=update.lr,
            skipped=update.skipped,
            skipped_steps=self.position.skipped,
            loss_scale=update.loss_scale,
            step_seconds=self.recent.seconds / self.recent.steps,
            tokens_per_second=speed,
            tgs=per_device,
            mfu=None if self.peak_flops is None else per_device * self.token_flops / self.peak_flops,
            memory={kind: max(amounts) for kind, amounts in measured.memory.items()},
            retries=sum(measured.retries),
            memory_by_rank=measured.memory if self.validates or self.total.steps <= log_every else None,
            sent=measured.sent,
            exposed=measured.exposed,
            codec=measured.codec,
            transfer=measured.transfer,
            own=summarized(own, comparable=self.pace is not None),
            data_waits=waits._asdict(),
            exchanges=self._exchanges,
            slow=None if self.pace is None else self.pace.add(own, self.recent.seconds),
            slow_link=self.link_pace.add([mean * self.ranks.size for mean in of_links], self.recent.seconds),
            allocator=self.allocators.add(measured.retries, measured.memory),
        )
        self.recent, self._exchanges = NONE, []
        return record


def _pace(plan: Plan, hosts: Sequence[str], device: torch.device) -> Pace | None:
    """What compares the ranks; ``None`` where one that takes longer than the others need not be slow.

    Pipeline stages have different work, the time that tensor-parallel ranks wait for each other is measured on CPUs
    only, and the scheduler decides which of the ranks that share cores falls behind.
    """
    waits_are_known = plan.tp == 1 or device.type == "cpu"
    is_comparable = plan.pp == 1 and waits_are_known and not shares_cores(device)
    return Pace(hosts, islands=plan.job_islands) if is_comparable else None


def undecayed_names(model: nn.Module) -> list[str]:
    """Names of the parameters without weight decay: vectors, biases among them, and all parameters of norms."""
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim < 2 or "norm" in type(model.get_submodule(name.rpartition(".")[0])).__name__.lower()
    ]


def _peak_flops(run: ResolvedRun, device: torch.device) -> float | None:
    tflops = run.recipe.train.peak_tflops
    if tflops is None and device.type == "cuda":
        tflops = known_peak_tflops(torch.cuda.get_device_name(device), run.plan.compute_dtype)
    return None if tflops is None else tflops * 1e12
