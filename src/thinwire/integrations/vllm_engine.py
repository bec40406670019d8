"""The engine of vLLM's weight transfer that takes versions from a store. Written against vLLM 0.33."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import Any, ClassVar, final

from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from thinwire.errors import UsageError
from thinwire.weights import Subscriber
from thinwire.weights.files import in_files

log = logging.getLogger("thinwire")

_INTERVAL = 0.2
"""Seconds from one look at the store to the next."""


@final
@dataclass
class InitInfo(WeightTransferInitInfo):
    """What ``init_weight_transfer_engine`` says.

    Attributes:
        store: Where the trainer publishes, as seen from the workers.
        keys: Directory of keys that ``thinwire serve-weights`` asks for.
    """

    store: str
    keys: str | None = None


@final
@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """What ``update_weights`` says.

    Attributes:
        version: The version to load, the same on all workers: ``publisher.version`` of the trainer.
        timeout: Longest wait for it, in seconds.
    """

    version: int
    timeout: float = 300.0


@final
class ThinwireEngine(WeightTransferEngine):
    """Every worker follows the store, and holds all weights on the host. It reads new versions while it generates, and
    applies and loads one when it is told to; the model is touched only once the version is there as a whole."""

    init_info_cls: ClassVar[type] = InitInfo
    update_info_cls: ClassVar[type] = UpdateInfo

    _subscriber: Subscriber | None = None
    _ended: threading.Event

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Begin to follow a store."""
        self.shutdown()
        self._subscriber, self._ended = Subscriber(init_info.store, keys=init_info.keys), threading.Event()
        reader = threading.Thread(target=_read_ahead, args=(self._subscriber, self._ended), daemon=True)
        reader.start()

    def start_weight_update(self) -> None:
        """Nothing: the version is taken first, so that a model is not left half loaded where it does not arrive."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Take a version, and load it.

        Raises:
            UsageError: It has not come in time, or the engine follows nothing.
        """
        subscriber, version = self._subscriber, update_info.version
        if subscriber is None:
            raise UsageError("update_weights: this engine follows no store: call init_weight_transfer_engine first")
        deadline = time.monotonic() + update_info.timeout
        subscriber.update(version, fetched=True)
        while subscriber.version != version:
            left = deadline - time.monotonic()
            if left <= 0:
                raise UsageError(
                    f"version = {version} has not come within {update_info.timeout:g} s, and {subscriber.version} is "
                    "held: name one that publisher.version has said, and no older one"
                )
            subscriber.follow(left, upto=version, interval=_INTERVAL)
        subscriber.load_by(self._load)

    def finish_weight_update(self) -> None:
        """Nothing: the model is loaded."""

    def shutdown(self) -> None:
        """Follow no store any more."""
        if self._subscriber is not None:
            self._ended.set()
            self._subscriber = None

    def _load(self, weights: Any) -> None:
        of_files = in_files(dict(weights), self.model_config.hf_config)
        initialize_layerwise_reload(self.model)
        self.model.load_weights(of_files.items())
        finalize_layerwise_reload(self.model, self.model_config)


def _read_ahead(subscriber: Subscriber, ended: threading.Event) -> None:
    said = ""
    while not ended.wait(_INTERVAL):
        try:
            subscriber.fetch()
        except OSError as error:
            if str(error) != said:
                log.warning("%s", error)
            said = str(error)
