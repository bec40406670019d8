"""Loads a checkpoint under any plan: nothing changes until all ranks know that it holds what they need."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import starmap
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thinwire.checkpoint import store
from thinwire.checkpoint.manifest import Manifest, VectorEntry
from thinwire.collectives.group import Control
from thinwire.collectives.memory import stored_once
from thinwire.errors import CheckpointError, SpecError
from thinwire.program.wire import spreads_difference
from thinwire.sharding.checkpointing.encoded_parameters import EncodedForm, want_encoded
from thinwire.sharding.checkpointing.frozen_parameters import check_present
from thinwire.sharding.checkpointing.manifest_values import NOT_FINITE, check_groups, check_values, groups_in_order
from thinwire.sharding.checkpointing.names import in_names_of
from thinwire.sharding.checkpointing.saving import agreed_path, finish_save, frozen_masters, savers
from thinwire.sharding.checkpointing.share_states import FragmentStates
from thinwire.sharding.checkpointing.stored_parameters import (
    Json,
    ModelAndOptimizer,
    StoredParameters,
    Vectors,
    add_frozen,
    add_masters,
    check_slices,
    everywhere,
    frozen,
    group_numbers,
    of_part,
    persistent_buffers,
    shapes_of,
    union,
)
from thinwire.sharding.grads.unit_gradient import OwnedFragment
from thinwire.sharding.islands.exchanges import Exchanges
from thinwire.sharding.islands.saved import own_key, own_masters, restore_lost, resume_turns, shared_pieces
from thinwire.sharding.runtime.runtime import plan_of, runtime_of, sharded_of
from thinwire.sharding.step.loss_scale import checked_state
from thinwire.spec import Plan

log = logging.getLogger("thinwire")


def load(parts: Sequence[ModelAndOptimizer], directory: str | Path) -> dict[str, Json]:
    """Read a checkpoint; see :func:`thinwire.load`. Every rank has the same number of parts."""
    ranks = savers(parts)
    path = agreed_path(ranks, directory)
    finish_save(ranks)
    for model, _ in parts:
        runtime_of(model).refuse("load()")
    shapes, numbers = union(shapes_of(parts), ranks), union(group_numbers(parts), ranks)
    opened, manifest, keys = everywhere(lambda: _open(shapes, numbers, parts, path), ranks)
    same_plan = _holds(manifest, plan_of(parts[0][0]))  # those of other parts follow from it
    loading = [_Loading(model, optim, manifest, path, same_plan=same_plan) for model, optim in parts]
    vectors = Vectors()

    def want() -> None:
        for part in loading:
            part.want(vectors)

    def begin() -> None:
        for part in loading:
            part.begin()

    try:
        # Check on all ranks before any rank reads, so that no rank waits for another that has failed.
        _check_absent(parts, manifest, path, ranks)
        everywhere(want, ranks)
        wanted = {keys.get(key, key): vector for key, vector in vectors.items()}
        store.read(opened, wanted, control=ranks, before_filling=begin)
    except BaseException:  # whatever it is, the optimizer must not go on with what a load has left
        for part in loading:
            part.undo()
        raise
    for part in loading:
        part.finish()
    return dict(manifest.values["extra"])


def _check_absent(parts: Sequence[ModelAndOptimizer], manifest: Manifest, path: Path, ranks: Control) -> None:
    """Check that the model already holds the parameters that the checkpoint only refers to. Collective."""
    if not manifest.absent:
        return
    vectors = Vectors()
    for model, _ in parts:
        sharded = sharded_of(model)
        add_frozen(sharded, vectors)
        add_masters(sharded, vectors, {key: content.dtype for key, content in manifest.absent.items()})
    present = {key: vector for key, vector in vectors.items() if key in manifest.absent}
    check_present(manifest.absent, present, path, ranks)


def _holds(manifest: Manifest, plan: Plan) -> bool:
    """Whether a checkpoint is of this plan, however the release that wrote it spelled the plan's keys."""
    try:
        return Plan.from_toml(str(manifest.values["plan"])) == plan
    except SpecError:  # of a later release, with keys that this one does not know
        return False


class _Loading:
    """Loads one part. Nothing in the part changes until the checkpoint is known to hold everything it needs; from then
    on, the part is half loaded until the end."""

    def __init__(
        self, model: nn.Module, optim: FragmentStates | None, manifest: Manifest, path: Path, *, same_plan: bool
    ) -> None:
        self._optim, self._manifest, self._path = optim, manifest, path
        self._runtime = runtime = runtime_of(model)
        self._sharded, self._reducer, self._step_check = runtime.sharded, runtime.reducer, runtime.step_check
        sharded = self._sharded
        runtime.join_spreads()
        runtime.zero_grad()
        self._same_plan = same_plan
        self._with_held = self._same_plan and spreads_difference(sharded.plan)
        self._copies: list[Callable[[], object]] = []
        self._lost: dict[str, torch.Tensor] = {}
        self._outer_lost: dict[str, torch.Tensor] = {}
        # Islands go on by themselves if there are as many as before; otherwise all start from what they agreed on.
        self._same_islands = manifest.values.get("islands", 1) == sharded.plan.job_islands
        self._island = sharded.part.data.island if self._same_islands else 0
        # What state there is of a parameter: vectors, cut or whole, and single numbers.
        self._saved: dict[str, set[str]] = {}
        prefix = f"{own_key('optimizer', self._island)}/"
        slices = manifest.values.get("slices", {})
        for full in (*manifest.vectors, *manifest.values):
            if full.startswith(prefix):
                name, _, key = full.removeprefix(prefix).rpartition("/")
                cut = name in slices and full in manifest.vectors
                self._saved.setdefault(name, set()).add(key.rpartition("@")[0] if cut else key)
        self._give_masters()
        self._new = optim.make_state(self._saved.keys()) if optim is not None else []
        self._loss_scale: Mapping[str, Json] | None = None
        self._counts: list[int] | None = manifest.values.get(own_key("average", self._island))

    def _give_masters(self) -> None:
        """Give masters to frozen parameters that had some: those that an optimizer trained may be unfrozen again after
        the load, and others follow, as a mean teacher's do."""
        frozen = [buffer for buffer in self._sharded.buffers if not buffer.layout.trainable]
        names = {slot.name for buffer in frozen if buffer.narrows for slot in buffer.layout.slots}
        names &= self._manifest.values.get("updated", {}).keys()
        if self._optim is not None:
            names |= self._saved.keys() & {slot.name for buffer in frozen for slot in buffer.layout.slots}
        if names and self._runtime.masters is not None:
            self._runtime.masters.widen(names)

    def want(self, vectors: Vectors) -> None:
        """Register the vectors to read and their targets.

        Raises:
            CheckpointError: The checkpoint lacks state of the optimizer, or its loss scale is corrupt.
        """
        self._loss_scale = checked_state(self._manifest.values.get(own_key("loss_scale", self._island)))
        stored = StoredParameters(self._manifest, self._sharded.slices, vectors)
        # What was frozen when it was saved, and is trained now, was on no wire: everything is spread anew.
        held = own_key("held", self._island)
        trained = (buffer for buffer in self._sharded.buffers if buffer.layout.trainable)
        names = [slot.name for buffer in trained for slot in buffer.layout.slots]
        self._with_held &= all(stored.dtype_of(f"{held}/{name}") is not None for name in names)
        self._want_unoptimized(vectors, stored)
        fragments = self._sharded.fragments
        exchanges, means = self._runtime.exchanges, self._runtime.means
        apart = exchanges is not None and self._same_islands
        for owned in fragments:
            slot, name, offset = owned.fragment.slot, owned.name, owned.fragment.offset
            self._refuse_encoded(name)
            masters = own_masters(self._island) if apart else "model"
            stored.want(f"{masters}/{name}", slot, offset, owned.value.detach().view(-1))
            if self._with_held:
                stored.want(f"{held}/{name}", slot, offset, owned.held)
            if means is not None and self._counts is not None:
                stored.want(f"{own_key('average', self._island)}/{name}", slot, offset, means.of(owned))
        if exchanges is not None:
            exchanges.wait()
            self._want_shared(exchanges, fragments, stored)
        data, islands = self._sharded.part.data, self._sharded.plan.islands
        if self._sharded.plan.wire.error_feedback:
            self._lost = self._want_lost(own_key("feedback", data.island), data.ranks, vectors)
        if islands is not None and islands.keeps_lost:
            self._outer_lost = self._want_lost("outer/lost", data.everyone, vectors)
        if self._optim is not None:
            self._want_state(self._optim, stored)
        self._copies += stored.copies

    def _want_unoptimized(self, vectors: Vectors, parameters: StoredParameters) -> None:
        """Register frozen parameters and buffers for reading, in their stored dtype."""
        for frozen_buffer, slot, offset, run in frozen(self._sharded):
            form = EncodedForm.of(self._manifest.values, slot.name, self._path)
            if form is not None:
                self._check_uncut(form, slot.name)
                self._copies += want_encoded(form, frozen_buffer, slot, offset, run, parameters.want)
                continue
            key, target = f"model/{slot.name}", None if frozen_buffer.stored is not None else frozen_buffer.values(run)
            dtype = parameters.dtype_of(key) or frozen_buffer.layout.dtype
            if target is None or dtype != target.dtype:
                target = torch.empty(run.length, dtype=dtype, device=frozen_buffer.shard.device)
                self._copies.append(functools.partial(frozen_buffer.put, run, target))
            parameters.want(key, slot, offset, target)
        for name, buffer in persistent_buffers(self._sharded.model):
            entry = self._manifest.vectors.get(f"buffer/{name}")
            dtype = entry.dtype if entry is not None and entry.dtype is not None else buffer.dtype
            stored = torch.empty(buffer.numel(), dtype=dtype, device=buffer.device)
            vectors.add(f"buffer/{name}", buffer.numel(), 0, stored)
            once = stored_once(stored.view(buffer.shape), buffer)
            self._copies.append(functools.partial(stored_once(buffer).copy_, once))

    def _refuse_encoded(self, name: str) -> None:
        """Refuse to train what a checkpoint holds encoded.

        Raises:
            CheckpointError: The parameter was frozen and kept encoded when the checkpoint was saved.
        """
        form = EncodedForm.of(self._manifest.values, name, self._path)
        if form is not None:
            raise CheckpointError(
                f"{self._path}: {name} is saved as blocks of {form.codec}, from a model in which it was frozen, and "
                "this model trains it: freeze it before thinwire.shard, or start from plain weights with thinwire "
                "export"
            )

    def _check_uncut(self, form: EncodedForm, name: str) -> None:
        """Refuse blocks of other slices than this rank's: they hold other elements.

        Raises:
            CheckpointError: The parameter is cut in another way than in the checkpoint.
        """
        mine, cut = self._sharded.slices.get(name), self._manifest.values.get("slices", {}).get(name)
        if cut != (None if mine is None else [mine.dim, mine.ways]):
            ways = 1 if cut is None else cut[1]
            raise CheckpointError(
                f"{self._path}: {name} is saved as blocks of {form.codec} of {ways} tensor-parallel slices, which hold "
                f"other elements than those of this plan: load it with tp = {ways}, or take plain weights with "
                "thinwire export"
            )

    def _want_shared(self, exchanges: Exchanges, fragments: Sequence[OwnedFragment], stored: StoredParameters) -> None:
        """Register what islands share: what they agreed on last, and the outer momentum, which may be new."""
        for slot, offset, anchor, momentum in shared_pieces(exchanges, fragments):
            stored.want(f"model/{slot.name}", slot, offset, anchor)
            key = f"outer/momentum/{slot.name}"
            if momentum is not None and stored.dtype_of(key) is not None:
                stored.want(key, slot, offset, momentum)
            elif momentum is not None:
                self._copies.append(momentum.zero_)

    def _want_state(self, optim: FragmentStates, parameters: StoredParameters) -> None:
        """Register this rank's optimizer state for reading."""
        prefix, values = own_key("optimizer", self._island), self._manifest.values
        frozen_again = frozen_masters(self._sharded)
        for owned in optim.fragments:
            slot = owned.fragment.slot
            if slot.name not in self._saved:
                optim.state.pop(owned.value, None)
                continue
            present, saved = optim.state_of(owned), self._saved[slot.name]
            if slot.name not in frozen_again and (lost := sorted(saved - present.keys())):
                raise CheckpointError(
                    f"{self._path}: the checkpoint has optimizer state {lost[0]!r} of {slot.name}, which this "
                    "optimizer does not keep; make it with the parameters and options it was saved with, or load the "
                    "parameters alone with thinwire.load(model, None, path)"
                )
            for key, entry in present.items():
                full = f"{prefix}/{slot.name}/{key}"
                if key not in saved:
                    raise CheckpointError(
                        f"{self._path}: the checkpoint has optimizer state for {slot.name} but none called {key!r}; "
                        "load it with the optimizer options it was saved with"
                    )
                if full in values:
                    self._copies.append(functools.partial(_put_number, optim.state[owned.value], key, values[full]))
                elif entry.numel() == owned.value.numel():
                    parameters.want(full, slot, owned.fragment.offset, entry.view(-1))
                else:
                    parameters.want(full, slot, 0, entry.view(-1), entry.numel())

    def _want_lost(self, key: str, ranks: Sequence[int], vectors: Vectors) -> dict[str, torch.Tensor]:
        """Register this rank's error feedback for reading, if it comes from the same plan; returns targets by what
        they belong to."""
        part, manifest = self._sharded.part, self._manifest
        stored, own = manifest.values.get(of_part(key, part), {}), part.control
        if not stored:
            return {}
        if not self._same_plan:
            if own.rank == 0:
                log.warning("the checkpoint's error feedback belongs to another plan: error feedback starts from zero")
            return {}
        rank, wanted = sorted(ranks).index(own.ranks[own.rank]), {}
        for number in stored:
            name = of_part(f"{key}/{number}", part)
            sizes = _sizes_of_ranks(stored[number], manifest.vectors.get(name), len(ranks), name)
            wanted[number] = torch.zeros(sizes[rank], dtype=torch.float32, device=self._sharded.device)
            vectors.add(name, sum(sizes), sum(sizes[:rank]), wanted[number])
        return wanted

    def begin(self) -> None:
        """Note that the part and its optimizer will hold values of no single moment until the load has succeeded."""
        self._runtime.half_loaded = (
            f"the model is half loaded: the load of {self._path} failed after it had begun to fill the model; load a "
            "checkpoint, this one or another, before you use the model again"
        )
        if self._optim is not None:
            self._new = list(self._optim.fragments)

    def undo(self) -> None:
        """Remove the optimizer state that was created for loading, or all of it if it is half loaded."""
        for owned in self._new:
            assert self._optim is not None
            self._optim.state.pop(owned.value, None)
        if self._new and self._optim is not None:
            self._optim.take()

    def finish(self) -> None:
        """Put the values that were read into place, and spread them."""
        for copy in self._copies:
            copy()
        if self._optim is not None:
            self._optim.take()
            for group, values in zip(self._optim.param_groups, self._manifest.values["groups"], strict=True):
                group.update({key: _as_kept(group.get(key), value) for key, value in values.items()})
        runtime, exchanges = self._runtime, self._runtime.exchanges
        self._reducer.feedback.lost = self._lost
        order = self._manifest.values.get(of_part(own_key("order", self._island), self._sharded.part), [])
        runtime.schedule.resume(order)
        self._restore_loss_scale()
        self._restore_average()
        if exchanges is not None:
            restore_lost(exchanges, self._outer_lost)
            turns = self._manifest.values.get(of_part("outer", self._sharded.part), {}) if self._same_islands else {}
            resume_turns(exchanges, turns)
        # The spread counts as the update of the last saved step.
        runtime.loaded(int(self._manifest.values["num_steps"]), with_replicas=self._with_held)
        runtime.join_spreads()
        runtime.half_loaded = None

    def _restore_average(self) -> None:
        """Continue with the average of the checkpoint, or begin one with the weights that were loaded."""
        means = self._runtime.means
        if means is not None and self._counts is not None:
            updates, taken = self._counts
            means.counts = updates, taken
        elif means is not None:
            means.restart()
        elif self._counts is not None and self._optim is not None and self._sharded.rank == 0:
            log.warning(
                "%s holds an average of the weights, which is not loaded: to go on with it, call "
                "thinwire.average(model, ...) before thinwire.load, or set average.decay in the recipe",
                self._path,
            )

    def _restore_loss_scale(self) -> None:
        """Continue with the loss scale of the checkpoint; rounding errors of another scale follow the present one."""
        saved, scale = self._loss_scale, self._step_check.loss_scale
        if saved is not None and self._optim is not None and scale is not None:
            scale.restore(saved)
        before, present = 1.0 if saved is None else saved["value"], 1.0 if scale is None else scale.value
        self._reducer.rescale_lost(present / before)


def _open(
    shapes: Mapping[str, Json], numbers: Mapping[str, int], parts: Sequence[ModelAndOptimizer], path: Path
) -> tuple[store.Opened, Manifest, dict[str, str]]:
    """Read and verify the manifest of a checkpoint, and check that it fits the model and the optimizer; returns what
    :func:`in_names_of` does with it as well. The manifest's groups are in the order of the optimizer's."""
    opened = store.open_checkpoint(path)
    check_values(opened.manifest.values, f"{path}: corrupt")
    manifest, keys = in_names_of(shapes, opened.manifest)
    saved_shapes = manifest.values.get("shapes", {})
    differences = [
        f"{name} is {saved_shapes.get(name, 'missing')} in the checkpoint, {shapes.get(name, 'missing')} in the model"
        for name in {**shapes, **saved_shapes}
        if saved_shapes.get(name) != shapes.get(name)
    ]
    if differences:
        more = f", and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise CheckpointError(f"{path}: saved from another model: {'; '.join(differences[:3])}{more}")
    check_slices(manifest, shapes, path)
    optim = parts[0][1]
    if optim is None:
        return opened, manifest, keys
    saved, present = manifest.values.get("optimizer"), optim.kind
    alone = "load the parameters alone with thinwire.load(model, None, path)"
    if saved is None:
        raise CheckpointError(f"{path}: saved without an optimizer; {alone}")
    if saved != present:
        raise CheckpointError(f"{path}: saved with optimizer {saved}, loaded into {present}; use {saved}, or {alone}")
    num_saved, num_present = len(manifest.values["groups"]), len(optim.param_groups)
    if num_saved != num_present:
        raise CheckpointError(
            f"{path}: the checkpoint has {num_saved} parameter groups, the optimizer {num_present}; make the optimizer "
            "with the param_groups it was saved with"
        )
    groups = groups_in_order(manifest.values, numbers, path)
    check_groups(groups, optim.param_groups, path)
    return opened, replace(manifest, values={**manifest.values, "groups": groups}), keys


def _sizes_of_ranks(sizes: Json, vector: VectorEntry | None, ranks: int, name: str) -> list[int]:
    """Check the sizes in the manifest that divide a vector among ranks, before memory is allocated for them."""
    well_formed = isinstance(sizes, list) and all(type(size) is int and size >= 0 for size in sizes)
    if not well_formed or vector is None or len(sizes) != ranks or sum(sizes) != vector.numel:
        raise CheckpointError(f"the manifest does not say how {name} is shared out among {ranks} ranks: it is damaged")
    return list(sizes)


def _put_number(state: dict[str, Any], key: str, value: Json) -> None:
    if isinstance(state[key], torch.Tensor):
        state[key].fill_(value)
    else:
        state[key] = value


def _as_kept(present: Any, saved: Json) -> Any:
    """A saved option, of the kind that the group has. A tensor is made anew: groups may share theirs."""
    if isinstance(present, tuple) and isinstance(saved, list):
        return tuple(starmap(_as_kept, zip(present, saved, strict=True)))
    if saved in NOT_FINITE and not isinstance(present, str):
        saved = float(saved)
    if isinstance(present, torch.Tensor) and isinstance(saved, int | float):
        return torch.full_like(present, saved)
    return saved
