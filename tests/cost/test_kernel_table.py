"""Times of kernels: measured on this machine, read back, and used by the planner."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from thinwire.cli.main import app
from thinwire.cost import NominalRates, parts
from thinwire.cost.kernel_table import TabledKernels
from thinwire.cost.kernels import Kernels
from thinwire.errors import SpecError
from thinwire.plan import TrainingJob, candidate, rests_on
from thinwire.spec import ClusterSpec, ModelSpec, Plan
from thinwire.spec.machines.kernels import KernelRow, KernelTable, this_host

SMALL = ModelSpec(name="tiny", layers=2, hidden=64, heads=4, ffn=128, vocab=256, seq=32)


def row(kernel: str, rows: int, columns: int = 1, depth: int = 1, *, seconds: float, heads: int = 0) -> KernelRow:
    size = {"rows": rows, "columns": columns, "depth": depth, "heads": heads}
    return KernelRow(kernel=kernel, seconds=seconds, low=seconds, high=seconds, **size)


def table(*rows: KernelRow, host: str = "") -> KernelTable:
    every = (*rows, row("elementwise", 1 << 20, seconds=1e-4))
    return KernelTable(device="a test", host=host, torch="2", dtype="bfloat16", rows=every)


def test_a_measured_shape_takes_the_measured_time() -> None:
    kernels = TabledKernels(table(row("matmul", 512, 1024, 256, seconds=0.5)), 1e12, 1e11)
    assert kernels.product(512, 1024, 256) == pytest.approx(0.5)
    plain = Kernels(1e12, 0.8, 1e11, 0.35)
    # One measurement scales the model; between two, the nearer one weighs more.
    assert kernels.product(4096, 1024, 256) / plain.product(4096, 1024, 256) == pytest.approx(
        0.5 / plain.product(512, 1024, 256)
    )
    both = table(row("matmul", 512, 1024, 256, seconds=0.5), row("matmul", 8192, 1024, 256, seconds=0.5))
    near, far = (
        TabledKernels(both, 1e12, 1e11).product(rows, 1024, 256) / plain.product(rows, 1024, 256)
        for rows in (700, 6000)
    )
    assert near > far


def test_what_memory_bounds_follows_a_line_between_sizes() -> None:
    sizes = [(1 << 16, 2e-5), (1 << 20, 1e-4), (1 << 24, 1e-3)]
    rows = [row(kernel, size, seconds=seconds) for kernel in ("update", "copy") for size, seconds in sizes]
    kernels = TabledKernels(table(row("matmul", 512, 1024, 256, seconds=0.5), *rows), 1e12, 1e11)
    for kernel in ("update", "copy"):
        measured = [kernels.per_element(kernel, size) for size, _ in sizes]
        assert measured == pytest.approx([seconds for _, seconds in sizes])
        assert kernels.per_element(kernel, 17 << 19) == pytest.approx((1e-4 + 1e-3) / 2)
        # A launch for the most part, and nothing but bandwidth: sizes that are far away do not count.
        assert kernels.per_element(kernel, 8) == pytest.approx(2e-5)
        assert kernels.per_element(kernel, 1 << 34) == pytest.approx(1.024)
        assert kernels.per_element(kernel, 0) == 0.0
    alone = TabledKernels(table(row("matmul", 512, 1024, 256, seconds=0.5)), 1e12, 1e11)
    assert alone.per_element("update", 100) is None
    assert alone.elementwise(1 << 22) == pytest.approx(4e-4)


def test_a_table_without_products_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="the times of a test lack matmul"):
        TabledKernels(table(), 1e12, 1e11)
    path = tmp_path / "kernels.json"
    path.write_text("[]")
    with pytest.raises(SpecError, match="should be a JSON object"):
        KernelTable.read(path)
    path.write_text('{"device": "x", "torch": "2", "dtype": "bfloat16", "rows": [{"kernel": "matmul", "rows": -1}]}')
    with pytest.raises(SpecError, match="rows\\.0\\.rows = -1: it should be greater"):
        KernelTable.read(path)


def test_predictions_say_what_they_rest_on(tmp_path: Path) -> None:
    tokens = SMALL.seq
    shapes = {matrix for part in parts(SMALL, "block", 1) for matrix in part.matrices}
    rows = [row("matmul", tokens, out, width, seconds=1e-3) for out, width in shapes]
    rows.append(row("attention", tokens, SMALL.hidden, SMALL.seq, seconds=1e-3, heads=4))
    plan = Plan.preset("zero3", nodes=2, local=2)
    for host, batch, expected in [
        (this_host(), 1, "measured here"),
        ("elsewhere", 1, "measured elsewhere"),
        ("elsewhere", 8, "extrapolated"),
    ]:
        table(*rows, host=host).write(tmp_path / "kernels.json")
        machine = ClusterSpec.preset("a100-80g", nodes=2, gpus_per_node=2, kernels=str(tmp_path / "kernels.json"))
        job = TrainingJob(SMALL, machine, 4 * batch * tokens, tokens, rates=NominalRates(machine))
        chosen = candidate(job, plan.with_(micro_batch=batch))
        basis = rests_on(job, chosen)
        assert (basis.computation, basis.transfers, basis.step) == (expected, "extrapolated", "extrapolated")
    nothing = TrainingJob(SMALL, machine.with_(kernels=None), 4 * tokens, tokens, rates=job.rates.on(machine))
    # A step of eight small products a block: each takes a thousandth of a second, whatever the peak.
    assert candidate(nothing, plan).simulated.computing > 2 * 7 * 1e-3


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thinwire.profile.kernels.measure_kernels", None)
    refused = CliRunner().invoke(app, ["kernels", str(tmp_path / "absent" / "kernels.json")])
    assert refused.exit_code == 1
    assert "cannot be written: No such file or directory" in " ".join(refused.output.split())


@pytest.mark.slow
def test_the_command_measures_what_the_planner_reads(tmp_path: Path) -> None:
    model, out, cluster = tmp_path / "tiny.toml", tmp_path / "kernels.json", tmp_path / "cluster.toml"
    SMALL.with_(layers=1).save(model)
    measure = ["kernels", str(out), "--model", str(model), "--seq", "32", "--budget", "0.1s"]
    outcome = CliRunner().invoke(app, [*measure, "--device", "cpu"])
    assert outcome.exit_code == 0, outcome.output
    kinds = {known.kernel for known in KernelTable.read(out).rows}
    assert kinds == {"matmul", "attention", "attention_backward", "elementwise", "update", "copy"}
    cluster.write_text(f'accelerator = "a100-80g"\nnodes = 2\ngpus_per_node = 2\nkernels = "{out.name}"\n')
    words = ["plan", "--model", str(model), "--cluster", str(cluster), "--tokens-per-step", "128", "--seq", "32"]
    planned = CliRunner().invoke(app, [*words, "--codecs", "none", "--top", "1", "--json"])
    assert planned.exit_code == 0, planned.output
    basis = json.loads(planned.stdout)["plans"][0]["basis"]
    assert basis == {"step": "extrapolated", "computation": "measured here", "transfers": "extrapolated"}
    refused = CliRunner().invoke(app, [*measure, "--out", "profile.json"])  # of the cluster, which is another command's
    assert "No such option: --out" in " ".join(refused.output.split())
