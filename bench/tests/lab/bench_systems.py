"""Systems without a model, for tests of the controller; built on ranks by name."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from typing import Any, final

from thinwire_bench.peers.interface import Place, System


@final
class Scripted(System):
    """Steps that sleep, fail or die as their options say."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def step(self, options: Mapping[str, Any]) -> float:
        if options.get("rank") in (None, self._place.rank):
            if options.get("die"):
                os.kill(os.getpid(), signal.SIGKILL)
            if options.get("fail"):
                raise ValueError("the weather is bad")
            time.sleep(options.get("sleep", 0.0))
        return float(self._place.rank)

    def waited(self) -> dict[str, float]:
        return {"lane": 0.5}


def scripted(place: Place, options: Mapping[str, Any]) -> System:
    """A system that obeys the options of its turns."""
    if options.get("broken") == place.rank:
        raise ValueError("cannot be built")
    return Scripted(place)
