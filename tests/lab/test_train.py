"""Training on an emulated cluster, also when a host's link goes down during the run."""

from __future__ import annotations

import math
import re
import threading
import time
from pathlib import Path

import pytest
from tests.support.cluster import RECIPE, TIMEOUT, needs_lab
from tests.support.small import THINWIRE, records, write_text

from thinwire.lab import Lab, LabSpec
from thinwire.lab.job import Job, Outcome

pytestmark = needs_lab


def train(lab: Lab, directory: Path, *arguments: str) -> Outcome:
    """Train on every rank; the output of ranks other than 0 goes to files."""
    command = [*THINWIRE, "train", str(directory / "recipe.toml"), "--out", str(directory / "run"), *arguments]
    return Job(lab, command, "rank", grace=60.0, logs=directory / "logs").run()


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe and its text."""
    write_text(tmp_path / "text.txt", lines=2000)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


@pytest.mark.slow
def test_a_run_whose_link_goes_down_ends_on_all_ranks_and_resumes(
    directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = directory / "run"
    cut = []

    def pull_the_cable() -> None:
        deadline = time.monotonic() + 120
        while len(records(run)) < 12 and time.monotonic() < deadline:
            time.sleep(0.02)
        lab.link(1, up=False)
        cut.append(time.monotonic())

    with Lab(LabSpec(nodes=2, ranks=2, bandwidth=200e6)) as lab:
        hand = threading.Thread(target=pull_the_cable)
        hand.start()
        outcome = train(lab, directory)
        ended = time.monotonic()
        hand.join()
        printed = {0: capfd.readouterr().err}
        printed |= {rank: (directory / "logs" / f"host{rank // 2}.{rank}.log").read_text() for rank in (1, 2, 3)}

        assert outcome.status == 1
        assert "mesh = { local = 2, nodes = 2 }" in (run / "plan.toml").read_text()
        assert all(link.sent_bytes > 100_000 for link in lab.traffic())
        # The timeout, a second one of a rank that waits for one that has given up, time to ask and to leave.
        assert ended - cut[0] < 2 * TIMEOUT + 20
        for rank, text in printed.items():
            operation = rf"thinwire: rank {rank}: (\w+) on the \w+ lane with ranks \[[\d, ]+\] failed after \d+\.\d s"
            assert re.search(operation, text), f"rank {rank} said {text!r}"

        lab.link(1, up=True)
        before = len(records(run))
        steps = before + 5
        assert train(lab, directory, "--resume", "--set", f"train.steps={steps}").status == 0
    output = capfd.readouterr().out
    resumed = re.search(r"resumed from .*?step-(\d+)", output)
    assert resumed, output
    assert before - 10 <= int(resumed[1]) <= before
    losses = [record["loss"] for record in records(run)]
    assert len(losses) == steps
    assert all(math.isfinite(loss) for loss in losses)


@pytest.mark.slow
def test_lost_packets_cost_time_and_change_no_number(directory: Path) -> None:
    steps = ("--set", "train.steps=20", "--set", "cluster.timeout=30s")
    losses = {}
    for loss in (0.0, 0.03):
        with Lab(LabSpec(nodes=2, ranks=1, bandwidth=200e6, loss=loss)) as lab:
            assert train(lab, directory, *steps).status == 0
            assert all(link.sent_bytes > 100_000 for link in lab.traffic())
        losses[loss] = [record["loss"] for record in records(directory / "run")]
        (directory / "run").rename(directory / f"run-{loss}")
    assert len(losses[0.03]) == 20
    assert losses[0.03] == losses[0.0]


@pytest.mark.slow
def test_a_slow_link_is_named_within_twenty_steps(directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One of three hosts has a link of a quarter of the others' speed from some step on, then a good one again."""
    run = directory / "run"
    slowed = []
    over = threading.Event()

    def disturb() -> None:
        for number, bandwidth in ((25, 5e6), (60, 20e6)):
            while len(records(run)) < number and not over.wait(0.02):
                pass
            lab.shape_link(1, bandwidth)
            slowed.append(len(records(run)))

    with Lab(LabSpec(nodes=3, ranks=1, bandwidth=20e6)) as lab:
        hand = threading.Thread(target=disturb)
        hand.start()
        outcome = train(
            lab, directory, "--set", "train.steps=90", "--set", "cluster.timeout=60s", "--set", "train.global_batch=6",
            "--set", "checkpoint.every=0",
        )  # fmt: skip
        over.set()
        hand.join()
    printed = capfd.readouterr()
    assert outcome.status == 0, printed
    said = [(record["step"], record["slow_link"]) for record in records(run) if record["slow_link"]]
    assert len(said) == 2, said
    (named, sentence), (mended, again) = said
    address = lab.spec and re.search(r"\(([\d.]+)\)", sentence)
    assert address is not None
    assert address[1].endswith(".2"), sentence
    assert sentence.startswith("the link of ")
    assert "is slow: data crosses it at" in sentence
    assert slowed[0] < named <= slowed[0] + 20
    assert again.endswith("is as fast as before again")
    assert slowed[1] < mended <= slowed[1] + 20
    assert sentence in printed.out
