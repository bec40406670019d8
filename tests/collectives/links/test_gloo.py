"""The thread of a gloo device, as the kernel schedules it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from thinwire.collectives.links.gloo import make_device

TASKS = Path("/proc/self/task")


@pytest.mark.skipif(not TASKS.is_dir(), reason="threads are listed in /proc, which is not here")
def test_a_devices_thread_displaces_no_other() -> None:
    before = {task.name for task in TASKS.iterdir()}
    device = make_device()
    policies = [os.sched_getscheduler(int(task.name)) for task in TASKS.iterdir() if task.name not in before]
    assert policies == [os.SCHED_BATCH]
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    del device
