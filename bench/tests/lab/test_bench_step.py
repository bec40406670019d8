"""``thinwire bench step`` on an emulated cluster: real ranks, shaped links, one round of a tiny model."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.support.cluster import needs_lab
from tests.support.small import THINWIRE

pytestmark = [needs_lab, pytest.mark.slow]


def bench_step(out: Path, *options: str) -> tuple[dict[str, Any], str]:
    """What the command writes, and what it prints."""
    done = subprocess.run(
        [*THINWIRE, "bench", "step", *options, "--json", str(out)],
        capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text(encoding="utf-8")), done.stdout


def test_one_round_of_two_by_two_ranks(tmp_path: Path) -> None:
    picture = tmp_path / "step.png"
    chosen = ["--plans", "zero1-node", "--peers", "local,ddp", "--bandwidth", "none,1gbit", "--model", "llama-1m"]
    settings = ["--rounds", "1", "--steps", "2", "--png", str(picture)]
    content, printed = bench_step(tmp_path / "step.json", *chosen, *settings)
    assert "best plan / best peer" in printed
    rows = {(row["system"], row["bandwidth"]): row for row in content["rows"]}
    assert set(rows) == {(s, b) for s in ("local", "ddp", "tw:zero1-node") for b in ("none", "1gbit")}
    for (system, bandwidth), row in rows.items():
        assert row["refused"] is None
        assert row["step_ms_min"] <= row["step_ms"] <= row["step_ms_max"]
        assert row["step_ms"] >= 0.9 * row["bound_ms"]
        assert row["tokens_per_second"] == pytest.approx(1e3 * 512 / row["step_ms"])
        assert (row["internode_bytes"] > 1e6) == (system != "local"), (system, bandwidth)
    # Across two nodes, an all-reduce over all ranks sends 1.5 times the gradients, one between nodes just once.
    assert rows["ddp", "none"]["internode_bytes"] > 1.3 * rows["tw:zero1-node", "none"]["internode_bytes"]
    assert rows["ddp", "1gbit"]["loss"] == pytest.approx(rows["tw:zero1-node", "1gbit"]["loss"], rel=0.02)
    assert {len(by_ratio) for by_ratio in content["ratios"].values()} == {0, 2}
    assert content["command"].startswith("thinwire bench step --plans zero1-node")
    assert content["environment"]["versions"]["torch"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_every_system_trains_alike(tmp_path: Path) -> None:
    peers = ["local", "ddp", "zero1", "fsdp2", "hsdp", "hpz"]
    if importlib.util.find_spec("deepspeed"):
        peers += ["deepspeed1", "deepspeed2", "deepspeed3"]
    chosen = ["--plans", "zero1-node,zero1,zero3,hpz", "--peers", ",".join(peers), "--model", "llama-1m"]
    settings = ["--bandwidth", "none", "--clip", "none,1.0", "--rounds", "2"]
    content, _ = bench_step(tmp_path / "step.json", *chosen, *settings)
    losses = [row["loss"] for row in content["rows"] if row["kind"] != "bound"]
    assert len(losses) == 2 * (len(peers) + 3)
    assert max(losses) / min(losses) < 1.01


@pytest.mark.parametrize("plans", [["zeropp", "thinwire"], ["zero3", "hpz", "zero1-node", "zeropp-8bit"]])
def test_links_carry_what_the_program_predicts(tmp_path: Path, plans: list[str]) -> None:
    chosen = ["--plans", ",".join(plans), "--peers", "local", "--model", "llama-5m"]
    settings = ["--bandwidth", "none", "--rounds", "1", "--steps", "2"]
    content, _ = bench_step(tmp_path / "step.json", *chosen, *settings)
    rows = {row["system"]: row for row in content["rows"]}
    assert rows["local"]["predicted_bytes"] is None
    for plan in plans:
        row = rows[f"tw:{plan}"]
        # Headers of Ethernet, IP and TCP, and acknowledgements, are not part of the program.
        assert 1.0 < row["internode_bytes"] / row["predicted_bytes"] < 1.03, plan
