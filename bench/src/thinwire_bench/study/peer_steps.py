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
from thinwire_bench.peers.catalog import MODELS, REFERENCE, TINY

__all__ = ["PEERS", "PeerPair", "bases", "compared", "sheets_of"]

PEERS: Final[Mapping[str, str]] = {"fsdp2": "fsdp2", "hsdp": "hsdp", "hpz": "fsdp2", "deepspeed1": "deepspeed",
                                   "deepspeed2": "deepspeed", "deepspeed3": "deepspeed"}  # fmt: skip
"""Framework of ``thinwire plan --emit`` by the peer of ``thinwire bench step``."""

_BASES: Final[Mapping[str, str]] = {"fsdp2": "fsdp2", "hsdp": "fsdp2", "hpz": "fsdp2", "deepspeed1": "deepspeed1",
                                    "deepspeed2": "deepspeed2", "deepspeed3": "deepspeed3"}  # fmt: skip
"""The peer whose processes without a model stand for those of a peer."""

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
        measured_bytes: Peak resident memory of any rank, without what its allocator keeps for later.
        resident_bytes: The same with it.
    """

    model: str
    bandwidth: str
    peer: str
    pace: float
    predicted_ms: float
    measured_ms: float
    predicted_bytes: int
    measured_bytes: int
    resident_bytes: int

    @property
    def error(self) -> float:
        """Predicted over measured milliseconds, less 1."""
        return self.predicted_ms / self.measured_ms - 1

    @property
    def memory_error(self) -> float:
        """Predicted over measured bytes, less 1."""
        return self.predicted_bytes / self.measured_bytes - 1


def bases(peers: Sequence[str]) -> list[str]:
    """The peers that have to run without a model, for the memory of these ones to be predicted."""
    return list(dict.fromkeys(_BASES[peer] for peer in peers if peer in _BASES))


def compared(results: Sequence[Path]) -> list[PeerPair]:
    """Predict the steps of results of ``thinwire bench step --profiles``, without clipping.

    Args:
        results: The results; the profiles of their links lie beside each.

    Raises:
        UsageError: A file is missing, or has no peer that can be predicted.
    """
    pairs = []
    for path in results:
        try:
            content: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            found = list(_pairs(content["workload"], content["rows"], path.parent))
        except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
            raise UsageError(
                f"{path} should be what thinwire bench step --profiles DIR --json DIR/step.json wrote, with the "
                f"profiles beside it: {type(error).__name__} {error}"
            ) from error
        if not found:
            raise UsageError(f"{path} has none of the peers {', '.join(PEERS)}, or no step without clipping")
        pairs += found
    return pairs


def _pairs(workload: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], profiles: Path) -> Iterator[PeerPair]:
    mesh = Factor(local=workload["ranks"], nodes=workload["nodes"])
    name, seq = workload["model"], workload["seq"]
    shape = _shape(name, MODELS[name], seq)
    unclipped = [row for row in rows if row["clip"] is None]
    for link in dict.fromkeys(row["bandwidth"] for row in unclipped):
        here = {row["system"]: row for row in unclipped if row["bandwidth"] == link}
        alone = json.loads((profiles / f"alone-{link}.json").read_text(encoding="utf-8"))[name]
        pace = here[REFERENCE]["step_ms"] / alone
        profile = Profile.read(profiles / f"profile-{link}.json").paced(pace, transfers=link == "none")
        for peer, framework in PEERS.items():
            if peer not in here:
                continue
            row, base = here[peer], here[f"base:{_BASES[peer]}"]
            plan = _sharding(peer, mesh)
            guess = predicted(
                _job(shape, mesh, seq, profile, _base(base["needed_rss"], mesh, seq, profile)), framework, plan
            )
            yield PeerPair(
                model=name,
                bandwidth=link,
                peer=peer,
                pace=pace,
                predicted_ms=1e3 * guess.seconds,
                measured_ms=row["step_ms"],
                predicted_bytes=guess.memory.total,
                measured_bytes=row["needed_rss"],
                resident_bytes=row["peak_rss"],
            )


def _shape(name: str, fields: Mapping[str, int], seq: int) -> ModelSpec:
    return ModelSpec.parse({"name": name, "seq": seq, **fields}, f"model {name!r}")


def _base(measured: int, mesh: Factor, seq: int, profile: Profile) -> int:
    """Bytes of a process without a model: those of one with a model of no weight, less this model's own."""
    plan = _sharding("fsdp2", mesh)
    tiny = predicted(_job(_shape("tiny", TINY, seq), mesh, seq, profile, 0), "fsdp2", plan)
    return int(measured) - tiny.memory.total


def _job(shape: ModelSpec, mesh: Factor, seq: int, profile: Profile, overhead: int) -> TrainingJob:
    return TrainingJob(
        shape,
        profiled_cluster(profile).with_(memory=_ROOM),
        mesh.ranks * seq,
        seq,
        micro_batch=1,
        recompute=False,
        clip=False,
        rates=ProfiledRates(profile, shape, "bfloat16"),
        overhead=overhead,
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
    columns = [
        "model", "link", "peer", "pace", "predicted ms", "measured ms", "error", "MiB", "measured", "error", "resident",
    ]  # fmt: skip
    cells = [
        [
            pair.model, pair.bandwidth, pair.peer, f"{pair.pace:.2f}", f"{pair.predicted_ms:.0f}",
            f"{pair.measured_ms:.0f}", f"{pair.error:+.1%}", f"{pair.predicted_bytes / 2**20:.0f}",
            f"{pair.measured_bytes / 2**20:.0f}", f"{pair.memory_error:+.1%}", f"{pair.resident_bytes / 2**20:.0f}",
        ]
        for pair in pairs
    ]  # fmt: skip
    groups = dict.fromkeys((pair.model, pair.bandwidth) for pair in pairs)
    means = [
        [*group, *_means([pair for pair in pairs if (pair.model, pair.bandwidth) == group])] for group in groups
    ]  # fmt: skip
    return [
        Sheet("Steps of other frameworks, predicted and measured", columns, 3, cells),
        Sheet(
            "Mean errors",
            ["model", "link", "step", "goal", "memory", "goal"],
            2,
            [*means, ["all", "all", *_means(pairs)]],
        ),
    ]


def _means(pairs: Sequence[PeerPair]) -> list[str]:
    step = statistics.fmean(abs(pair.error) for pair in pairs)
    memory = statistics.fmean(abs(pair.memory_error) for pair in pairs)
    return [f"{step:.1%}", "10%", f"{memory:.1%}", "5%"]
