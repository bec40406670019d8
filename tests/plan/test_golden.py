"""Plans and figures of the planner for a dozen jobs, as committed: a faster search or a tighter bound changes none.

Whoever changes prices on purpose writes the file again: ``python -m tests.plan.test_golden``.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.support.paths import GOLDEN

from thinwire.cost import NominalRates
from thinwire.plan import TrainingJob, candidate, search
from thinwire.spec import ClusterSpec, ModelSpec, Plan
from thinwire.spec.profile import Profile

FOLDER = GOLDEN
FILE = FOLDER / "plans.json"

LAB_MODELS: dict[str, dict[str, int]] = {
    "llama-17m": {"vocab": 4096, "hidden": 512, "layers": 4, "heads": 8, "kv_heads": 8, "ffn": 1376},
    "llama-5m": {"vocab": 4096, "hidden": 256, "layers": 4, "heads": 4, "kv_heads": 4, "ffn": 704},
}
"""Models of the profiles that lie beside the file, measured in the lab."""

JOBS: dict[str, dict[str, Any]] = {
    "7b on 4x8": {"model": "llama-7b", "cluster": "a100-80g:4x8", "tokens": 1 << 21, "seq": 2048},
    "7b at 25 Gbit/s": {"model": "llama-7b", "cluster": "a100-80g:4x8", "tokens": 1 << 21, "seq": 2048, "gbps": 25},
    "7b at 5 Gbit/s": {"model": "llama-7b", "cluster": "a100-80g:2x4", "tokens": 1 << 19, "seq": 2048, "gbps": 5},
    "7b lossless": {
        "model": "llama-7b", "cluster": "a100-80g:2x8", "tokens": 1 << 19, "gbps": 10, "codecs": "lossless",
    },
    "13b aggressive": {
        "model": "llama-13b", "cluster": "a100-40g:4x8", "tokens": 1 << 19, "gbps": 25, "codecs": "aggressive",
    },
    "7b of 1024": {"model": "llama-7b", "cluster": "a800-80g:128x8", "tokens": 1 << 22, "seq": 4096},
    "70b in stages": {
        "model": "llama-2-70b", "cluster": "a800-80g:16x8", "tokens": 1 << 22, "tp": None, "pp": None, "micro_batch": 1,
    },
    "13b below leaves": {
        "model": "llama-13b", "cluster": "a800-80g:16x8", "tokens": 1 << 21, "spine": 50, "codecs": "none",
    },
    "13b too large": {"model": "llama-13b", "cluster": "a100-40g:1x4", "tokens": 1 << 17, "recompute": False},
    "405b of a million": {"model": "llama-3-405b", "cluster": "h100-80g:125000x8", "tokens": 8_192_000_000},
    "17m, profiled": {"model": "llama-17m", "profile": "200mbit"},
    "5m, profiled": {"model": "llama-5m", "profile": "1gbit"},
}  # fmt: skip


def job_of(keys: dict[str, Any]) -> TrainingJob:
    """The job that these keys describe."""
    if "profile" in keys:
        measured = Profile.read(FOLDER / f"profile-{keys['profile']}.json")
        shape = ModelSpec.parse({"name": keys["model"], "seq": 128, **LAB_MODELS[keys["model"]]})
        known = {"tokens_per_step": 4 * 128, "compute_dtype": "bfloat16", "margin": 0.0}
        return TrainingJob.of(shape, 128, None, measured, clip=False, **known)
    shape = ModelSpec.named(keys["model"], **({"seq": keys["seq"]} if "seq" in keys else {}))
    cluster = ClusterSpec.named(keys["cluster"])
    links: dict[str, Any] = {}
    if "gbps" in keys:
        links["nic"] = cluster.links.nic.with_(bandwidth=keys["gbps"] * 1e9)
    if "spine" in keys:
        links["spine"] = {"bandwidth": keys["spine"] * 1e9}
        cluster = cluster.with_(leaves=4, links=links)
    elif links:
        cluster = cluster.with_(links=links)
    rest = {name: keys[name] for name in ("codecs", "tp", "pp", "micro_batch", "recompute") if name in keys}
    return TrainingJob(shape, cluster, keys["tokens"], shape.seq, rates=NominalRates(cluster), **rest)


def rows_of(job: TrainingJob) -> list[dict[str, Any]]:
    """The first plans of a search and its classic systems, with their figures."""
    searched = search(job, top=4)
    return [
        {
            "plan": row.plan.model_dump(mode="json", exclude_defaults=True),
            "seconds": row.seconds,
            "bytes": row.memory.total,
            "label": row.label,
        }
        for row in (*searched.candidates[:4], *searched.classics)
    ]


@pytest.mark.parametrize("name", JOBS)
def test_figures_stay(name: str) -> None:
    """Steps and memory of the plans in the file, and that the search still finds a plan as good as the first."""
    rows = json.loads(FILE.read_text(encoding="utf-8"))[name]
    job = job_of(JOBS[name])
    for row in rows:
        priced = candidate(job, Plan.parse(row["plan"]))
        assert priced.seconds == pytest.approx(row["seconds"], rel=1e-9)
        assert priced.memory.total == row["bytes"]


def main() -> None:
    """Write the file again."""
    content = {name: rows_of(job_of(keys)) for name, keys in JOBS.items()}
    FILE.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
