"""Islands of torchft: its DiLoCo and LocalSGD, an island for each rank, over gloo.

Every island is a replica group of one rank with a store and a manager of its own; a lighthouse on rank 0 forms the
quorum. As in torchft's examples, the inner optimizer's step counts, and exchanges when it is time. torchft quantises on
CUDA alone: here it sends fp32.
"""

from __future__ import annotations

import datetime
import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from thinwire.agreement import Typed
from thinwire.collectives.group import control
from thinwire_bench.peers.fragments import fragments_of
from thinwire_bench.peers.interface import Place, System
from thinwire_bench.peers.pytorch import Autocast
from thinwire_bench.peers.system import TorchSystem, fused_adamw
from thinwire_bench.peers.workload import batches, make_model

__all__ = ["OuterSettings", "diloco", "join", "local_sgd", "take_the_mean"]

_ADDRESS: Final[Typed[str | None]] = Typed(str | None)

_PATIENCE = datetime.timedelta(hours=1)
"""How long an island waits for another, and how long one without a heartbeat stays a member: a benchmark's ranks are
stopped while others have their turn."""


@dataclass(frozen=True)
class OuterSettings:
    """When and how torchft's islands exchange their parameters.

    Attributes:
        algorithm: ``diloco``, whose outer optimizer makes a step of the mean change, or ``local-sgd``, which takes the
            mean of parameters.
        every: Inner steps from one exchange of a parameter to the next.
        fragments: Parts of the model that are exchanged at different steps (``diloco``).
        delay: Inner steps that an exchange may stay under way (``diloco``).
        blend: Share of an island's own value that it keeps when an exchange arrives (``diloco``).
        outer_lr: Learning rate of the outer SGD (``diloco``).
        outer_momentum: Its momentum, Nesterov's if above 0 (``diloco``).
    """

    algorithm: str = "diloco"
    every: int = 32
    fragments: int = 1
    delay: int = 0
    blend: float = 0.0
    outer_lr: float = 0.7
    outer_momentum: float = 0.9


def diloco(place: Place, options: Mapping[str, Any]) -> System:
    """torchft's DiLoCo. ``options`` may name fields of :class:`OuterSettings`."""
    return _islands(place, options, "diloco")


def local_sgd(place: Place, options: Mapping[str, Any]) -> System:
    """torchft's LocalSGD. ``options`` may name ``every``."""
    return _islands(place, options, "local-sgd")


def join(model: nn.Module, inner: torch.optim.Optimizer, settings: OuterSettings, place: Place) -> None:
    """Make a model an island: from now on, steps of its optimizer exchange with the other islands. All ranks call it.

    Args:
        model: The model, with the same parameters on all ranks.
        inner: Its optimizer.
        settings: When and how to exchange.
        place: Place of this rank.
    """
    from torchft.local_sgd import DiLoCo, LocalSGD

    manager = _manager(place)
    if settings.algorithm == "local-sgd":
        LocalSGD(manager, model, inner, sync_every=settings.every).__enter__()
        return
    fragments = fragments_of(model, settings.fragments)
    outer = [
        torch.optim.SGD(
            fragment.parameters(),
            settings.outer_lr,
            momentum=settings.outer_momentum,
            nesterov=settings.outer_momentum > 0,
        )
        for fragment in fragments
    ]
    # Its hooks stay as long as the optimizer does. One bucket holds all of a fragment: with several, torchft 0.2 writes
    # the last one's means into all, and its default, a message for each parameter, takes longer.
    DiLoCo(
        manager, fragments, inner, outer,
        sync_every=settings.every, fragment_sync_delay=settings.delay, fragment_update_alpha=settings.blend,
        use_bucketization=True,
    ).__enter__()  # fmt: skip


@torch.no_grad()
def take_the_mean(model: nn.Module) -> None:
    """End a run: all islands take the mean of their parameters. All ranks call it.

    torchft leaves a run as it is after its last step: fragments have met at different steps, or are still under way.
    """
    own = nn.utils.parameters_to_vector(model.parameters())
    mean = control().all_reduce_mean(own.tolist())
    nn.utils.vector_to_parameters(own.new_tensor(mean), model.parameters())


def _islands(place: Place, options: Mapping[str, Any], algorithm: str) -> System:
    model = make_model(options)
    inner = fused_adamw(model.parameters())
    chosen = {name: options[name] for name in OuterSettings.__dataclass_fields__ if name in options}
    join(model, inner, OuterSettings(algorithm, **chosen), place)
    return TorchSystem(Autocast(model), inner, batches(options, place.rank))


def _manager(place: Place) -> Any:
    """This island's manager; all islands know the same lighthouse."""
    logging.disable(logging.WARNING)  # it writes several lines for each exchange
    os.environ.setdefault("RUST_LOG", "error")
    from torchft.coordination import LighthouseServer
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    lighthouse = None
    if place.rank == 0:
        milliseconds = int(1e3 * _PATIENCE.total_seconds())
        lighthouse = LighthouseServer(
            bind="[::]:0", min_replicas=place.world, join_timeout_ms=100, heartbeat_timeout_ms=milliseconds
        )
    address = control().all_gather_typed(None if lighthouse is None else lighthouse.address(), _ADDRESS)[0]
    host = socket.gethostname()
    store = torch.distributed.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    made = Manager(
        pg=ProcessGroupGloo(timeout=_PATIENCE),
        load_state_dict=_no_state,
        state_dict=dict,
        min_replica_size=place.world,
        use_async_quorum=False,
        timeout=_PATIENCE,
        quorum_timeout=_PATIENCE,
        rank=0,
        world_size=1,
        store_addr=host,
        store_port=store.port,
        lighthouse_addr=address,
        replica_id=f"island-{place.rank}",
        hostname=host,
        init_sync=False,  # all islands start from the same weights
    )
    _kept.append((lighthouse, store))
    return made


_kept: list[object] = []
"""Servers of this rank, which live as long as it does."""


def _no_state(state: object) -> None:
    """Nothing to load: no island joins later."""
    del state
