"""``thinwire profile`` on real ranks: a profile of everything a plan needs, resumable, and bounded in time."""

from __future__ import annotations

import gc
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from thinwire.cost import ProfiledRates
from thinwire.plan import TrainingJob, profiled_cluster, search
from thinwire.profile.computing import ModelPiece
from thinwire.profile.exchanging import exchanges
from thinwire.profile.measure import Settings, _few_collections, _Measuring, _Rows
from thinwire.profile.meeting import slowdown
from thinwire.spec import Factor, ModelSpec
from thinwire.spec.profile import ComputeRow, Profile

SHAPE = ModelSpec(name="tiny", layers=2, hidden=64, heads=4, ffn=128, vocab=256, seq=32)


def test_delay_and_factor_are_separated_despite_outliers() -> None:
    alone = [1e-3, 2e-3, 5e-3, 0.02, 0.08]
    points = [(seconds, math.hypot(1.25 * seconds, 4e-3)) for seconds in alone]
    assert slowdown([*points, (1e-3, 0.09), (5e-3, 0.2)]) == pytest.approx((1.25, 4e-3))
    # A transfer is never faster during computation.
    assert slowdown([(seconds, 0.9 * seconds) for seconds in alone]) == (1.0, 0.0)
    # All transfers are short: an outlier does not count.
    assert slowdown([(1e-3, 5e-3), (2e-3, 30e-3), (2e-3, 7e-3)]) == pytest.approx((1.0, 6.7e-3), rel=0.01)


def test_a_transfer_that_outlasts_the_wait_for_the_processor_loses_nothing() -> None:
    """Four processes on two cores behind a link of 200 Mbit/s: seconds alone and beside computation, as measured."""
    measured = [(0.2, 7.7), (1.5, 7.5), (0.8, 7.3), (41.7, 42.5), (0.2, 6.4), (0.2, 7.5), (1.1, 7.3), (168.5, 162.3)]
    assert slowdown(measured) == pytest.approx((1.0, 7.3), rel=0.01)


def test_collections_leave_out_what_is_there_while_a_profile_is_measured() -> None:
    """Of a process that trains afterwards, nothing stays frozen that was not."""
    before = gc.get_freeze_count()
    with _few_collections():
        assert gc.get_freeze_count() > before
    assert (gc.get_freeze_count() == 0) == (before == 0)


def test_what_is_left_to_measure_differs_in_any_dimension_or_in_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[ModelPiece] = []
    module = sys.modules[_Measuring.__module__]
    monkeypatch.setattr(module, "measure_model", lambda pieces, *_, **__: asked.extend(pieces) or [])
    shapes = [SHAPE, *(SHAPE.with_(**{key: 32}) for key in ("hidden", "ffn", "vocab")), SHAPE.with_(kv_heads=2)]
    cpu = torch.device("cpu")
    pieces = [ModelPiece("block", shape, 32, 1, "bfloat16", 1, mock.Mock()) for shape in shapes]
    key = {name: getattr(SHAPE, name) for name in ("hidden", "ffn", "heads", "kv_heads", "vocab")}
    row = ComputeRow(part="block", seq=32, micro_batch=1, dtype="bfloat16", forward=1.0, backward=1.0, flops=1.0, **key)
    settings = Settings(Factor(), cpu, 1.0, pieces, 1 << 30)
    rows = _Rows(compute=(row,))
    _Measuring(settings, mock.Mock(rank=0), rows, mock.Mock()).compute(mock.Mock(left=lambda: 1.0))
    assert [piece.shape for piece in asked] == shapes[1:]


def test_shapes_are_those_that_plans_use() -> None:
    exchanged = list(exchanges(Factor(local=4, nodes=6)))
    shapes = {(what.local, what.nodes) for what in exchanged if what.kind == "all_gather" and what.groups == "all"}
    assert shapes == {(a, b) for a in (1, 2, 4) for b in (1, 2, 3, 6)} - {(1, 1)}
    assert {what.kind for what in exchanged} == {
        "all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "send",
    }  # fmt: skip
    assert len(set(exchanged)) == len(exchanged)


def profile(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Four ranks as two nodes."""
    model = out.with_name("model.toml")
    SHAPE.save(model)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4",
        "-m", "thinwire.cli.main", "profile", "--out", str(out), "--nodes", "2",
        "--model", str(model), "--seq", "32", "--json", *options,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.timeout(240)
@pytest.mark.slow
def test_four_ranks_measure_what_plans_need(tmp_path: Path) -> None:
    """Any budget covers all measurements that are needed to price a plan."""
    out = tmp_path / "profile.json"
    begin = time.monotonic()
    result = profile(out, "--budget", "1s", "--plot", str(tmp_path / "bandwidth.png"))
    assert result.returncode == 0, result.stderr
    assert time.monotonic() - begin < 100
    measured = Profile.read(out)
    assert json.loads(result.stdout)["nodes"] == measured.nodes == 2
    assert {row.part for row in measured.compute} == {"block", "head", "embedding"}
    hops = {(row.kind, row.local, row.nodes) for row in measured.collectives}
    assert {(kind, *shape) for kind in ("all_gather", "reduce_scatter") for shape in ((2, 1), (1, 2))} <= hops
    assert all(row.low <= row.seconds <= row.high for row in measured.collectives)
    for shape in ((2, 1), (1, 2)):
        sizes = [row.sent for row in measured.collectives if (row.kind, row.local, row.nodes) == ("all_gather", *shape)]
        assert len(sizes) >= 3  # latency and bandwidth follow from no single one
    assert {(row.scope, row.hidden) for row in measured.overlap} == {("inside", 64), ("across", 64)}
    assert all(row.delay is not None for row in measured.overlap)
    assert all(row.processor > 0 for row in measured.collectives)
    assert all(0 < measured.handling.to_dict()[stage] < 0.1 for stage in ("step", "reduce", "gather"))
    assert (tmp_path / "bandwidth.png").stat().st_size > 10_000
    rates = ProfiledRates(measured, SHAPE, "bfloat16")
    assert search(TrainingJob(SHAPE, profiled_cluster(measured), 4 * 32, 32, rates=rates, overhead=0)).candidates


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_what_other_frameworks_do_is_measured_when_asked_for(tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    result = profile(out, "--budget", "1s", "--library")
    assert result.returncode == 0, result.stderr
    measured = Profile.read(out)
    shapes = {(2, 2), (2, 1), (1, 2)}
    kinds = {"all_gather", "reduce_scatter", "all_reduce"}
    assert {(row.kind, row.local, row.nodes) for row in measured.library} == {(k, *s) for k in kinds for s in shapes}
    whole = [row for row in measured.library if (row.kind, row.local, row.nodes) == ("all_reduce", 2, 2)]
    assert sorted(row.sent for row in whole)[:2] == [2 * 3 * (1 << 16) // 4, 2 * 3 * (1 << 20) // 4]
    assert all(0 < row.plain < 3 and row.plain != 1 for row in measured.compute)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_an_interrupted_measurement_resumes(tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    assert profile(out, "--budget", "4s").returncode == 0
    first = Profile.read(out)
    assert profile(out, "--budget", "8s", "--resume").returncode == 0
    more = Profile.read(out)
    assert more.collectives[: len(first.collectives)] == first.collectives
    assert more.compute == first.compute
    assert len(more.collectives) + len(more.codecs) > len(first.collectives) + len(first.codecs)


@pytest.mark.slow
def test_a_single_process_is_refused_with_the_command_for_more(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "thinwire.cli.main", "profile", "--out", str(tmp_path / "p.json")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "start it with torchrun" in result.stderr
