"""Compares predicted steps and memory of other frameworks with those that ``thinwire bench step`` measured."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from thinwire.cost import ProfiledRates
from thinwire.errors import UsageError
from thinwire.plan import TrainingJob, predicted, profiled_cluster
from thinwire.report import Sheet
from thinwire.spec import Factor, ModelSpec, Plan
from thinwire.spec.profile import Profile
from thinwire_bench.peers.catalog import MODELS, REFERENCE

__all__ = ["PEERS", "PeerPair", "compared", "sheets_of"]

PEERS: Final[Mapping[str, str]] = {"fsdp2": "fsdp2", "hsdp": "hsdp", "hpz": "fsdp2", "deepspeed1": "deepspeed",
                                   "deepspeed2": "deepspeed", "deepspeed3": "deepspeed"}  # fmt: skip
"""Framework of ``thinwire plan --emit`` by the peer of ``thinwire bench step``."""

_ROOM: Final = 1 << 40
"""Bytes of memory: every configuration fits."""


@dataclass(frozen=True)
class PeerPair:
    """A step of another framework, predicted and measured.

    Attributes:
        model: Name of the model.
        bandwidth: Bandwidth of the links, as the user wrote it.
        peer: Name of the peer.
        pace: Factor by which its ranks computed slower than when the profile was measured.
        predicted_ms: Predicted milliseconds, at that pace.
        measured_ms: Measured milliseconds, median.
        predicted_bytes: Predicted memory of a rank.
        measured_bytes: Peak resident memory of any rank.
    """

    model: str
    bandwidth: str
    peer: str
    pace: float
    predicted_ms: float
    measured_ms: float
    predicted_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        """Predicted over measured milliseconds, less 1."""
        return self.predicted_ms / self.measured_ms - 1

    @property
    def memory_error(self) -> float:
        """Predicted over measured bytes, less 1."""
        return self.predicted_bytes / self.measured_bytes - 1


def compared(results: Path, profiles: Path) -> list[PeerPair]:
    """Predict the steps of a result of ``thinwire bench step``, without clipping.

    Args:
        results: The result.
        profiles: Directory with the profiles of ``thinwire bench planner`` for the same links and model.

    Raises:
        UsageError: A file is missing, or has no peer that can be predicted.
    """
    try:
        content: Mapping[str, Any] = json.loads(results.read_text(encoding="utf-8"))
        pairs = list(_pairs(content["workload"], content["rows"], profiles))
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise UsageError(
            f"{results} and {profiles} should be what thinwire bench step --json and thinwire bench planner --profiles "
            f"wrote: {type(error).__name__} {error}"
        ) from error
    if not pairs:
        raise UsageError(f"{results} has none of the peers {', '.join(PEERS)}, or no step without clipping")
    return pairs


def _pairs(workload: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], profiles: Path) -> Iterator[PeerPair]:
    mesh = Factor(local=workload["ranks"], nodes=workload["nodes"])
    name, seq = workload["model"], workload["seq"]
    shape = ModelSpec.parse({"name": name, "seq": seq, **MODELS[name]}, f"model {name!r}")
    unclipped = [row for row in rows if row["clip"] is None]
    for link in dict.fromkeys(row["bandwidth"] for row in unclipped):
        here = {row["system"]: row for row in unclipped if row["bandwidth"] == link}
        alone = json.loads((profiles / f"alone-{link}.json").read_text(encoding="utf-8"))[name]
        pace = here[REFERENCE]["step_ms"] / alone
        profile = Profile.read(profiles / f"profile-{link}.json").paced(pace, transfers=link == "none")
        job = _job(shape, mesh, seq, profile)
        for peer, framework in PEERS.items():
            if peer not in here:
                continue
            guess = predicted(job, framework, _sharding(peer, mesh))
            row = here[peer]
            milliseconds, held = 1e3 * guess.seconds, guess.memory.total
            yield PeerPair(name, link, peer, pace, milliseconds, row["step_ms"], held, row["peak_rss"])


def _job(shape: ModelSpec, mesh: Factor, seq: int, profile: Profile) -> TrainingJob:
    return TrainingJob(
        shape,
        profiled_cluster(profile).with_(memory=_ROOM),
        mesh.ranks * seq,
        seq,
        micro_batch=1,
        recompute=False,
        clip=False,
        rates=ProfiledRates(profile, shape, "bfloat16"),
        overhead=profile.base_memory,
    )


def _sharding(peer: str, mesh: Factor) -> Plan:
    """What a peer of the bench shards, as a plan."""
    one, node = Factor(), Factor(local=mesh.local)
    cuts = {
        "fsdp2": (mesh, mesh, mesh),
        "hpz": (mesh, mesh, mesh),
        "hsdp": (node, node, node),
        "deepspeed1": (one, one, mesh),
        "deepspeed2": (one, mesh, mesh),
        "deepspeed3": (mesh, mesh, mesh),
    }
    params, grads, optimizer = cuts[peer]
    secondary = node if peer == "hpz" else None
    return Plan(name=peer, mesh=mesh, params=params, grads=grads, optimizer=optimizer, secondary=secondary)


def sheets_of(pairs: Sequence[PeerPair]) -> list[Sheet]:
    """Every pair, and the mean errors."""
    columns = ["model", "link", "peer", "pace", "predicted ms", "measured ms", "error", "MiB", "measured", "error"]
    cells = [
        [
            pair.model, pair.bandwidth, pair.peer, f"{pair.pace:.2f}", f"{pair.predicted_ms:.0f}",
            f"{pair.measured_ms:.0f}", f"{pair.error:+.1%}", f"{pair.predicted_bytes / 2**20:.0f}",
            f"{pair.measured_bytes / 2**20:.0f}", f"{pair.memory_error:+.1%}",
        ]
        for pair in pairs
    ]  # fmt: skip
    links = dict.fromkeys(pair.bandwidth for pair in pairs)
    means = [
        [link, *_means([pair for pair in pairs if pair.bandwidth == link])] for link in links
    ]  # fmt: skip
    return [
        Sheet("Steps of other frameworks, predicted and measured", columns, 3, cells),
        Sheet("Mean errors", ["link", "step", "goal", "memory", "goal"], 1, [*means, ["all", *_means(pairs)]]),
    ]


def _means(pairs: Sequence[PeerPair]) -> list[str]:
    step = statistics.fmean(abs(pair.error) for pair in pairs)
    memory = statistics.fmean(abs(pair.memory_error) for pair in pairs)
    return [f"{step:.1%}", "10%", f"{memory:.1%}", "5%"]
