"""The runtime on a CUDA device: stream lanes, NCCL at world size one, gloo ranks that share the device."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from benchmarks.gpu.training import TOLERANCE, compare

import thinwire as tw
from thinwire.program import Lane
from thinwire.sharding.checkpointing.saved_model import SavedModel
from thinwire.sharding.lanes.lanes import Lanes
from thinwire.spec import Plan
from thinwire.testing import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no CUDA device"),
]


def test_every_preset_agrees_with_the_cpu() -> None:
    rows = compare("cuda", Plan.preset_names(islands=False))
    assert len(rows) == 2 * len(Plan.preset_names(islands=False))
    assert all(row.error <= TOLERANCE for row in rows), [row for row in rows if not row.passed]


def test_a_stream_lane_waits_for_what_was_queued_and_holds_its_buffers() -> None:
    device = torch.device("cuda")
    lanes = Lanes(device)
    source = torch.zeros(1 << 24, device=device)
    target = torch.empty_like(source)
    torch.cuda._sleep(50_000_000)
    source.fill_(3.0)  # queued behind the sleep
    ticket = lanes.submit(Lane.GATHER, partial(target.copy_, source))
    del source
    reused = torch.full((1 << 24,), 5.0, device=device)  # would land in freed memory if the lane did not hold it
    ticket.wait()
    assert float(target.sum()) == 3.0 * target.numel()
    assert float(reused[0]) == 5.0
    assert lanes.exposed()[Lane.GATHER] >= 0.0
    lanes.close()


def test_a_stream_keeps_a_body_until_it_has_run() -> None:
    """Queued is not done: memory that only the body refers to would be used for something else meanwhile."""

    class Buffer:
        pass

    lanes = Lanes(torch.device("cuda"))
    buffers = [Buffer(), Buffer()]
    references = [weakref.ref(buffer) for buffer in buffers]
    torch.cuda._sleep(500_000_000)  # the bodies are queued behind it
    first = lanes.submit(Lane.GATHER, partial(vars, buffers[0]))
    second = lanes.submit(Lane.SYNC, partial(vars, buffers[1]), after=[first])
    del buffers
    assert not second.done()
    assert all(reference() is not None for reference in references)
    torch.cuda.synchronize()
    assert second.done()
    gc.collect()
    assert all(reference() is None for reference in references), "what it waited for has run, too"
    lanes.close()


@pytest.mark.parametrize("preset", ["zero3", "zero1-node", "hpz"])
def test_a_step_never_synchronises_the_host(preset: str) -> None:
    """Without clipping, nothing between two losses that are read may wait for the device."""
    counts = run_ranks(1, steps_without_synchronisation, preset)
    assert counts[0] == (0, 0), "no allocator retries, and no growth after the third step"


def steps_without_synchronisation(preset: str) -> tuple[int, int]:
    """Allocator retries, and bytes by which reserved memory grew, over steps 4 to 6 under sync-debug mode ``error``."""
    device = torch.device("cuda")
    torch.manual_seed(0)
    layers = [torch.nn.Linear(512, 512) for _ in range(4)]
    model = tw.shard(torch.nn.Sequential(*layers).to(device), Plan.preset(preset, nodes=1, local=1))
    optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-3, fused=True)
    x = torch.ones(8, 512, device=device)

    def step() -> None:
        model(x).float().square().mean().backward()
        optim.step()
        optim.zero_grad()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    retries, reserved = torch.cuda.memory_stats()["num_alloc_retries"], torch.cuda.memory_reserved()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return (
        int(torch.cuda.memory_stats()["num_alloc_retries"]) - int(retries),
        int(torch.cuda.memory_reserved()) - int(reserved),
    )


def check_frozen_on_the_device(directory: str, device: str) -> None:
    """A frozen parameter that has changed goes to another base; one that has not is read from the first."""
    layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).to(device)
    layers[0].requires_grad_(False)
    model = tw.shard(layers, Plan.preset("zero1", nodes=1, local=1))
    for step, change in enumerate((0.0, 0.0, 1.0)):
        with torch.no_grad():
            if change:
                model[0].weight.add_(change)
        tw.save(model, None, Path(directory, f"step-{step}"))
    saved = [SavedModel(Path(directory, f"step-{step}")).read("0.weight") for step in range(3)]
    assert torch.equal(saved[0], saved[1])
    assert not torch.equal(saved[1], saved[2])
    assert torch.equal(saved[2].float(), tw.full_state_dict(model)["0.weight"])
    assert len(list(Path(directory).glob("frozen-*"))) == 2


def test_frozen_parameters_on_the_device(tmp_path: Path) -> None:
    run_ranks(1, check_frozen_on_the_device, str(tmp_path), "cuda")


def check_published_from_two_devices(store: str, device: str) -> None:
    """Parameters of a dtype are on the host, buffers of it on the device."""
    layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64)).to(device)
    residence = {"optimizer": "host-update", "params": "host"}
    model = tw.shard(layers, Plan.preset("zero1", nodes=1, local=1, compute_dtype="float32", residence=residence))
    publisher, subscriber = tw.publisher(model, store), tw.Subscriber(store)
    publisher.step()
    publisher.close()
    assert subscriber.update() == 1
    with tw.full_parameters(model):
        assert all(value.cpu().equal(subscriber.state_dict()[name]) for name, value in model.state_dict().items())


def test_weights_are_published_from_two_devices(tmp_path: Path) -> None:
    run_ranks(1, check_published_from_two_devices, str(tmp_path), "cuda")
