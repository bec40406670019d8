"""The codec benchmark: a small run, its goals, the codecs that it refuses, and its page."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner, Result

from thinwire.cli.main import app
from thinwire.codecs import get
from thinwire.errors import UsageError
from thinwire_bench.codecs import peers
from thinwire_bench.codecs.accuracy import Accuracy, blocking, signal_to_noise
from thinwire_bench.codecs.bench import CODECS
from thinwire_bench.codecs.data import data_sets
from thinwire_bench.codecs.goals import CodecGoal, goals
from thinwire_bench.codecs.sheets import markdown, sheets
from thinwire_bench.codecs.soundness import check_sample, check_timed
from thinwire_bench.codecs.speed_chart import draw
from thinwire_bench.codecs.speeds import COPY, CodecSpeed, TimedCall, interleave, is_noisy, speeds
from thinwire_bench.codecs.study import CodecStudy
from thinwire_bench.codecs.targets import TARGET_DIRECTIONS, known_targets, native_target
from thinwire_bench.pages import insert

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
SMALL = ["--backend", "reference", "--sizes", "1MiB", "--rounds", "2", "--values", "8192", "--data", "normal,student"]
CHOSEN = ["--codecs", "int8:256,int8:tensor,int4:256,hadamard,exp3", "--peers", "eager,deepspeed-form"]


def bench(*options: str | Path) -> Result:
    return CliRunner().invoke(app, ["bench", "codecs", *map(str, options)])


def speed(
    subject: str, direction: str, gb_per_s: float, *, dtype: str = "bfloat16", size: int = 64 << 20
) -> CodecSpeed:
    return CodecSpeed(
        subject=subject, direction=direction, dtype=dtype, size=size, num_bytes=size, wire_bits=8.0,
        gb_per_s=gb_per_s, gb_per_s_min=gb_per_s, gb_per_s_max=gb_per_s, share=gb_per_s / 10,
        share_min=gb_per_s / 10, share_max=gb_per_s / 10, seconds=(1.0,),
    )  # fmt: skip


def accuracy(subject: str, data: str, snr_db: float | None, dtype: str = "float32") -> Accuracy:
    return Accuracy(subject, dtype, data, 1000, snr_db, 8.0)


@pytest.mark.slow
def test_a_small_run_writes_everything(tmp_path: Path) -> None:
    out, picture, page = tmp_path / "codecs.json", tmp_path / "codecs.png", tmp_path / "page.md"
    page.write_text((ROOT / "docs" / "results" / "codecs.md").read_text())
    done = bench(*SMALL, *CHOSEN, "--json", out, "--plot", picture, "--page", page)
    assert done.exit_code == 0, done.output
    assert "int4:256,hadamard" in done.stdout
    content = json.loads(out.read_text())
    assert content["codecs"] == ["int8:256", "int8:tensor", "int4:256,hadamard", "exp3"]
    assert (content["backend"], content["threads"], content["rounds"]) == ("reference", 1, 2)
    assert {gate["problem"] for gate in content["gates"]} == {None}
    directions = {(row["subject"], row["dtype"], row["direction"]) for row in content["speeds"]}
    assert {direction for subject, dtype, direction in directions if (subject, dtype) == ("int8:256", "float32")} == {
        "encode", "decode", "decode_add", "encode_slices", "decode_sum", "decode_sum_encode",
    }  # fmt: skip
    assert {dtype for subject, dtype, _ in directions if subject == "exp3"} == {"bfloat16"}
    assert {dtype for subject, dtype, _ in directions if subject == COPY} == {"float32", "bfloat16"}
    for row in content["speeds"]:
        assert row["gb_per_s_min"] <= row["gb_per_s"] <= row["gb_per_s_max"]
        assert row["num_bytes"] == (4 if row["direction"].startswith("decode_sum") else 1) * (1 << 20)
        assert len(row["seconds"]) == 2
    errors = {(row["subject"], row["dtype"], row["data"]): row["snr_db"] for row in content["accuracies"]}
    assert errors["int8:256", "float32", "normal"] == pytest.approx(43.1, abs=0.5)
    assert errors["exp3", "bfloat16", "student"] is None
    assert errors["INT4 b2048, clamp at +7 with scale max/8", "float32", "normal"] == pytest.approx(17.6, abs=0.5)
    assert {row["data"] for row in content["blockings"]} == {"normal", "student"}
    assert all(row["ratio"] > 1 for row in content["blockings"])
    assert {goal["goal"] for goal in content["goals"]} == {"times torch eager", "SNR in dB"}
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "| int4:256,hadamard |" in page.read_text()

    again = bench("--read", out, "--page", page, "--plot", picture)
    assert (again.exit_code, again.stdout) == (0, done.stdout)


@pytest.mark.slow
def test_each_instruction_set_has_a_column(tmp_path: Path) -> None:
    out, page = tmp_path / "codecs.json", tmp_path / "page.md"
    page.write_text((ROOT / "docs" / "results" / "codecs.md").read_text())
    before = native_target()
    done = bench(
        "--codecs", "int4:256,exp3", "--sizes", "1MiB", "--rounds", "2", "--data", "none", "--peers", "none",
        "--targets", "all", "--json", out, "--page", page,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert native_target() == before
    content = json.loads(out.read_text())
    assert content["environment"]["target"] == before
    timed = {(row["subject"], row["dtype"], row["direction"], row["target"]) for row in content["target_speeds"]}
    targets = known_targets()
    assert {target for subject, *_, target in timed if subject != COPY} == {*targets}
    assert len(timed) == 2 + 3 * len(targets) * len(TARGET_DIRECTIONS)  # int4 of two dtypes, exp3 of one
    gates = {(gate["codec"], gate["dtype"], gate["target"]) for gate in content["gates"] if gate["target"]}
    assert gates == {(subject, dtype, target) for subject, dtype, _, target in timed if subject != COPY}
    text = page.read_text()
    assert f"| codec | direction | {' | '.join(targets)} |" in text
    assert f"backend `cpp` with {before}; median" in text
    again = bench("--read", out, "--page", page)
    assert (again.exit_code, again.stdout) == (0, done.stdout)


@pytest.mark.slow
def test_wrong_bytes_of_one_instruction_set_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    last = known_targets()[-1]

    def checked(codec: Any, dtype: torch.dtype, device: torch.device) -> str | None:
        return "a message differs" if str(codec.spec) == "bf16" and native_target() == last else None

    monkeypatch.setattr("thinwire_bench.codecs.targets.check_sample", checked)
    out = tmp_path / "codecs.json"
    done = bench(
        "--codecs", "bf16,int8:256", "--sizes", "1MiB", "--rounds", "1", "--data", "none", "--peers", "none",
        "--dtypes", "fp32", "--targets", f"{last}", "--json", out,
    )  # fmt: skip
    assert done.exit_code == 1
    assert f"bf16 (float32, {last}): a message differs" in done.stderr
    assert {row["subject"] for row in json.loads(out.read_text())["target_speeds"]} == {COPY, "int8:256"}


@pytest.mark.slow
def test_a_codec_with_wrong_bytes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = type(get("zfp:8", backend="reference"))
    encode = codec._encode

    def wrong(self: Any, x: Tensor, wire: Tensor, seed: int) -> int:
        used = encode(self, x, wire, seed)
        wire[used // 2] ^= 1
        return used

    class Broken(codec):  # type: ignore[misc, valid-type]
        _encode = wrong

    def patched(name: Any, *, backend: str) -> Any:
        return Broken(get(name, backend="reference").spec) if str(name) == "zfp:8" else get(name, backend=backend)

    monkeypatch.setattr("thinwire_bench.codecs.bench.get", patched)
    out = tmp_path / "codecs.json"
    done = bench(*SMALL, "--codecs", "bf16,zfp:8", "--peers", "none", "--dtypes", "fp32", "--json", out)
    assert done.exit_code == 1
    assert "1 of the codecs refused" in done.stderr
    assert "zfp:8 (float32): a message differs from the reference backend" in done.stderr
    content = json.loads(out.read_text())
    assert {row["subject"] for row in content["speeds"]} == {COPY, "bf16"}
    assert {row["subject"] for row in content["accuracies"]} == {"bf16"}


def test_the_gate_looks_at_large_tensors_too() -> None:
    x = torch.randn(40_000)
    for name in ("int8:256", "int4:tensor", "int4:256,stochastic", "mpc"):
        codec = get(name, backend="reference")
        assert check_sample(codec, torch.float32, CPU) is None
        decoded = codec.decode(codec.encode(x, seed=1), x.numel(), x.dtype)
        assert check_timed(codec, x, decoded) is None
        decoded[-1] += 10
        assert check_timed(codec, x, decoded) is not None


def test_goals_of_the_host() -> None:
    rows = [
        speed("int8:256", "encode", 8.0),
        speed("int8:256", "decode", 7.9),
        speed("int8:256", "decode", 5.0, size=512 << 20),
        speed("int8:256", "decode_add", 1.0),
        speed("int4:256", "encode", 1.0, size=1 << 20),
        speed("torch eager int8:256", "encode", 0.4),
        speed("torch eager int8:256", "decode", 0.4),
        speed("zfp:8", "encode", 0.9, dtype="float32"),
        speed("zfpy rate 8", "encode", 0.3, dtype="float32"),
        speed("zfpy rate 16", "encode", 0.3, dtype="float32"),
    ]
    errors = [
        accuracy("int8:256", "normal", 43.06),
        accuracy("int8:256", "student", 34.84),
        accuracy("int8:256", "student", 30.0, dtype="bfloat16"),
        accuracy("bf16", "normal", 55.0),
    ]
    reached = goals(rows, errors, on_cpu=True)
    assert [(goal.goal, goal.wanted, goal.met) for goal in reached] == [
        ("share of memcpy", 0.8, True),
        ("share of memcpy", 0.8, False),
        ("share of memcpy", 0.5, True),
        ("times zfpy", 3.0, True),
        ("times torch eager", 20.0, True),
        ("times torch eager", 20.0, False),
        ("SNR in dB", 43.1, True),
        ("SNR in dB", 34.9, False),
    ]
    assert reached[0].subject == "int8:256 encode, bfloat16, 64 MiB"


def test_goals_of_each_instruction_set() -> None:
    rows = [replace(speed("int4:256", "encode", 7.0), target=target) for target in ("baseline", "sse4", "avx2")]
    reached = goals([speed("int4:256", "encode", 9.0), *rows], [], on_cpu=True)
    assert [(goal.subject, goal.met) for goal in reached] == [
        ("int4:256 encode, bfloat16, 64 MiB", True),
        ("int4:256 encode, bfloat16, 64 MiB, sse4", False),
        ("int4:256 encode, bfloat16, 64 MiB, avx2", False),
    ]


def test_goals_of_a_device() -> None:
    rows = [speed(COPY, "copy", 10.0), speed("int3:256", "decode_sum", 7.0), speed("int8:tensor", "encode", 1.0)]
    assert goals(rows, [], on_cpu=False) == [
        CodecGoal("share of a device copy", "int3:256 decode_sum, bfloat16, 64 MiB", 0.7, 0.8, False)
    ]


def test_blocking_is_a_ratio_of_errors() -> None:
    errors = [accuracy("int4:tensor", "normal", 10.0), accuracy("int4:256", "normal", 20.0)]
    (found,) = blocking([*errors, accuracy("int8:tensor", "normal", 10.0)])
    assert (found.unblocked, found.blocked) == ("int4:tensor", "int4:256")
    assert found.ratio == pytest.approx(10**0.5)


def test_signal_to_noise() -> None:
    x = torch.tensor([3.0, 4.0])
    assert signal_to_noise(x, x) is None
    assert signal_to_noise(x, x + torch.tensor([0.5, 0.0])) == pytest.approx(20.0)


def test_every_job_has_a_turn_in_every_round() -> None:
    calls: list[str] = []
    jobs = [TimedCall(name, "copy", 1000, lambda name=name: calls.append(name)) for name in (COPY, "a")]
    seconds = interleave(jobs, rounds=3, device=CPU)
    assert [len(timings) for timings in seconds] == [3, 3]
    assert calls[:2] == [COPY, "a"]
    rows = speeds(jobs, [[2e-6, 1e-6, 4e-6], [4e-6, 4e-6, 2e-6]], dtype="float32", size=1000, wire_bits={"a": 8.0})
    assert rows[1].share == pytest.approx(0.5)
    assert (rows[1].share_min, rows[1].share_max) == pytest.approx((0.25, 2.0))
    assert rows[1].gb_per_s == pytest.approx(0.25)
    assert is_noisy([1.0, 1.5, 2.0])
    assert not is_noisy([1.0, 1.01, 1.02, 5.0, 1.0])


def test_a_peer_that_fails_is_listed_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(x: Tensor) -> Tensor:
        raise ValueError("no such kernel\nmore")

    def made() -> list[peers.CodecPeer]:
        common: dict[str, Any] = {"summary": "", "decode": lambda kept, x: kept, "num_bytes": len}
        return [
            peers.CodecPeer("fails", encode=fails, **common),
            peers.CodecPeer("absent", encode=fails, package="no_such_package", **common),
            peers.CodecPeer("lossy", encode=lambda x: x + 1e-3, lossless=True, **common),
            peers.CodecPeer("works", encode=lambda x: x.clone(), lossless=True, **common),
        ]

    monkeypatch.setitem(peers.GROUPS, "x", made)
    working, statuses = peers.choose(["x"], CPU)
    assert [peer.name for peer in working] == ["works"]
    assert [status.absent for status in statuses] == [
        "failed: ValueError: no such kernel",
        "not installed",
        "failed: it does not return torch.float32 as it was",
        None,
    ]


def test_synthetic_data_sets_are_the_same_every_time() -> None:
    first, second = (data_sets(["student", "normal"], 5000) for _ in range(2))
    assert list(first) == ["student", "normal"]
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert float(first["student"].abs().max()) > 2 * float(first["normal"].abs().max())


def test_a_page_without_a_place_for_results_is_refused() -> None:
    with pytest.raises(UsageError, match="no place for results"):
        insert("# Page\n", "text", "thinwire bench codecs --page")


def test_an_empty_study_can_be_shown(tmp_path: Path) -> None:
    environment = {"cores": 2, "date": "2026-01-01T00:00:00", "versions": {"torch": "2", "thinwire": "0"}}
    study = CodecStudy(
        "cpu", "cpp", 1, 3, ("mpc",), [], [], [], [], [], [], ["busy"], environment, "thinwire bench codecs"
    )
    assert sheets(study) == []
    assert "- busy" in markdown(study)
    draw(study, tmp_path / "empty.png")


def test_the_page_s_code_runs_and_names_every_kind_of_codec() -> None:
    page = (ROOT / "docs" / "compression.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, "compression.md", "exec"), names)
    assert names["mean"].shape == (250_000,)
    for family in {re.split(r"[:\d]", codec)[0] for codec in CODECS}:
        assert f"`{family}" in page


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--codecs", "int9:256"], "'int9:256' is not a codec"),
        (["--codecs", ","], "there is nothing to measure"),
        (["--dtypes", "fp8"], "'fp8' is not a dtype"),
        (["--sizes", "64MiB", "--backend", "reference"], "the reference backend is slow"),
        (["--sizes", "100"], "100 is not a size"),
        (["--data", "images"], "there is no data set 'images'"),
        (["--device", "tpu"], "'tpu' is not a device"),
        (["--backend", "cuda"], "there is no backend 'cuda'"),
        (["--targets", "sse9"], "this processor has no instruction set 'sse9'; valid are baseline"),
        (["--targets", "all", *SMALL], "--targets are instruction sets of the backend cpp, and this is reference"),
        (["--peers", "lz4", *SMALL], "there is no peer 'lz4'; valid are zfpy"),
    ],
)
def test_the_command_refuses_what_it_cannot_do(options: list[str], message: str) -> None:
    done = bench(*options)
    assert done.exit_code == 1
    assert message in done.stderr
