"""``thinwire sim``: cases are read strictly, answers are complete, and engines differ as expected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.paths import ROOT
from typer.testing import CliRunner, Result

from thinwire.cli.main import app
from thinwire.cli.planning.sim import _plan_fields
from thinwire.cost import OVERHEAD, largest_memory
from thinwire.errors import SpecError
from thinwire.sim import Case, Resource, answer, read_cases
from thinwire.spec import Plan

NODE = {"local": 8, "nodes": 1}
ONE = {"local": 1, "nodes": 1}
AMSP_7B = {"params": ONE, "grads": ONE, "optimizer": NODE}


def case(**changes: Any) -> Case:
    fields: dict[str, Any] = {"model": "llama-7b", "gpu": "a800-80g", "gpus": 64, "seq": 4096, "plan": "zero1-node"}
    return Case.parse({**fields, **changes}, "case")


def test_answers_have_every_figure() -> None:
    written = answer(case(id="x")).to_dict()
    assert list(written) == [
        "id", "step_seconds", "tgs", "mfu", "tflops", "memory_bytes", "exposed", "extrapolated",
    ]  # fmt: skip
    assert written["id"] == "x"
    assert written["tgs"] == pytest.approx(4096 / written["step_seconds"])
    assert written["tflops"] == pytest.approx(312 * written["mfu"])
    assert written["memory_bytes"]["total"] == sum(v for k, v in written["memory_bytes"].items() if k != "total")
    assert set(written["exposed"]) == {"gather", "reduce", "sync", "spread", "control", "outer"}


def test_factors_and_their_preset_are_one_plan() -> None:
    named, written = answer(case(plan="zero1-node")), answer(case(plan=AMSP_7B))
    assert named.simulated.seconds == written.simulated.seconds
    assert named.memory == written.memory


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bucket_chunks": 4, "reduce_bytes": "64MiB", "grad_reduce": "sum"},
        {"keep_gathered": "none", "live_bytes": "4GiB", "units": [{"match": "*", "keep_gathered": False}]},
        {"overlap": {"gather": False, "stages": False, "input_gradient": True}, "granularity": "module"},
    ],
    ids=str,
)
def test_a_plan_file_is_played_as_it_is(changes: dict[str, Any], tmp_path: Path) -> None:
    plan = Plan.preset("hpz", nodes=8, local=8, micro_batches=2, **changes)
    plan.save(tmp_path / "plan.toml")
    fields, _ = _plan_fields(str(tmp_path / "plan.toml"))
    assert answer(case(**fields)).plan.with_(name="hpz") == plan


@pytest.mark.parametrize(
    "cut", [{"tp": 4}, {"pp": 2, "micro_batches": 4}, {"tp": 2, "pp": 4, "micro_batches": 2}], ids=str
)
def test_the_memory_is_that_of_the_rank_that_needs_the_most(cut: dict[str, int]) -> None:
    result = answer(case(**cut))
    assert result.memory == largest_memory(result.model, result.plan, seq=4096, overhead=OVERHEAD)


def test_a_plan_file_with_islands_is_refused(tmp_path: Path) -> None:
    Plan.preset("islands", nodes=8, local=8).save(tmp_path / "plan.toml")
    with pytest.raises(SpecError, match="islands: thinwire sim plays files without them"):
        _plan_fields(str(tmp_path / "plan.toml"))


def test_micro_batches_and_batch_sizes_count() -> None:
    assert answer(case(micro_batches=4)).tokens == 4 * answer(case()).tokens
    assert answer(case(micro_batch_tokens=16384)).plan.micro_batch == 4
    short = answer(
        Case(model="gpt-18b", gpu="v100-32g", gpus=64, micro_batch_tokens=512, plan="zero3", dtype="float16")
    )
    assert (short.model.seq, short.plan.micro_batch) == (512, 1)


def test_overlap_hides_communication() -> None:
    hidden, bare = answer(case()), answer(case(overlap=[]))
    assert sum(bare.simulated.exposed.values()) > sum(hidden.simulated.exposed.values())
    assert bare.simulated.seconds > hidden.simulated.seconds


def test_a_thinner_wire_is_slower_and_codecs_help() -> None:
    wide, thin = (answer(case(plan="zero3", internode_gbps=gbps)) for gbps in (800, 50))
    assert thin.simulated.seconds > 2 * wide.simulated.seconds
    assert answer(case(plan="zeropp", internode_gbps=50)).simulated.seconds < thin.simulated.seconds


def test_amsp_synchronises_whole_gradients() -> None:
    """Its all-reduce over all ranks sends more across nodes than a reduce-scatter inside them lets through."""
    whole, shared = (answer(case(plan=AMSP_7B, engine=name, overlap=[])) for name in ("amsp", "thinwire"))
    assert whole.simulated.exposed["reduce"] > 0  # type: ignore[index]
    assert whole.plan.partition == "inter"
    assert whole.simulated.busy[Resource.ACROSS] > shared.simulated.busy[Resource.ACROSS]
    assert not whole.extrapolated


def test_a_hundred_thousand_accelerators_are_no_more_work_than_eight() -> None:
    few, many = (answer(case(gpus=count, plan="zero3", gpu="h100-80g", micro_batches=8)) for count in (8, 100_000))
    assert many.memory.params < few.memory.params / 10_000
    assert many.extrapolated


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"colour": "red"}, "colour"),
        ({"gpu": "a900"}, "gpu = 'a900' is unknown; valid are a800-80g"),
        ({"engine": "horovod"}, "engine = 'horovod' is unknown; valid are thinwire, amsp"),
        ({"gpus": 63}, "gpus = 63 is not a multiple of gpus_per_node = 8"),
        ({"micro_batch_tokens": 5000}, "micro_batch_tokens = 5000 is not a multiple of seq = 4096"),
        ({"micro_batch_tokens": 512}, "micro_batch_tokens = 512 is less than seq = 4096"),
        ({"plan": {"params": NODE, "stage": 3}}, "plan.stage is unknown; valid are params"),
        ({"plan": "zero9"}, "there is no preset 'zero9'"),
        ({"overlap": ["everything"]}, "overlap"),
        ({"dtype": "int4"}, "dtype"),
    ],
)
def test_wrong_fields_of_a_case_are_named(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SpecError) as caught:
        answer(case(**changes))
    assert complaint in str(caught.value)


def test_a_file_of_cases_names_every_mistake(tmp_path: Path) -> None:
    path = tmp_path / "cases.json"
    good = {"id": "a", "model": "llama-7b", "gpu": "a800-80g", "gpus": 8, "plan": "ddp"}
    path.write_text(json.dumps([good, {**good, "id": "b", "size": 3}, {**good, "id": "c", "gpus": "many"}]))
    with pytest.raises(SpecError) as caught:
        read_cases(path)
    assert "case b" in str(caught.value)
    assert "case c" in str(caught.value)
    path.write_text("{}")
    with pytest.raises(SpecError, match="should be a JSON list"):
        read_cases(path)
    path.write_text("[")
    with pytest.raises(SpecError, match="cannot be read as cases"):
        read_cases(path)
    path.write_text(json.dumps([good]))
    assert [read.id for read in read_cases(path)] == ["a"]


def test_the_cases_of_the_docs_are_answered(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "planner.md").read_text()
    path = tmp_path / "cases.json"
    path.write_text(page.split("```json\n")[1].split("```")[0])
    answers = [answer(one) for one in read_cases(path)]
    assert [one.case.id for one in answers] == ["a", "b"]
    assert not any(one.extrapolated for one in answers)


def test_tokens_of_a_step_make_micro_batches_of_every_rank() -> None:
    few, many = (answer(case(gpus=gpus, tokens_per_step="4M")) for gpus in (64, 512))
    assert (few.plan.micro_batches, many.plan.micro_batches) == (16, 2)
    assert few.tokens == many.tokens == 4 << 20
    assert answer(case(tokens_per_step="4M", tp=4)).plan.micro_batches == 64
    with pytest.raises(SpecError, match="tokens_per_step = 262145 is not a multiple of 262144"):
        answer(case(tokens_per_step=262_145))
    with pytest.raises(SpecError, match="micro_batches and tokens_per_step say the same"):
        answer(case(tokens_per_step="4M", micro_batches=16))


def run_command(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["sim", *arguments])


@pytest.mark.slow
def test_the_command_sweeps_draws_and_traces(tmp_path: Path) -> None:
    usual = ["--model", "llama-7b", "--cluster", "a800-80g:2x8", "--plan", "preset:zero3"]
    picture, trace, plan = tmp_path / "sweep.png", tmp_path / "trace.json", tmp_path / "plan.toml"
    swept = run_command(*usual, "--sweep", "internode_gbps=50,100,200", "--plot", str(picture), "--json")
    assert swept.exit_code == 0, swept.stderr
    seconds = [row["step_seconds"] for row in json.loads(swept.stdout)]
    assert seconds == sorted(seconds, reverse=True)
    assert len(set(seconds)) == 3
    assert picture.read_bytes().startswith(b"\x89PNG")
    scaled = run_command(*usual, "--sweep", "gpus=8..64", "--tokens-per-step", "4M", "--seq", "4096", "--json")
    rows = json.loads(scaled.stdout)
    assert [row["id"] for row in rows] == ["gpus=8", "gpus=16", "gpus=32", "gpus=64"]
    for row, gpus in zip(rows, (8, 16, 32, 64), strict=True):
        assert row["tgs"] * row["step_seconds"] * gpus == pytest.approx(4 << 20)
    one = run_command(*usual, "--trace", str(trace), "--json")
    assert one.exit_code == 0, one.stderr
    assert any(event["ph"] == "X" for event in json.loads(trace.read_text())["traceEvents"])

    Plan.preset("zero3", nodes=2, local=8).save(plan)
    from_file = run_command(*usual[:4], "--plan", str(plan), "--json")
    # A trace has every block; without one, equal blocks are played once.
    traced = json.loads(one.stdout)["step_seconds"]
    assert json.loads(from_file.stdout)["step_seconds"] == pytest.approx(traced, rel=1e-9)
    assert "simulated steps" in run_command(*usual).stdout.lower()
    Plan.preset("zero3", nodes=2, local=8).with_(overlap={"gather": False}, micro_batches=2).save(plan)
    blocking = json.loads(run_command(*usual[:4], "--plan", str(plan), "--json").stdout)
    assert blocking["exposed"]["gather"] > 2 * json.loads(one.stdout)["exposed"]["gather"]
    assert blocking["step_seconds"] > 2 * json.loads(one.stdout)["step_seconds"]


STEP = ("sim", "--model", "llama-7b", "--cluster", "a800-80g:2x8", "--plan", "preset:zero3")


def test_a_plan_file_has_its_sequences_per_micro_batch_however_long_they_are(tmp_path: Path) -> None:
    Plan.preset("zero1", nodes=2, local=8, micro_batch=2).save(tmp_path / "plan.toml")

    def played(*more: str) -> Any:
        result = CliRunner().invoke(app, [*STEP[:-1], str(tmp_path / "plan.toml"), *more, "--json"])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    single = [played("--seq", seq)["step_seconds"] for seq in ("1024", "8192")]
    assert [row["step_seconds"] for row in played("--sweep", "seq=1024,8192")] == single
    assert [played("--set", f"seq={seq}")["step_seconds"] for seq in (1024, 8192)] == single
    assert played("--seq", "1024", "--tokens-per-step", "32768")["step_seconds"] == single[0], "16 ranks x 2 x 1024"
    own = ("--seq", "1024", "--set", "micro_batch_tokens=1024")
    assert played(*own)["step_seconds"] < 0.7 * single[0]


def test_settings_disturb_a_step_and_change_it() -> None:
    runner = CliRunner()
    plain = json.loads(runner.invoke(app, [*STEP, "--json"]).stdout)
    assert runner.invoke(app, [*STEP[:-1], "zero3", "--json"]).exit_code == 0  # as for thinwire train
    slow = json.loads(runner.invoke(app, [*STEP, "--set", "straggler=1.5", "--json"]).stdout)
    assert slow["step_seconds"] == plain["step_seconds"]
    assert slow["disturbed"]["median"] > 1.3 * plain["step_seconds"]
    assert slow["disturbed"]["samples"] == 1, "without jitter, all steps are equal"
    settings = ("--set", "recompute=true", "--set", "micro_batches=2")
    longer = json.loads(runner.invoke(app, [*STEP, *settings, "--json"]).stdout)
    assert longer["step_seconds"] > 2 * plain["step_seconds"]
    kept, recomputed = (
        {row["plan"]: row["memory_bytes"]["activations"] for row in json.loads(result.stdout)["estimates"]}["zero3"]
        for result in (
            runner.invoke(app, [*STEP[:-1], "zero3", "--memory", *more, "--json"]) for more in ((), settings)
        )
    )
    assert recomputed < kept


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["sim"], "--model and --cluster are missing"),
        ([*STEP, "--plot", "x.png"], "--plot x.png needs --sweep"),
        ([*STEP, "--sweep", "colour=1,2"], "--sweep colour=1,2 should be"),
        ([*STEP, "--sweep", "gpus=64..8"], "64..8 should go from"),
        ([*STEP, "--sweep", "internode_gbps=1..inf"], "inf is not a finite number below 1e300"),
        ([*STEP, "--sweep", "gpus=8..nan"], "nan is not a whole number"),
        ([*STEP, "--sweep", "internode_gbps=1,x"], "x is not a number"),
        ([*STEP, "--sweep", "internode_gbps=1,nan"], "nan is not a finite number below 1e300"),
        ([*STEP, "--sweep", f"gpus=8..{10**400}"], "000 is not a finite number below 1e300"),
        ([*STEP, "--sweep", f"gpus={10**400}"], "000 is not a finite number below 1e300"),
        ([*STEP, "--set", "jitter=2"], "jitter = 2: it should be less than or equal to 1"),
        ([*STEP, "--set", "straggler=0.5"], "straggler = 0.5: it should be greater than or equal to 1"),
        ([*STEP, "--set", "stragler=2"], "stragler"),
        ([*STEP, "--set", "cluster.links.nic.bandwidth=25gbit"], "such as internode_gbps=25"),
        ([*STEP[:-1], "zreo3"], "there is no preset 'zreo3'"),
        (["sim", "--cases", "cases.json", "--set", "seq=8"], "--set seq=8 has no use with --cases"),
        ([*STEP, "--memory", "--set", "seq=8"], "--set seq: only keys of the cluster can be set here"),
        ([*STEP, "--memory", "--tokens-per-step", "4M"], "--tokens-per-step 4M has no use with --memory"),
        ([*STEP, "--memory", "--sweep", "seq=1,2"], "--sweep seq=1,2 has no use with --memory"),
        ([*STEP, "--memory", "--plot", "a.png"], "--plot a.png has no use with --memory"),
        (["sim", "--memory", "--cases", "cases.json"], "--cases cases.json has no use with --memory"),
        ([*STEP, "--memory", "--trace", "out.json"], "--trace out.json has no use with --memory"),
    ],
)
def test_settings_without_sense_are_refused(arguments: list[str], complaint: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert complaint in " ".join(result.stderr.split())
