"""A loss law, and a job on slow links."""

from __future__ import annotations

from typing import Any

from thinwire.cost import NominalRates
from thinwire.plan import LossLaw, TrainingJob
from thinwire.spec import ClusterSpec, ModelSpec

SMALL = ModelSpec(name="small", layers=4, hidden=1024, heads=8, vocab=8192, seq=1024)

LAW = LossLaw.parse(
    {
        "parameters": 100_000,
        "tokens": 4_000_000,
        "trunk": 3_000_000,
        "tokens_per_step": 8192,
        "seeds": 5,
        "islands": [2, 8],
        "every": [8, 128],
        "base": -0.3,
        "slope": 0.2,
        "left_out": 0.05,
        "ways": [
            {"name": "exact", "islands": {}, "percent": 0.0},
            {"name": "4bit", "islands": {"codec": "int4:256", "error_feedback": True}, "percent": 0.1},
            {
                "name": "streaming",
                "islands": {
                    "codec": "int4:256", "error_feedback": True, "fragments": 4, "delay": 5, "blend": 0.5,
                },
                "percent": 0.2,
            },
        ],
    }
)  # fmt: skip


def job(cluster: str = "a100-80g:4x2", gbps: float = 0.05, **rest: Any) -> TrainingJob:
    machine = ClusterSpec.named(cluster)
    machine = machine.with_(links=machine.links.with_(nic=machine.links.nic.with_(bandwidth=gbps * 1e9)))
    return TrainingJob(SMALL, machine, 2 * 1024 * machine.gpus, 1024, rates=NominalRates(machine), **rest)
