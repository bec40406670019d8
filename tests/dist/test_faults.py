"""What goes wrong with hosts, disks and memory while a run trains: each is said in a sentence, and nothing is lost."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from tests.dist.test_train import Runs, rank_process

MANY = ("--set", "train.steps=100000", "--set", "checkpoint.every=1000")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("faults"))


def sentences(runs: Runs, name: str) -> list[str]:
    """What a run's records say about slow ranks."""
    return [record["slow"] for record in runs.records(name) if record["slow"]]


def test_a_slow_rank_is_named_until_it_keeps_up(runs: Runs) -> None:
    process = runs.start("slow", *MANY)
    runs.wait_for_step("slow", 30, process)
    slow = rank_process(process.pid, 1)
    slowing = threading.Event()
    slowing.set()

    def hold_back() -> None:
        while slowing.is_set():
            os.kill(slow, signal.SIGSTOP)
            time.sleep(0.03)
            os.kill(slow, signal.SIGCONT)
            time.sleep(0.005)

    def wait_for(words: str) -> str:
        deadline = time.monotonic() + 60
        while not (said := [text for text in sentences(runs, "slow") if words in text]):
            assert time.monotonic() < deadline, sentences(runs, "slow")
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        return said[0]

    hand = threading.Thread(target=hold_back)
    hand.start()
    try:
        said = wait_for("rank 1 on ")
    finally:
        slowing.clear()
        hand.join()
    assert "is slow: a step takes it" in said
    assert int(said.partition(" in the median, ")[2].partition("%")[0]) >= 25
    wait_for("keeps up with the others again")
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, output + errors
    assert said in output
