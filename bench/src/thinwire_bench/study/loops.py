"""A training loop for what ``thinwire train`` does not train: peers, and inner optimizers beside AdamW.

``python -m thinwire_bench.study.loops RECIPE.toml LOOP.json DIRECTORY`` trains a recipe as the queue of a study asks.
Samples, initial weights, learning rates, clipping and validation are those of ``thinwire train``, and so are the files
that it writes.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import torch
from torch import nn

import thinwire as tw
from thinwire.collectives.group import control
from thinwire.spec.plan import Plan
from thinwire.spec.recipe import Recipe
from thinwire.testing import RankPool
from thinwire.train.checkpoint import newest
from thinwire.train.data.packing import prepare
from thinwire.train.data.samples import Batch, Samples, step_batches, validation_batches
from thinwire.train.directory import RunDirectory, write_json
from thinwire.train.environment import num_cores, resolve_plan
from thinwire.train.launching.versions import versions
from thinwire.train.models.build import build
from thinwire.train.models.common import IGNORED
from thinwire.train.schedule import learning_rate_share
from thinwire.train.trainer import undecayed_names
from thinwire.train.updates import MOST_SKIPPED
from thinwire_bench.peers.inner import MuonWithAdamW, muon_groups
from thinwire_bench.peers.interface import Place
from thinwire_bench.peers.pytorch import Autocast, bf16_replica, powersgd_replica
from thinwire_bench.peers.torchft_islands import OuterSettings, join, take_the_mean
from thinwire_bench.study.loop import LOOP_FILE, Loop
from thinwire_bench.study.trunk import branch

__all__ = ["train"]

_PATIENCE: Final = 24 * 3600.0
"""Seconds that a run may take."""


def train(recipe: Recipe, loop: Loop, directory: RunDirectory) -> None:
    """Train on ranks of this machine, from the beginning, or from the trunk whose checkpoint is in the directory.

    Args:
        recipe: The recipe.
        loop: What trains.
        directory: Directory of the run, which is overwritten.
    """
    plan = resolve_plan(recipe, None)
    prepare(recipe.data)
    for stale in (directory.metrics, directory.summary):
        stale.unlink(missing_ok=True)
    directory.open(recipe, plan, versions())
    write_json(directory.path / LOOP_FILE, loop.to_dict())
    pool = RankPool(plan.ranks, threads=max(1, num_cores() // plan.ranks))
    try:
        pool.run(_be_rank, recipe.to_toml(), loop.to_dict(), str(directory.path), timeout=_PATIENCE)
    finally:
        pool.close()


def _be_rank(recipe: str, loop: Mapping[str, Any], directory: str) -> None:
    run = _RankRun.start(Recipe.from_toml(recipe), Loop.parse(loop), RunDirectory(Path(directory)))
    leads = control().rank == 0
    with run.directory.metrics.open("w") if leads else Path("/dev/null").open("w") as log:
        finished = run.train(log)
    if leads and finished:
        write_json(run.directory.summary, {"dataset": run.dataset, "steps": run.recipe.train.steps})


class RankSystem(NamedTuple):
    """What trains, on one rank.

    Attributes:
        model: Called with ids and labels.
        optimizer: Its optimizer, whose steps communicate where the system is one of islands.
        clip: Scales the gradients to a norm of at most its argument, and returns the norm.
        micro_batches: Passes the micro-batches of a step on, and tells the system which is the last.
        end: Called after the last step: islands end with the same parameters.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    clip: Callable[[float], float]
    micro_batches: Callable[[Sequence[Batch]], Iterable[Batch]]
    end: Callable[[], object] = lambda: None


@dataclass
class _RankRun:
    """One rank of a run.

    Attributes:
        recipe: The recipe.
        plan: Its plan; of peers, the number of ranks and the batch count.
        directory: Directory of the run.
        dataset: Fingerprint of the tokens.
        system: What trains.
        samples: Samples to train on.
        held_out: Samples to validate with.
        first: Steps of its trunk.
    """

    recipe: Recipe
    plan: Plan
    directory: RunDirectory
    dataset: str
    system: RankSystem
    samples: Samples
    held_out: Samples
    first: int = 0

    @classmethod
    def start(cls, recipe: Recipe, loop: Loop, directory: RunDirectory) -> _RankRun:
        """Build the model and what trains it. All ranks call it."""
        plan, data = resolve_plan(recipe, None), prepare(recipe.data)
        seq, seed = recipe.train.seq, recipe.train.seed
        whole = build(recipe.model, vocab=data.vocab, seq=seq, seed=seed, recompute=False)
        trunk = newest(directory.checkpoints)
        trained = _SYSTEMS[loop.system](whole, recipe, plan, loop, None if trunk is None else trunk.path)
        samples, held_out = Samples(data.train, seq, seed), Samples(data.validation, seq, 0)
        first = 0 if trunk is None else trunk.step
        return cls(recipe, plan, directory, data.fingerprint, trained, samples, held_out, first)

    def train(self, log: IO[str]) -> bool:
        """Train to the last step; False where the loss was no longer finite."""
        train, skipped_in_a_row = self.recipe.train, 0
        position = self.first * self._at_once * self.plan.micro_batches
        for step in range(self.first + 1, train.steps + 1):
            rate = self._set_learning_rate(step - 1)
            loss, norm = self._step(position)
            position += self._at_once * self.plan.micro_batches
            mean = control().all_reduce_mean([loss])[0]
            skipped = not math.isfinite(norm)
            skipped_in_a_row = skipped_in_a_row + 1 if skipped else 0
            if step == train.steps:
                self.system.end()
            validates = step == train.steps or (train.validate_every and step % train.validate_every == 0)
            record = {
                "step": step, "tokens": position * train.seq, "loss": _finite(mean),
                "val_loss": _finite(self._validate()) if validates else None,
                "grad_norm": _finite(norm), "lr": rate, "skipped": skipped,
            }  # fmt: skip
            log.write(json.dumps(record) + "\n")
            log.flush()
            if skipped_in_a_row >= MOST_SKIPPED:
                return False
        return True

    @property
    def _world(self) -> int:
        return control().size

    @property
    def _at_once(self) -> int:
        """Sequences of a micro-batch, over all ranks."""
        return self._world * self.plan.micro_batch

    def _step(self, position: int) -> tuple[float, float]:
        """One update: this rank's mean loss, and the norm of its gradient, over ranks where they step together."""
        number = self.plan.micro_batches
        batches = step_batches(
            self.samples, position=position, micro_batch=self.plan.micro_batch, micro_batches=number,
            rank=control().rank, world=self._world,
        )  # fmt: skip
        total = 0.0
        for batch in self.system.micro_batches(batches):
            loss = self.system.model(batch.input_ids, labels=batch.labels).loss / number
            loss.backward()
            total += float(loss.detach())
        norm = self.system.clip(self.recipe.optimizer.clip or math.inf)
        if math.isfinite(norm):
            self.system.optimizer.step()
        self.system.optimizer.zero_grad()
        return total, norm

    def _validate(self) -> float:
        """Mean loss over the held-out samples; every rank takes a part with its own parameters."""
        total, counted = 0.0, 0
        batches = validation_batches(
            self.held_out, number=self.recipe.train.validation_samples, micro_batch=self.plan.micro_batch,
            rank=control().rank, world=self._world,
        )  # fmt: skip
        self.system.model.eval()
        with torch.no_grad():
            for batch in batches:
                labels = int((batch.labels != IGNORED).sum())
                loss = float(self.system.model(batch.input_ids, labels=batch.labels).loss)
                if labels:
                    total, counted = total + loss * labels, counted + labels
        self.system.model.train()
        mean_total, mean_labels = control().all_reduce_mean([total, float(counted)])
        return mean_total / mean_labels

    def _set_learning_rate(self, step: int) -> float:
        settings = self.recipe.optimizer
        share = learning_rate_share(
            step, warmup=settings.warmup, steps=self.recipe.train.steps, final=settings.final_lr_share
        )
        for group in self.system.optimizer.param_groups:
            group["lr"] = settings.lr * share
        return settings.lr * share


def _plan(model: nn.Module, recipe: Recipe, plan: Plan, loop: Loop, trunk: Path | None) -> RankSystem:
    """thinwire's plan."""
    groups, options = _groups(model, loop), _options(recipe, loop)
    sharded = tw.shard(model, plan)
    optimizer = tw.optimizer(sharded, _KINDS[loop.inner], param_groups=groups, **options)
    if trunk is not None:
        tw.load(sharded, optimizer if loop.inner == "adamw" else None, trunk)
    return RankSystem(
        sharded, optimizer, lambda norm: float(tw.clip_grad_norm_(sharded, norm)), partial(tw.micro_batches, sharded),
        partial(tw.join_islands, sharded),
    )  # fmt: skip


def _ddp(model: nn.Module, recipe: Recipe, plan: Plan, loop: Loop, trunk: Path | None) -> RankSystem:
    """DDP with gradients in bf16."""
    return _replicated(bf16_replica(model), recipe, loop, trunk)


def _powersgd(model: nn.Module, recipe: Recipe, plan: Plan, loop: Loop, trunk: Path | None) -> RankSystem:
    """DDP with PowerSGD."""
    return _replicated(powersgd_replica(model), recipe, loop, trunk)


def _torchft(model: nn.Module, recipe: Recipe, plan: Plan, loop: Loop, trunk: Path | None) -> RankSystem:
    """Islands of torchft, one for each rank."""
    island = model if plan.compute_dtype == "float32" else Autocast(model)
    settings = OuterSettings(
        loop.system, loop.every, loop.fragments, loop.delay, loop.blend, loop.outer_lr, loop.outer_momentum
    )
    trained = _whole(island, model, recipe, loop, trunk)
    join(model, trained.optimizer, settings, Place(control().rank, control().size, 1))
    return trained._replace(end=partial(take_the_mean, model))


_SYSTEMS: Final[Mapping[str, Callable[[nn.Module, Recipe, Plan, Loop, Path | None], RankSystem]]] = {
    "plan": _plan, "ddp": _ddp, "powersgd": _powersgd, "diloco": _torchft, "local-sgd": _torchft,
}  # fmt: skip

_KINDS: Final[Mapping[str, Any]] = {"adamw": torch.optim.AdamW, "muon": MuonWithAdamW}


def _replicated(
    replica: nn.parallel.DistributedDataParallel, recipe: Recipe, loop: Loop, trunk: Path | None
) -> RankSystem:
    """A replica, which adds up gradients over ranks in the last micro-batch."""

    def micro_batches(batches: Sequence[Batch]) -> Iterator[Batch]:
        with replica.no_sync():
            yield from batches[:-1]
        yield batches[-1]

    return _whole(replica, replica.module.model, recipe, loop, trunk)._replace(micro_batches=micro_batches)


def _whole(wrapped: nn.Module, model: nn.Module, recipe: Recipe, loop: Loop, trunk: Path | None) -> RankSystem:
    """A model whose parameters are whole on every rank."""
    parameters = dict(model.named_parameters())
    groups = [{**group, "params": [parameters[name] for name in group["params"]]} for group in _groups(model, loop)]
    optimizer = _KINDS[loop.inner](groups, **_options(recipe, loop))
    if trunk is not None:
        branch(model, optimizer, trunk)

    def clip(norm: float) -> float:
        return float(nn.utils.clip_grad_norm_(model.parameters(), norm, foreach=True))

    return RankSystem(wrapped, optimizer, clip, iter)


def _groups(model: nn.Module, loop: Loop) -> list[dict[str, Any]]:
    """Parameter groups by name, as ``thinwire train`` makes them, in its order: a checkpoint has the options of its
    groups by their positions."""
    undecayed = undecayed_names(model)
    if loop.inner == "muon":
        return muon_groups(model, undecayed)
    bare = set(undecayed)
    return [
        {"params": undecayed, "weight_decay": 0.0},
        {"params": [name for name, _ in model.named_parameters() if name not in bare]},
    ]


def _options(recipe: Recipe, loop: Loop) -> dict[str, Any]:
    settings = recipe.optimizer
    options = {"lr": settings.lr, "betas": settings.betas, "eps": settings.eps, "weight_decay": settings.weight_decay}
    return options if loop.inner == "muon" else {**options, "fused": True}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def main(arguments: list[str]) -> None:
    """Train a recipe: its file, the loop as JSON in a file, and the directory of the run."""
    recipe, loop, directory = arguments
    train(
        Recipe.load(recipe),
        Loop.parse(json.loads(Path(loop).read_text(encoding="utf-8"))),
        RunDirectory(Path(directory).resolve()),
    )


if __name__ == "__main__":
    # Ranks find the functions of this module under its name, not under that of a program.
    from thinwire_bench.study.loops import main as as_module

    as_module(sys.argv[1:])
