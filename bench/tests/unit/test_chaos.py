"""Campaigns of faults on purpose: what happens to whom, what is counted, and where trends come from."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import pytest

from thinwire.errors import UsageError
from thinwire.spec.codec import BUNDLED, FAMILIES, OPTIONS, CodecSpec
from thinwire.spec.plan import Plan
from thinwire.spec.plan_parts.presets import PRESETS
from thinwire.spec.recipe import Recipe
from thinwire_bench.chaos.campaign import make_trials, next_trial, read_log
from thinwire_bench.chaos.damage import mutated
from thinwire_bench.chaos.disk import can_mount
from thinwire_bench.chaos.incidents import CABLED, INCIDENTS, MOUNTED
from thinwire_bench.chaos.run import CommandEnd, _lives, losses
from thinwire_bench.chaos.setups import SOURCES, SmallRun, make_corpus, setups
from thinwire_bench.chaos.sheets import campaign_sheets, faultless
from thinwire_bench.chaos.soak import read_samples, soak_sheet, trends
from thinwire_bench.chaos.trial import Incident, Trial, TrialVerdict


def test_a_seed_decides_everything_and_every_kind_comes() -> None:
    trials = make_trials(3, mounts=True, cables=True)
    assert trials == make_trials(3, mounts=True, cables=True)
    assert trials != make_trials(4, mounts=True, cables=True)
    assert {kind for trial in trials for kind in trial.kinds} == set(INCIDENTS)
    chosen = make_trials(3, mounts=True, cables=True, chosen=["zero3"])
    assert chosen == [trial for trial in trials if trial.setup.name == "zero3"]
    plain = {kind for trial in make_trials(3, mounts=False, cables=False) for kind in trial.kinds}
    assert plain == set(INCIDENTS) - {*CABLED, *MOUNTED}
    of_presets = [trial for trial in trials if trial.setup.group == "preset"]
    assert {trial.setup.name for trial in of_presets} == set(PRESETS)
    assert sum(len(trial.kinds) for trial in of_presets) >= 200
    again = make_trials(3, mounts=True, cables=True, turn=1)
    assert {trial.name for trial in again} == {f"{trial.name}-2" for trial in trials}
    assert [trial.kinds for trial in again] != [trial.kinds for trial in trials]


def happened(trial: Trial) -> TrialVerdict:
    """The verdict of a trial in which all went well."""
    incidents = [Incident(kind, 4) for kind in trial.kinds]
    return TrialVerdict(trial.name, trial.setup.name, trial.setup.group, trial.setup.source, incidents, True, "", 1.0)


def test_what_has_not_happened_yet_comes_first() -> None:
    trials = make_trials(0, mounts=True, cables=True)
    # Presets are over, as in a log of before: codecs, schedules and cut links must not wait for one another.
    verdicts = [happened(trial) for trial in trials if trial.setup.group == "preset" and not trial.cabled]
    following = []
    while trial := next_trial(trials, verdicts):
        following.append(trial)
        verdicts.append(happened(trial))
    assert len(verdicts) == len(trials)
    first = {"cut" if trial.cabled else trial.setup.group for trial in following[:8]}
    assert first == {"codec", "schedule", "cut"}
    early = {(trial.setup.group, kind) for trial in following[:8] for kind in trial.kinds}
    kinds = set(INCIDENTS) - set(CABLED)
    assert len(early) > 0.6 * len({(group, kind) for group in ("codec", "schedule") for kind in kinds})
    assert next_trial(trials, verdicts) is None
    # An incident that came too late for its run has not happened.
    for incident in verdicts[-1].incidents:
        incident.step = None
    assert next_trial([following[-1], *make_trials(0, mounts=True, cables=True, turn=1)], verdicts) is not None


HOLD = """
import pathlib, sys, time
from thinwire_bench.chaos.disk import Disk
with Disk(pathlib.Path(sys.argv[1]), mounts=True) as disk:
    print(disk.path.is_mount(), flush=True)
    time.sleep(600)
"""


def devices_of(image: Path) -> list[str]:
    """Loop devices whose blocks a file is, also once it is deleted."""
    found = []
    for file in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            found += [file.parts[3]] if file.read_text().startswith(str(image)) else []
    return found


RUN = """
import pathlib, sys, time
from thinwire_bench.chaos.run import DisturbedRun
place = pathlib.Path(sys.argv[1])
run = DisturbedRun([sys.executable, "-c", "import time; time.sleep(600)"], place / "run", place / "log", {})
run.start()
print(run.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_run_ends_with_a_campaign_that_is_killed(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", RUN, tmp_path], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as answers:
        run = int(answers.readline())
        assert _lives(run)
        process.kill()
        process.wait()
    deadline = time.monotonic() + 20
    while _lives(run) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _lives(run)


@pytest.mark.skipif(not can_mount(), reason="takes root, loop devices and mkfs.ext4")
def test_a_disk_goes_with_a_process_that_is_killed(tmp_path: Path) -> None:
    image = tmp_path / "disk.img"
    process = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path / "disk"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as answers:
        assert answers.readline() == "True\n"
        assert devices_of(image)
        assert not (tmp_path / "disk").is_mount(), "nobody else sees it"
        process.kill()
        process.wait()
    deadline = time.monotonic() + 20
    while devices_of(image) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert devices_of(image) == []


@pytest.mark.skipif(not can_mount(), reason="takes root, loop devices and mkfs.ext4")
def test_a_disk_fills_up_loses_power_and_is_gone(tmp_path: Path) -> None:
    script = """
import pathlib, sys
from thinwire_bench.chaos.disk import Disk
with Disk(pathlib.Path(sys.argv[1]), mounts=True) as disk:
    file = disk.path / "file"
    file.write_text("kept")
    disk.free()
    disk.photograph()
    file.write_text("lost")
    disk.lose_power()
    assert file.read_text() in ("kept", ""), file.read_text()
    disk.fill(0)
    try:
        (disk.path / "more").write_bytes(bytes(1 << 20))
    except OSError:
        disk.free()
        (disk.path / "more").write_bytes(bytes(1 << 20))
        print("full")
"""
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "disk"], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "full\n"
    assert list(tmp_path.glob("*.img")) == []
    assert devices_of(tmp_path / "disk.img") == []


def test_every_setup_is_a_recipe_and_every_source_is_read(tmp_path: Path) -> None:
    make_corpus(tmp_path)
    assert {setup.source for setup in setups()} == set(SOURCES)
    for setup in setups():
        file = tmp_path / f"{setup.name}.toml"
        file.write_text(setup.recipe(tmp_path, timeout=5))
        assert Recipe.read(file, []).data.source == setup.source


def plan_of(setup: SmallRun) -> Plan:
    keys = dict(setup.plan)
    return Plan.preset(keys.pop("preset"), nodes=setup.nodes, local=setup.local, **keys)


def test_every_codec_and_schedule_is_that_of_some_setup() -> None:
    plans = [plan_of(setup) for setup in setups()]
    codecs = [codec for plan in plans for _, codec in plan.wire if isinstance(codec, CodecSpec)]
    codecs += [plan.islands.codec for plan in plans if plan.islands is not None]
    assert {codec.family for codec in codecs} == {*FAMILIES, *BUNDLED}
    assert {option for codec in codecs for option in codec.options} == set(OPTIONS)
    assert {plan.pipeline_schedule for plan in plans if plan.pp > 1} == set(
        get_args(Plan.model_fields["pipeline_schedule"].annotation)
    )
    for axis in ("tp", "pp", "cp", "ep"):
        assert any(getattr(plan, axis) > 1 for plan in plans), axis


def test_losses_are_compared_as_text(tmp_path: Path) -> None:
    records = [{"step": step, "loss": 0.1 + step, "val_loss": None, "grad_norm": 1.0} for step in (1, 2)]
    file = tmp_path / "metrics.jsonl"
    file.write_text("\n".join(map(json.dumps, records)) + '\n{"step": 3, "lo')
    assert losses(file) == {1: "[1.1, null, 1.0]", 2: "[2.1, null, 1.0]"}
    assert losses(tmp_path / "missing") == {}
    assert CommandEnd(1, "a\n  last\n\n").sentence == "last"


def test_mutations_leave_the_original_alone() -> None:
    body: dict[str, Any] = {"files": [{"name": "a", "bytes": 1}], "values": {"x": [1, 2]}}
    before = json.dumps(body)
    changed = {json.dumps(mutated(body, random.Random(seed)), default=str) for seed in range(50)}
    assert json.dumps(body) == before
    assert len(changed) > 30
    assert any(mutated({"x": 1}, random.Random(seed)) == {} for seed in range(50))


def verdict(name: str, *faults: str, equal: bool = True) -> TrialVerdict:
    incidents = [Incident("a rank hangs", 4, faults=[(fault, "so")]) for fault in faults] or [
        Incident("a rank hangs", 4)
    ]
    incidents.append(Incident("power is lost", None))
    run, about = name.removesuffix("-cabled"), "" if equal else "step 3"
    return TrialVerdict(name, run, "preset", "jsonl" if run == "ddp" else "text", incidents, equal, about, 1.0)


def test_faults_are_counted_by_kind_and_run(tmp_path: Path) -> None:
    verdicts = [verdict("zero1"), verdict("zero1-cabled", "lost"), verdict("ddp", "hang", "traceback", equal=False)]
    by_kind, by_run, by_source = campaign_sheets(verdicts)
    assert by_kind.rows == [["a rank hangs", "4", "1", "2", "1", "1", "0"], ["**all**", "4", "1", "2", "1", "1", "0"]]
    assert [row[:3] for row in by_run.rows] == [["zero1", "2", "1"], ["ddp", "2", "0"], ["**all**", "4", "1"]]
    assert [row[:3] for row in by_source.rows] == [["text", "2", "1"], ["jsonl", "2", "0"], ["**all**", "4", "1"]]
    assert not faultless(verdicts)
    assert faultless(verdicts[:1])
    log = tmp_path / "log"
    log.write_text("\n".join(json.dumps(line) for line in [{"seed": 5}, *map(asdict, verdicts)]))
    assert read_log(log, 5) == verdicts
    with pytest.raises(UsageError, match="belongs to seed 5, not 6"):
        read_log(log, 6)
    assert read_log(tmp_path / "none", 6) == []


def samples(grows: float) -> list[dict[str, Any]]:
    """A soak of four hours, whose only rank grows by some bytes an hour."""
    noise = random.Random(0)
    return [
        {
            "seconds": 60.0 * number,
            "step": 600 * number,
            "processes": {
                "rank 0": {
                    "memory": 1e9 + grows * number / 60 + noise.gauss(0, 1e6),
                    "descriptors": 40,
                    "threads": 9,
                    "processor": 30.0 * number,
                }
            },
        }
        for number in range(1, 241)
    ]


def test_growth_beyond_noise_is_told_from_noise(tmp_path: Path) -> None:
    steady = {trend.name: trend for trend in trends(samples(0))}
    assert {trend.verdict for trend in steady.values()} == {"steady"}
    assert steady["memory of rank 0"].error > 0
    growing = {trend.name: trend for trend in trends(samples(20e6))}["memory of rank 0"]
    assert growing.verdict == "grows"
    little = {trend.name: trend for trend in trends(samples(2e6))}["memory of rank 0"]
    assert little.verdict == "grows by less than 1 %"
    assert {trend.name: trend for trend in trends(samples(-20e6))}["memory of rank 0"].verdict == "shrinks"
    assert growing.slope == pytest.approx(20e6, abs=2 * growing.error)
    assert steady["time of a step"].mean == pytest.approx(0.1)
    file = tmp_path / "soak.jsonl"
    file.write_text("\n".join(map(json.dumps, samples(20e6))))
    verdicts = {row[0]: row[1] for row in soak_sheet(read_samples(file)).rows}
    assert verdicts["memory of rank 0"] == "grows"
    assert verdicts["threads of rank 0"] == "steady"
    file.write_text("{}")
    with pytest.raises(UsageError, match="soak for longer"):
        read_samples(file)
