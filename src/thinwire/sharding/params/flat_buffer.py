"""A unit's parameters in one vector, which is gathered and freed, and this rank's shard of it.

Two facts explain the memory management:

- Each unit owns one gathered storage for its whole life; freeing resizes the storage to zero. A pool shared by units
  would silently give wrong gradients: autograd keeps views of the old buffer, and ``p.data =`` bypasses version
  counters.
- Reading a storage of size zero crashes the process. A freed parameter therefore points at a *husk*: a NaN expanded to
  the parameter's shape, which reads as NaN (0 in dtypes without one) and, unless it has one element, refuses writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from thinwire.errors import UsageError
from thinwire.sharding.memory.layout import FlatLayout, Run, Slot
from thinwire.sharding.memory.local import local_tensor
from thinwire.sharding.params.stored_shard import StoredShard
from thinwire.sharding.params.unready import UnreadyParameter, is_plain


@dataclass
class FlatBuffer:
    """One flat buffer on this rank.

    Attributes:
        layout: Positions of the parameters in the buffer.
        parameters: Parameters of the modules, in slot order.
        full: The whole buffer, ``[layout.numel]`` in compute dtype; its storage is empty while the unit is sharded.
        shard: This rank's P shard, ``[layout.shard_numel]``; the same tensor as ``full`` if P is not gathered. If
            ``stored``, the message that is kept instead, uint8.
        shares: Shares of this P shard, by position along the shard axis.
        secondary: This rank's part of the secondary copy; ``None`` if the plan keeps none.
        master: Master values of this rank's share, fp32; ``None`` if the P shard itself holds them, which requires that
            P is fp32 and travels without loss.
        visiting: Memory of the device for a P shard that lives on the host, while it gets new values and spreads them;
            ``None`` if it lives on the device, or gets none.
        stored: The P shard, if it is kept encoded.
        staged: Masters that live on the host, while they are on the device for their update; ``None`` otherwise.
        narrows: Whether parameters of it had a wider dtype than its P shard, and no master that would keep it.
        gathered: Whether the buffer is gathered before it is used.
    """

    layout: FlatLayout
    parameters: list[nn.Parameter]
    full: torch.Tensor
    shard: torch.Tensor
    shares: tuple[tuple[Run, ...], ...]
    secondary: torch.Tensor | None
    master: torch.Tensor | None = None
    visiting: torch.Tensor | None = None
    stored: StoredShard | None = None
    staged: torch.Tensor | None = None
    narrows: bool = False

    def __post_init__(self) -> None:
        self._views = [self.full[slot.offset : slot.offset + slot.numel].view(slot.shape) for slot in self.layout.slots]
        self._poison = self.full.new_full((), float("nan") if self.full.is_floating_point() else 0)
        # A husk of one element does not refuse writes: it has memory of its own, which is poisoned again.
        self._single_husks = [self._poison.clone().expand(slot.shape) for slot in self.layout.slots if slot.numel == 1]
        singles = iter(self._single_husks)
        self._husks = [
            next(singles) if slot.numel == 1 else self._poison.expand(slot.shape) for slot in self.layout.slots
        ]
        self._plain = [parameter for parameter in self.parameters if is_plain(parameter)]
        self._kinds = [type(parameter) for parameter in self._plain]
        self._storage, self._nbytes = self.full.untyped_storage(), self.full.nbytes
        self.gathered = self.shard is not self.full
        self._master_runs: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self.visits = False  # whether there is memory for ``visiting``
        if self.visiting is not None:
            self.visiting.untyped_storage().resize_(0)

    def train(self, shares: tuple[tuple[Run, ...], ...], share: int, *, apart: bool) -> None:
        """Give a buffer of frozen parameters masters, which begin with the values of the P shard, and have memory of
        their own if ``apart``. ``share`` is the position of this rank along the shard axis."""
        self.layout, self.shares, self.narrows = replace(self.layout, trainable=True), shares, False
        if apart:
            runs = [self.shard[run.start : run.start + run.length] for run in shares[share]]
            self.master = torch.cat([self.shard[:0], *runs]).to(torch.float32, copy=True)

    def values(self, run: Run) -> torch.Tensor:
        """Values of a run of the P shard that begins where a parameter does, or the shard: a view, or a copy if the
        shard is kept encoded."""
        return self.shard[run.start : run.start + run.length] if self.stored is None else self.stored.read(run)

    def put(self, run: Run, values: torch.Tensor) -> None:
        """Replace the values of a run that is a frozen parameter's."""
        if self.stored is None:
            self.shard[run.start : run.start + run.length].copy_(values)
        else:
            self.stored.write(run, values)

    @property
    def named(self) -> Iterator[tuple[Slot, nn.Parameter]]:
        """The parameters of the modules, with their slots."""
        return zip(self.layout.slots, self.parameters, strict=True)

    @property
    def written(self) -> torch.Tensor:
        """The P shard on the device, where it gets new values."""
        return self.shard if self.visiting is None else self.visiting

    def visit(self) -> bool:
        """Allocate the memory in which a P shard that lives on the host gets new values; returns whether it was."""
        if self.visiting is None or self.visits:
            return False
        self.visiting.untyped_storage().resize_(self.visiting.nbytes)
        self.visiting.zero_()  # nobody owns what fills it up
        self.visits = True
        return True

    def leave(self) -> None:
        """Free that memory."""
        if self.visiting is not None and self.visits:
            self.visiting.untyped_storage().resize_(0)
            self.visits = False

    @property
    def masters_on_device(self) -> torch.Tensor | None:
        """The masters, or a copy of them, on the device; ``None`` if the P shard holds them."""
        if self.staged is not None or self.master is None:
            return self.staged
        return self.master.to(self.full.device)

    def master_runs(self, position: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Views of the elements of the P shard that masters of this rank belong to, and views of these masters; none if
        the P shard itself holds them. ``position`` is that of this rank along the shard axis."""
        if self.staged is not None:
            return self._runs_of(position, self.staged)
        if position not in self._master_runs:
            self._master_runs[position] = self._runs_of(position, self.master)
        return self._master_runs[position]

    def _runs_of(self, position: int, master: torch.Tensor | None) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        if master is None:
            return [], []
        runs = self.shares[position]
        of_shard = [self.written[run.start : run.start + run.length] for run in runs]
        return of_shard, list(master.split([run.length for run in runs]))

    def restore(self) -> None:
        """Allocate the gathered storage; its contents are undefined until the unit is gathered."""
        if self.gathered:
            self._storage.resize_(self._nbytes)

    def release(self) -> None:
        """Free the gathered storage.

        Raises:
            UsageError: It has been given to numpy, which keeps it for good.
        """
        if not self.gathered:
            return
        try:
            self._storage.resize_(0)
        except RuntimeError as error:
            if self._storage.resizable():
                raise
            names = ", ".join(slot.name for slot in self.layout.slots)
            raise UsageError(
                f"one of {names} was given to numpy() while it was gathered, so its memory cannot be freed: give "
                "numpy() a copy, parameter.detach().clone()"
            ) from error

    def show(self, *, whole: bool) -> None:
        """Point the module's parameters at the gathered buffer, or at husks."""
        if whole or not self.gathered:
            for parameter, kind in zip(self._plain, self._kinds, strict=True):
                parameter.__class__ = kind
            set_local(self.parameters, self._views)
            return
        for husk in self._single_husks:
            husk.copy_(self._poison)
        set_local(self.parameters, self._husks)
        for parameter in self._plain:
            parameter.__class__ = UnreadyParameter

    def moved(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """The parameters, shown whole, that are elsewhere than in the buffer because their ``data`` was assigned; each
        with its place in the buffer."""
        # Not a function for each of them: nearly all are plain, and every step asks.
        return [
            (p, view)
            for p, view in zip(self.parameters, self._views, strict=True)
            if (p if type(p) is nn.Parameter else local_tensor(p)).data_ptr() != view.data_ptr()
        ]

    def replaced(self) -> bool:
        """Whether parameters, shown whole, were assigned other values. Equal ones are no write: ``flatten_parameters``
        of a recurrent layer puts its weights side by side."""
        pairs = [(local_tensor(p.detach()), view) for p, view in self.moved()]
        return not all(value.dtype == view.dtype and torch.equal(value, view) for value, view in pairs)

    def mark(self, *, ready: bool) -> None:
        """Say whether the module's parameters can be computed with as they are."""
        for parameter, kind in zip(self._plain, self._kinds, strict=True):
            parameter.__class__ = kind if ready else UnreadyParameter


def set_local(parameters: Sequence[nn.Parameter], values: Sequence[torch.Tensor]) -> None:
    """Re-point parameters at other memory. No other code does this."""
    for parameter, value in zip(parameters, values, strict=True):
        if type(parameter) is not nn.Parameter and isinstance(parameter, DTensor):
            parameter._local_tensor = value
        else:
            parameter.data = value
