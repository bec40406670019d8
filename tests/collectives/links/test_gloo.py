"""Connections by gloo, and the thread of its device, as the kernel schedules it."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from thinwire.collectives.links.gloo import GlooLinks, make_device

TASKS = Path("/proc/self/task")


@pytest.mark.skipif(not TASKS.is_dir(), reason="threads are listed in /proc, which is not here")
def test_a_devices_thread_displaces_no_other() -> None:
    before = {task.name for task in TASKS.iterdir()}
    device = make_device()
    policies = [os.sched_getscheduler(int(task.name)) for task in TASKS.iterdir() if task.name not in before]
    assert policies == [os.SCHED_BATCH]
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    del device


def test_what_was_sent_may_be_changed() -> None:
    store, device, sent, received = dist.HashStore(), make_device(), torch.ones(1 << 16), torch.empty(1 << 16)
    with ThreadPoolExecutor(2) as pool:
        sender, receiver = pool.map(lambda index: GlooLinks(store, index, 2, device, timedelta(seconds=20)), range(2))
        sending = pool.submit(lambda: (sender.send(sent, 1), sent.zero_()))
        time.sleep(0.2)  # the receiver is not there yet
        receiver.receive(received, 0)
        sending.result()
    assert received.all()
