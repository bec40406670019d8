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
from typing import Any, Final

import torch

from thinwire.agreement import Typed
from thinwire.collectives.group import control
from thinwire_bench.peers.interface import Place, System
from thinwire_bench.peers.pytorch import Autocast
from thinwire_bench.peers.system import TorchSystem, fused_adamw
from thinwire_bench.peers.workload import batches, make_model

_ADDRESS: Final[Typed[str | None]] = Typed(str | None)

_PATIENCE = datetime.timedelta(hours=1)
"""How long an island waits for another, and how long one without a heartbeat stays a member: a benchmark's ranks are
stopped while others have their turn."""


_OUTER: Final[Mapping[str, Any]] = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
"""Settings of DiLoCo's outer SGD, as in the paper."""


def diloco(place: Place, options: Mapping[str, Any]) -> System:
    """torchft's DiLoCo. ``options`` name ``every``, the steps from one exchange to the next."""
    from torchft.local_sgd import DiLoCo

    model = make_model(options)
    inner, outer = fused_adamw(model.parameters()), torch.optim.SGD(model.parameters(), **_OUTER)
    # Its hooks stay as long as the optimizer does. One bucket holds the whole model: with several, torchft 0.2 writes
    # the last one's means into all, and its default, a message for each parameter, takes longer.
    DiLoCo(
        _manager(place), [model], inner, outer, sync_every=options["every"], use_bucketization=True
    ).__enter__()  # fmt: skip
    return TorchSystem(Autocast(model), inner, batches(options, place.rank))


def local_sgd(place: Place, options: Mapping[str, Any]) -> System:
    """torchft's LocalSGD. ``options`` name ``every``, the steps from one exchange to the next."""
    from torchft.local_sgd import LocalSGD

    model = make_model(options)
    inner = fused_adamw(model.parameters())
    LocalSGD(_manager(place), model, inner, sync_every=options["every"]).__enter__()
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
