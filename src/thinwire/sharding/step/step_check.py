"""The small exchanges of a step: ranks compare their steps, merge their used parameters, and add up the norm."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch

from thinwire.collectives.all_gather import gather_rows
from thinwire.errors import MismatchError, UsageError
from thinwire.program import NORM_BYTES, Axis, Lane, UnitInfo, any_gathered, control_bytes
from thinwire.sharding.grads.reducer import Reducer
from thinwire.sharding.lanes.streams import read_later
from thinwire.sharding.params.write_audit import WriteAudit
from thinwire.sharding.step.loss_scale import LossScale
from thinwire.sharding.step.sharded_model import ShardedModel

_UNFINISHED: Final = 1
"""Flag of a rank whose last micro-batch lacks its backward."""

_WRITTEN: Final = 2
"""Flag of a rank on which a forward wrote to parameters."""

_UNKNOWN: Final = torch.tensor(math.nan, dtype=torch.float64, device="cpu")
"""The norm before it is measured."""

_NUM_FLAGS: Final = 2
"""Number of low bits that hold flags; the number of backwards follows above them."""

_BLOCK: Final = 1 << 18
"""Number of elements whose squares are added up in fp32."""


@dataclass(frozen=True)
class StepResult:
    """The result of the step's exchanges, which is the same on every rank.

    Attributes:
        norm: L2 norm of the whole gradient, without the loss scale; NaN unless it was measured. 0-D, fp64; on the
            device if the model has a group ``world``, else on the CPU.
        measured: Whether the norm was measured.
        unscaled: Whether the gradients were divided by the loss scale.
    """

    norm: torch.Tensor
    measured: bool
    unscaled: bool = False

    @property
    def finite(self) -> bool:
        """Whether the norm, and so every gradient, is finite. The host waits for a norm on the device."""
        return math.isfinite(float(self.norm))


class UsedGradients:
    """Tracks which trainable parameters have gradients: on this rank and, after an exchange, on any rank.

    Attributes:
        mine: For each trainable parameter in order, 1 if this rank has a gradient for it, else 0.
        all_used: Whether every parameter is known to have a gradient on some rank.
    """

    def __init__(self, infos: Sequence[UnitInfo]) -> None:
        self._count([info.parameters for info in infos])
        self.mine = bytearray(sum(self._counts))
        self._before = bytearray(self.mine)  # the state before the current backward, in case the backward fails
        self._anywhere: list[bool] | None = None  # set by an exchange, dropped by the next backward
        self.all_used = False

    def _count(self, counts: list[int]) -> None:
        self._counts = counts
        # Index of each unit's first trainable parameter among those of the model.
        self._first_bit = list(itertools.accumulate(counts[:-1], initial=0))

    def extend(self, infos: Sequence[UnitInfo]) -> None:
        """Take further trainable parameters, which come last in their units and have no gradients."""
        ends = [first + count for first, count in zip(self._first_bit, self._counts, strict=True)]
        added = [info.parameters - count for info, count in zip(infos, self._counts, strict=True)]
        for end, new in reversed(list(zip(ends, added, strict=True))):
            for flags in (self.mine, self._before, *(() if self._anywhere is None else (self._anywhere,))):
                flags[end:end] = [False] * new
        self._count([info.parameters for info in infos])
        self.all_used = self._anywhere is not None and all(self._anywhere)

    def note(self, unit: int, slot: int) -> None:
        """Record that this rank has a gradient for a parameter."""
        self.mine[self._first_bit[unit] + slot] = 1

    def note_all(self, unit: int) -> None:
        """Record that this rank has a gradient for every trainable parameter of a unit."""
        first, count = self._first_bit[unit], self._counts[unit]
        self.mine[first : first + count] = b"\1" * count

    def begin_backward(self) -> None:
        """Begin a backward, which adds gradients."""
        self._before = bytearray(self.mine)
        self._anywhere, self.all_used = None, False

    def undo_backward(self, lost: Collection[int]) -> None:
        """Discard the gradients of a backward that failed; the ``lost`` units have lost earlier ones, too."""
        self.mine[:] = self._before
        for unit in lost:
            first, count = self._first_bit[unit], self._counts[unit]
            self.mine[first : first + count] = bytes(count)

    def forget(self) -> None:
        """Record that no parameter has a gradient any more."""
        self.mine = bytearray(len(self.mine))
        self.learn([False] * len(self.mine))

    def set(self, unit: int, slot: int, *, used: bool) -> None:
        """Record whether a parameter has a gradient; called alike on every rank."""
        bit = self._first_bit[unit] + slot
        self.mine[bit] = used
        if self._anywhere is not None:
            self._anywhere[bit] = used
            self.all_used = all(self._anywhere)

    def learn(self, anywhere: Sequence[bool]) -> None:
        """Store the result of an exchange: for each trainable parameter, whether any rank has a gradient."""
        self._anywhere, self.all_used = list(anywhere), all(anywhere)

    def is_known(self) -> bool:
        """Whether ranks have exchanged their flags since the last backward."""
        return self._anywhere is not None

    def is_used(self, unit: int, slot: int) -> bool:
        """Whether any rank has a gradient for a parameter. Requires an exchange since the last backward."""
        assert self._anywhere is not None
        return self._anywhere[self._first_bit[unit] + slot]

    def among(self, unit: int, parameters: Sequence[torch.Tensor]) -> frozenset[int]:
        """Identities of those of a unit's trainable parameters, given in order, for which :meth:`is_used` holds."""
        return frozenset(id(p) for slot, p in enumerate(parameters) if self.is_used(unit, slot))


class StepCheck:
    """Performs the exchanges of one model's steps, on the control lane.

    Attributes:
        same_order: Whether the last exchange found the same order of units on all ranks. A difference is an error
            unless every rank holds whole parameters.
        loss_scale: Factor of the losses, and so of all gradients; ``None`` without one.
        result: What ranks have agreed on in this step; ``None`` before, and after gradients have come since.
    """

    def __init__(self, sharded: ShardedModel, reducer: Reducer, audit: WriteAudit) -> None:
        self._sharded, self._reducer, self.audit = sharded, reducer, audit
        infos = [unit.info for unit in sharded.units]
        self._row_bytes = control_bytes(infos)
        self._is_whole = not any_gathered(sharded.plan, infos)  # then ranks may run different units
        self.used = UsedGradients(infos)
        self.same_order = True
        self.loss_scale: LossScale | None = None
        self.result: StepResult | None = None
        self._late: list[Callable[[], float]] = []  # norms that the host has not read
        self._then: list[Callable[[bool], None]] = []  # called once it has

    def extend(self, infos: Sequence[UnitInfo]) -> None:
        """Take further trainable parameters; see :meth:`UsedGradients.extend`."""
        self._row_bytes = control_bytes(infos)
        self.used.extend(infos)

    # -- gradients as they come --------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Begin a backward, whose gradients invalidate the agreement of this step."""
        self.read_norms()
        self.used.begin_backward()
        self.result = None

    def forget_gradients(self) -> None:
        """Record that no parameter has a gradient any more."""
        self.used.forget()
        self.result = None

    def forget_norm(self) -> None:
        """Drop the norm, because gradients have changed since it was measured."""
        if self.result is not None:
            self.result = replace(self.result, norm=_UNKNOWN, measured=False)

    # -- exchanges ---------------------------------------------------------------------------------------------

    def close(self, order_hash: int, backwards: int) -> None:
        """Exchange with the other ranks. Reductions continue in the background.

        Raises:
            MismatchError: Two ranks ran units in a different order or took a different number of steps.
            UsageError: On some rank, the backward of the last micro-batch is missing, or a forward wrote to parameters.
                Raised on every rank.
        """
        self.read_norms()
        # Compare before joining the reductions: if ranks ran different steps, reductions would never finish.
        self.used.learn(self._compare_steps(order_hash, backwards))
        self.result = StepResult(_UNKNOWN, False)

    def measure(self) -> None:
        """Measure the gradient norm after :meth:`close`. This waits for every reduction, makes a pass over this rank's
        share, and needs an exchange of its own."""
        assert self.result is not None
        norm = self._measured_norm() / self.gradient_scale
        self.result = replace(self.result, norm=norm, measured=True)
        if self._sharded.world is not None:
            self._late.append(read_later(norm))
        elif not self.result.finite:
            self._reducer.forget_lost()  # the rounding errors of such gradients are not finite either

    def read_norms(self) -> None:
        """Read norms that have stayed on the device, and do what depends on them. The device computed them before it
        began what the host has queued since, so that it does not run out of work."""
        late, self._late = self._late, []
        if not late:
            return
        then, self._then = self._then, []
        finite = all(math.isfinite(read()) for read in late)
        if not finite:
            self._reducer.forget_lost()
        for act in then:
            act(finite)

    def once_norm_is_read(self, act: Callable[[bool], None]) -> None:
        """Call a function with whether the gradient of this step is finite, once the host has read its norm."""
        assert self.result is not None
        if self._late:
            self._then.append(act)
        else:  # the loop has read it
            act(self.result.finite)

    @property
    def gradient_scale(self) -> float:
        """The loss scale that the gradients still contain; 1 once they were divided by it."""
        unscaled = self.result is not None and self.result.unscaled
        return 1.0 if self.loss_scale is None or unscaled else self.loss_scale.applied_value

    # -- the combined gradients --------------------------------------------------------------------------------

    def multiply_gradients(self, factor: torch.Tensor | float) -> bool:
        """Multiply the combined gradients by a factor (on the device 0-D, fp64) after :meth:`close`, and divide them by
        the loss scale that they still contain, in one pass. Returns whether they have changed. A factor on the device
        counts as a change, because the host does not know it."""
        assert self.result is not None
        arenas, total = self._sharded.arenas, factor / self.gradient_scale
        self.result = replace(self.result, norm=self.result.norm * factor, unscaled=True)
        if isinstance(total, torch.Tensor):
            self._reducer.settle()
            # torch would round a factor without dimensions to the dtype of the gradients.
            for arena in arenas:
                torch.mul(arena, total.float().view(1).to(arena.device), out=arena)
            return True
        if total != 1.0:
            self._reducer.settle()
            for arena in arenas:
                arena.mul_(total)
        return total != 1.0

    def clip_gradients(self, norm: torch.Tensor, max_norm: float) -> bool:
        """Scale the combined gradients so that the norm of the whole model (0-D, fp64) is at most ``max_norm``; returns
        what :meth:`multiply_gradients` does. As in torch, a norm that is not finite spoils them, so that it does not go
        unnoticed."""
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        changed = self.multiply_gradients(float(factor) if self._sharded.world is None else factor)
        self.spoil(norm)
        return changed

    def spoil(self, norm: torch.Tensor) -> None:
        """Make the norm NaN after :meth:`measure` if that of the whole model, 0-D, is not finite, so that no part of
        the model is updated."""
        assert self.result is not None
        self.result = replace(self.result, norm=self.result.norm + (norm - norm))

    # -- inside ------------------------------------------------------------------------------------------------

    def _measured_norm(self) -> torch.Tensor:
        """The L2 norm of the model's gradient over all ranks, where :class:`StepResult` has it: make a pass over this
        rank's share as its gradients arrive, and exchange the result."""
        sharded, world = self._sharded, self._sharded.world
        mine = torch.zeros((), dtype=torch.float64, device=sharded.device)
        # Replicas of a share count once, and so do parameters that all tensor-parallel ranks hold.
        if sharded.axes[Axis.REPLICA, Lane.SYNC].index == 0:
            norms = self._norms_of_fragments() if sharded.part.tensor else self._norms_of_units()
            if norms:
                mine = torch.stack(norms).double().square().sum().to(mine.device)
        if world is not None:
            return gather_rows(world, mine.view(1)).sum().sqrt()
        everyone = exchange_bytes(sharded, struct.pack("<d", float(mine)), NORM_BYTES)
        return torch.tensor(
            sum(struct.unpack_from("<d", row)[0] for row in everyone), dtype=torch.float64, device="cpu"
        ).sqrt()

    def _norms_of_units(self) -> list[torch.Tensor]:
        norms, gradients = [], self._reducer.gradients
        if self._sharded.lanes.home.exists:
            self._reducer.join()  # on a GPU, one call for all is faster
        for units in self._reducer.arrivals(reversed(list(gradients)), apart=False):
            parts = itertools.chain.from_iterable(gradients[unit] for unit in units)
            norms += _block_norms([part.owned.kept for part in parts if not part.owned.empty])
        return norms

    def _norms_of_fragments(self) -> list[torch.Tensor]:
        """Of parameters that no other tensor-parallel rank holds."""
        self._reducer.settle()
        fragments, slices = self._sharded.fragments, self._sharded.slices
        own = [owned for owned in fragments if slices[owned.name] is not None]
        return _block_norms([owned.grad for owned in own if not owned.source.owned.empty])

    def _compare_steps(self, order_hash: int, backwards: int) -> tuple[bool, ...]:
        """Check that all ranks ran the same step; returns for each trainable parameter whether any rank had a
        gradient."""
        unfinished = any(gradient.unsynced for gradient in self._reducer.parts)
        written = self.audit.written()
        flags = _UNFINISHED * unfinished | _WRITTEN * (written is not None)
        words = struct.pack("<qqq", order_hash, flags | backwards << _NUM_FLAGS, self._sharded.steps.taken)
        bits = np.packbits(np.frombuffer(self.used.mine, np.uint8), bitorder="little").tobytes()
        everyone = exchange_bytes(self._sharded, words + bits, self._row_bytes)
        rows = [struct.unpack_from("<qqq", row) for row in everyone]
        self.same_order = all(row[0] == rows[0][0] for row in rows)
        for rank, row in enumerate(rows):
            num_backwards, expected = row[1] >> _NUM_FLAGS, rows[0][1] >> _NUM_FLAGS
            same_counts = row[2] == rows[0][2] and num_backwards == expected
            if not same_counts or (row[0] != rows[0][0] and not self._is_whole):
                raise MismatchError(
                    f"rank {rank} and rank 0 ran different steps: order of units {row[0]:#x} against "
                    f"{rows[0][0]:#x}, step {row[2]} against {rows[0][2]}, {num_backwards} backwards against "
                    f"{expected}. Every rank must run the same units in the "
                    "same order; look for branches that depend on the data or the rank. Nothing was updated"
                )
        unfinished_rank, writing_rank = (
            next((rank for rank, row in enumerate(rows) if row[1] & flag), None) for flag in (_UNFINISHED, _WRITTEN)
        )
        if unfinished_rank is not None:
            raise UsageError(
                f"rank {unfinished_rank} has gradients that were never "
                "synchronised: the backward of the last of thinwire.micro_batches(...) is missing. Run it, or call "
                "zero_grad() to drop the step. Nothing was updated"
            )
        if writing_rank is not None:
            where = f"the forward of {written.name}" if written is not None else f"a forward on rank {writing_rank}"
            self.audit.excuse()
            raise UsageError(
                f"{where} writes to parameters of its unit, which are made anew from their masters: the change "
                "would be lost. Write to them between steps, as in `with torch.no_grad(): parameter.clamp_(...)` after "
                "optimizer.step(), or compute with a changed copy. Nothing was updated"
            )
        rows_of_bits = [np.frombuffer(row, np.uint8, offset=len(words)) for row in everyone]
        used = np.unpackbits(np.bitwise_or.reduce(rows_of_bits), count=len(self.used.mine), bitorder="little")
        return tuple(used.astype(bool).tolist())


def _block_norms(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Norms of the blocks of gradients, fp32. An fp32 sum of many squares is off by percents, differently under every
    plan; the caller adds up those of the blocks in fp64."""
    blocks = [block for values in gradients for block in values.view(-1).split(_BLOCK)]
    return list(torch._foreach_norm(blocks, 2, dtype=torch.float32)) if blocks else []


def exchange_bytes(sharded: ShardedModel, payload: bytes, size: int) -> list[bytes]:
    """All-gather ``size`` bytes of each rank on the host, by rank; shorter payloads are filled up with zeros."""
    group = sharded.axes[Axis.WORLD, Lane.CONTROL]
    row = torch.frombuffer(bytearray(payload.ljust(size, b"\0")), dtype=torch.uint8)
    with sharded.lanes.waiting(Lane.CONTROL):  # for the slowest rank, above all
        rows = gather_rows(group, row)
    ranks = sharded.part.data.ranks
    positions = sorted(range(group.size), key=ranks.__getitem__)
    # The group sorts by place within the node, then by node.
    mesh = sharded.plan.mesh
    by_rank = [rows[position % mesh.local * mesh.nodes + position // mesh.local] for position in positions]
    return [bytes(row.numpy()) for row in by_rank]
