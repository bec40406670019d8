"""Hybrid GPU compression (arXiv 2409.02423): GPT-NeoX-20B on 192 V100s of Lassen, gains over MVAPICH2-GDR and NCCL."""

from __future__ import annotations

import re
from collections.abc import Sequence

from thinwire.sim import Answer, Case
from thinwire_bench.published.calibration import PublishedRow


def is_gain(row: PublishedRow) -> bool:
    """Gains in samples/s and in TFLOPS, which should be the same and are not: the simulator gives both one figure."""
    return row.source.startswith("Hybrid")


def cases(row: PublishedRow) -> list[Case]:
    """The compressed step, and what it is compared with. The schemes run on MVAPICH."""
    scheme, _, rest = row.system.partition(" vs ")
    base = "nccl" if rest.startswith("NCCL") else "mvapich"
    return [_case(row, "mvapich", _policy(scheme)), _case(row, base, None)]


def _case(row: PublishedRow, engine: str, policy: str | None) -> Case:
    ran = {"engine": engine, "plan": "zero1", "wire": policy}
    return row.case("gpt-neox-20b", "v100-16g", seq=2048, recompute=True, tp=4, pp=6, dtype="float16", **ran)


def _policy(scheme: str) -> str:
    """The policy of a scheme in the paper's words."""
    if match := re.fullmatch(r"naive ZFP rate (\d+)", scheme):
        return f"naive-zfp:{match[1]}"
    if match := re.fullmatch(r"MZHybrid ZFP rate (\d+)", scheme):
        return f"mzhybrid:{match[1]}"
    match = re.fullmatch(r"ZHybrid MP(\d+)/DP(\d+)", scheme)
    assert match is not None, f"{scheme} is no scheme of the paper"
    return f"zhybrid:{match[1]}-{match[2]}"


def gain(_row: PublishedRow, answers: Sequence[Answer]) -> float:
    """Percent of throughput."""
    compressed, base = answers
    return 100 * (base.simulated.seconds / compressed.simulated.seconds - 1)
