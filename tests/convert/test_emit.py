"""Configurations of other frameworks: their text, and that it says what was chosen."""

from __future__ import annotations

import ast
import json
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from thinwire.cli.main import app
from thinwire.convert import from_deepspeed, from_fsdp2
from thinwire.convert.emit import FRAMEWORKS, Emitted, emitted_text
from thinwire.cost import NominalRates
from thinwire.errors import UsageError
from thinwire.plan import TrainingJob, nearest
from thinwire.plan.peers import configurations, predicted
from thinwire.spec import ClusterSpec, Factor, ModelSpec, Plan

MESH = Factor(local=8, nodes=4)


def job(name: str = "a100-80g", **keys: Any) -> TrainingJob:
    machine = ClusterSpec.preset(name, nodes=4, links={"nic": {"bandwidth": 50e9, "latency": 1e-5}}, **keys)
    model = ModelSpec.preset("llama-7b").with_(layers=8, seq=2048)
    return TrainingJob(model, machine, 32 * 2048 * 4, 2048, micro_batch=1, recompute=False, rates=NominalRates(machine))


def emitted(framework: str, plan: Plan) -> Emitted:
    return Emitted(framework, plan, 2048, 1.0, "llama on a cluster")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_nearest_fits_and_is_the_fastest_of_what_the_framework_can_do(framework: str) -> None:
    asked = job()
    ours = Plan.preset("thinwire", nodes=4, local=8)
    best = nearest(asked, framework, ours)
    others = [predicted(asked, framework, plan) for plan in configurations(asked, framework, ours)]
    assert best.fits
    assert best.seconds == min(peer.seconds for peer in others if peer.fits)
    assert emitted_text(emitted(framework, best.plan))


def test_deepspeed_comes_back_as_the_same_plan() -> None:
    asked = job()
    for plan in configurations(asked, "deepspeed", Plan.preset("thinwire", nodes=4, local=8)):
        back = from_deepspeed(json.loads(emitted_text(emitted("deepspeed", plan))), MESH).plan()
        for key in ("params", "grads", "optimizer", "secondary", "micro_batch", "micro_batches", "compute_dtype"):
            assert getattr(back, key) == getattr(plan, key), key


@pytest.mark.parametrize("framework", ["fsdp2", "hsdp"])
def test_fully_shard_comes_back_as_the_same_plan(framework: str) -> None:
    asked = job()
    for plan in configurations(asked, framework, Plan.preset("thinwire", nodes=4, local=8)):
        out = emitted(framework, plan)
        text = emitted_text(out)
        ast.parse(text)
        lines = [line.strip() for line in text.splitlines()]
        call = next(line for line in lines if line.startswith("fully_shard(block, "))
        for name, keyword in (("mesh", "mesh"), ("policy", "mp_policy")):
            value = next(line.removeprefix(f"{name} = ") for line in lines if line.startswith(f"{name} = "))
            call = call.replace(f"{keyword}={name}", f"{keyword}={value}")
        back = from_fsdp2(call, MESH).plan()
        for key in ("params", "grads", "optimizer", "secondary", "compute_dtype"):
            assert getattr(back, key) == getattr(plan, key), (key, call)


def test_torchtitan_and_megatron_name_their_own_keys() -> None:
    plan = Plan.preset("mics", nodes=4, local=8).with_(micro_batch=2, micro_batches=3, recompute=True)
    table = tomllib.loads(emitted_text(emitted("torchtitan", plan)))
    assert table["parallelism"]["data_parallel_replicate_degree"] == 4
    assert table["parallelism"]["data_parallel_shard_degree"] == 8
    assert table["training"] | {"local_batch_size": 2, "global_batch_size": 192, "seq_len": 2048} == table["training"]
    assert table["activation_checkpoint"] == {"mode": "full"}
    flags = emitted_text(emitted("megatron-fsdp", plan)).splitlines()
    assert "--data-parallel-sharding-strategy optim_grads_params" in flags
    assert "--num-distributed-optimizer-instances 4" in flags
    assert "--global-batch-size 192" in flags
    assert "--recompute-granularity full" in flags


def test_what_others_do_by_default_is_switched_off() -> None:
    """Clipping at 1.0, and 16 bits or gradients of these where a plan computes in fp32."""
    plan = Plan.preset("zero3", nodes=4, local=8, compute_dtype="float32")
    table, flags = (emitted_text(Emitted(name, plan, 2048, None, "")) for name in ("torchtitan", "megatron-fsdp"))
    assert tomllib.loads(table)["training"]["max_norm"] == math.inf
    assert "--clip-grad 0.0" in flags
    assert not {"--bf16", "--fp16", "--grad-reduce-in-bf16"} & {*flags.splitlines()}
    assert not {"bf16", "fp16"} & json.loads(emitted_text(emitted("deepspeed", plan))).keys()


def test_megatron_is_told_of_sequence_parallelism() -> None:
    cut = Plan.preset("zero1", nodes=4, local=4, tp=2)
    for plan, asked in ((cut, True), (cut.with_(sequence_parallel=False), False), (cut.with_(tp=1), False)):
        flags = emitted_text(emitted("megatron-fsdp", plan)).splitlines()
        assert ("--sequence-parallel" in flags) == asked
        assert f"--tensor-model-parallel-size {plan.tp}" in flags


@pytest.mark.slow
def test_the_command_writes_the_file_and_says_what_it_loses(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    words = ["plan", "--model", "llama-7b", "--cluster", "a100-80g:2x8", "--seq", "2048"]
    words += ["--set", "cluster.links.nic.bandwidth=25gbit", "--tokens-per-step", "128k"]
    words += ["--micro-batch", "1", "--recompute", "off", "--top", "1"]
    outcome = CliRunner().invoke(app, [*words, "--emit", "deepspeed", "--emit-to", str(path), "--json"])
    assert outcome.exit_code == 0, outcome.output
    result = json.loads(outcome.stdout)
    assert json.loads(path.read_text()) == json.loads(result["emit"]["text"])
    ours = result["plans"][0]["step_seconds"]
    assert result["emit"]["against_first_plan"]["step"] == pytest.approx(result["emit"]["step_seconds"] / ours - 1)
    assert result["emit"]["step_seconds"] > ours
    shown = CliRunner().invoke(app, [*words, "--emit", "spam"])
    assert "--emit spam: there is no such framework; valid are fsdp2, hsdp" in " ".join(shown.output.split())


def test_what_does_not_fit_is_one_sentence() -> None:
    small = job(memory="8GiB")
    with pytest.raises(UsageError, match="no configuration of it fits; the smallest"):
        nearest(small, "hsdp", Plan.preset("thinwire", nodes=4, local=8))


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--out", "--emit-to"])
def test_a_path_that_cannot_be_written_is_one_sentence(option: str, tmp_path: Path) -> None:
    words = ["plan", "--model", "llama-7b", "--cluster", "a100-80g:2x8", "--seq", "2048", "--tokens-per-step", "64k"]
    path = tmp_path / "absent" / "file"
    result = CliRunner().invoke(app, [*words, "--micro-batch", "1", "--emit", "hsdp", "--emit-to", str(tmp_path / "h"),
                                      option, str(path)])  # fmt: skip
    assert result.exit_code == 1
    assert f"{option} {path} cannot be written: No such file or directory" in " ".join(result.output.split())
