"""Device-side code never makes the host wait: it runs on tensors without memory, whose values nobody can read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

import thinwire as tw
from thinwire import codecs
from thinwire.codecs.codec import Codec
from thinwire.collectives.messages import Messages, Residual
from thinwire.collectives.reduce_scatter import _add_piece, _add_rows, _Merge
from thinwire.testing import run_ranks
from thinwire.testing.streams import check_streams
from thinwire.testing.waits import HostWaits, check_host_waits

pytest.importorskip("triton")

NUMEL = 8192
DTYPES = (torch.float32, torch.bfloat16)
FIXED = (
    "none",
    "bf16",
    "fp16",
    "int8:256",
    "int4:256",
    "int4:256,hadamard",
    "int4:256,stochastic",
    "int8:tensor",
    "zfp:8",
)


@pytest.fixture
def launches() -> Iterator[list[object]]:
    """The kernels that Triton would launch. None can run without memory; what surrounds them is checked."""
    from thinwire.codecs.triton import exp3, mpc, transcode, zfp

    launched: list[object] = []

    def launch(kernel: object, *rest: object, **more: object) -> None:
        launched.append(kernel)

    with contextlib.ExitStack() as stack:
        for module in (exp3, mpc, transcode, zfp):
            stack.enter_context(mock.patch.object(module, "launch", launch))
        yield launched


# ----------------------------------------------------------------------------------------------------- what it finds

READS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.sum()),
    "if": lambda x: 1 if x.sum() > 0 else 0,
    "tolist": lambda x: x.tolist(),
    "equal": lambda x: torch.equal(x, x + 1),
    "cpu": lambda x: x.cpu(),
    "copy to host": lambda x: torch.empty(8).copy_(x),
    "mask": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_read_is_noted_and_an_error(read: Callable[[torch.Tensor], object]) -> None:
    with check_host_waits() as noted:
        x = torch.ones(8, device="meta")
        with pytest.raises((RuntimeError, NotImplementedError)):
            read(x)
    assert [Path(wait.where.rpartition(":")[0]) for wait in noted.waits] == [Path(__file__)]


def test_a_copy_to_the_device_is_noted() -> None:
    with check_host_waits() as noted:
        torch.empty(8, device="meta").copy_(torch.ones(8))
        torch.empty(8, device="meta").copy_(torch.ones(8), non_blocking=True)
        torch.ones(8).to("meta")
    assert [wait.operation for wait in noted.waits] == ["aten::copy_", "aten::_to_copy"]


def test_nothing_else_is_noted() -> None:
    with check_host_waits() as noted:
        x = torch.ones(8, device="meta")
        torch.where(x > 0, x, 0.0).sum()
        torch.empty_like(x, dtype=torch.bfloat16).copy_(x)
        assert torch.full((), 2.0).item() == 2.0, "the host's own value"
        assert torch.arange(4)[torch.arange(4) > 1].tolist() == [2, 3]
    assert noted.waits == []


# -------------------------------------------------------------------------------------------------------------- sums


@pytest.mark.parametrize("scale", [1.0, 0.25, 1 / 3])
@pytest.mark.parametrize(
    ("dtype", "out", "accumulate"),
    [(d, o, False) for d in DTYPES for o in DTYPES] + [(d, torch.float32, True) for d in DTYPES],
)
def test_sums_of_pieces_never_wait(dtype: torch.dtype, out: torch.dtype, accumulate: bool, scale: float) -> None:
    with check_host_waits() as noted:
        rows = torch.ones(4, NUMEL, dtype=dtype, device="meta")
        for count in (2, 4):
            merge = _Merge(torch.ones(NUMEL, dtype=out, device="meta"), scale, accumulate)
            _add_rows(rows[:count], merge)
            _add_piece(rows[0], merge)
    assert noted.waits == []


# ------------------------------------------------------------------------------------------------------------ codecs


@pytest.mark.parametrize("name", FIXED)
def test_codecs_of_fixed_length_never_wait(name: str, launches: list[object]) -> None:
    codec = codecs.get(name, backend="triton")
    with check_host_waits():
        use(codec)  # tables are copied to the device once
    launches.clear()
    with check_host_waits() as noted:
        use(codec)
    assert noted.waits == []
    assert len(launches) >= (1 if name == "none" else 4)


def use(codec: Codec) -> None:
    """Every operation that training asks of a codec."""
    seed = 3 if codec.spec.needs_seed else None
    x, total = torch.ones(NUMEL, device="meta"), torch.zeros(NUMEL, device="meta")
    wire = codec.encode(x, seed=seed)
    codec.decode(wire, NUMEL, torch.float32)
    codec.decode_add(wire, total)
    wires = codec.encode_slices(x, [(0, NUMEL // 2), (NUMEL // 2, NUMEL)], seed=seed)
    codec.decode_sum(wires, NUMEL // 2, scale=0.5)
    codec.decode_sum_encode(wires, NUMEL // 2, codec, scale=0.5, seed=seed)
    codec.encode_feedback(x, total, seed=seed)


@pytest.mark.parametrize("name", ["exp3", "mpc"])
def test_codecs_of_variable_length_wait_for_sizes(name: str, launches: list[object]) -> None:
    """The check sees what is known of them: the host has to learn how long a message is."""
    codec = codecs.get(name, backend="triton")
    with check_host_waits() as noted, pytest.raises(RuntimeError):
        codec.encode(torch.ones(NUMEL, dtype=torch.bfloat16 if name == "exp3" else torch.float32, device="meta"))
    assert [wait.operation for wait in noted.waits] == ["aten::_local_scalar_dense"]
    assert "codecs/triton/message.py:" in noted.waits[0].where


@pytest.mark.parametrize("feedback", [False, True])
def test_messages_of_a_reduction_never_wait(feedback: bool, launches: list[object]) -> None:
    device = torch.device("meta")
    sizes = [NUMEL, NUMEL, NUMEL]
    codec = codecs.get("int4:256", backend="triton")
    with check_host_waits() as noted:
        messages = Messages(codec, sizes, torch.float32, device)
        whole, bounds = torch.ones(sum(sizes), device=device), [(i * NUMEL, (i + 1) * NUMEL) for i in range(3)]
        residual = Residual(torch.zeros(sum(sizes), device=device)) if feedback else None
        messages.encode_slices(whole, bounds, None, residual)
        messages.encode(1, whole[:NUMEL], None)
        for onto in (None, whole[:NUMEL]):
            messages.decode_sum(torch.ones(NUMEL, dtype=torch.bfloat16, device=device), 0.25, onto)
        messages.decode_side_by_side(whole, add=True)
        messages.decode(2, whole[:NUMEL])
    assert noted.waits == []
    assert len(launches) >= 5


# ------------------------------------------------------------------------------------------------------- whole steps


def places_of_waits(preset: str, dtype: str) -> list[list[str]]:
    """Where the forward, backward, and update of three steps wait; tensors of the CPU stand for a device's."""
    torch.default_generator.manual_seed(0)
    x = torch.ones(4, 16)
    plan = tw.Plan.preset(preset, nodes=1, local=1).with_(compute_dtype=dtype)
    with check_streams("never", nccl=True):
        layers = [torch.nn.Linear(16, 16) for _ in range(3)]
        model = tw.shard(torch.nn.Sequential(*layers), plan)
        scale = tw.LossScale(16.0) if plan.scales_loss else None
        optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-3, fused=True, skip_nonfinite=True, loss_scale=scale)
        waits: list[list[str]] = [[], [], []]
        for number in range(4):
            with HostWaits(cpu_is_device=True) as forward:
                loss = model(x).float().square().mean()
            with HostWaits(cpu_is_device=True) as backward:
                (loss if scale is None else scale.scale(loss)).backward()
            with HostWaits(cpu_is_device=True) as update:
                tw.clip_grad_norm_(model, 1e-3)
                optim.step()
                optim.zero_grad()
            for places, noted in zip(waits, (forward, backward, update), strict=True):
                if number:  # the first step warms up
                    places += [Path(wait.where.rpartition(":")[0]).name for wait in noted.waits]
    return waits


def places_of_waits_of_torch() -> list[str]:
    """Where the steps of torch's own optimizer and clipping wait, after one that warms up."""
    places: list[str] = []
    with check_streams("never", nccl=True):
        plan = tw.Plan.preset("zero3", nodes=1, local=2)
        model = tw.shard(torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3))), plan)
        optim = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        for number in range(3):
            with HostWaits(cpu_is_device=True) as noted:
                model(torch.ones(4, 16)).square().mean().backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
                optim.step()
                optim.zero_grad()
            if number:
                places += [wait.where for wait in noted.waits if "/thinwire/testing/" not in wait.where]
    return places


def test_steps_of_torchs_own_optimizer_never_wait() -> None:
    assert run_ranks(2, places_of_waits_of_torch) == [[], []]


@pytest.mark.parametrize(
    ("preset", "dtype"),
    [("zero1-node", "float32"), ("zero3", "bfloat16"), ("zero3", "float16"), ("thinwire", "bfloat16")],
)
def test_a_clipped_step_reads_the_last_steps_norm(preset: str, dtype: str) -> None:
    """The host reads one value a step: the norm of the step before, once the forward is queued."""
    (waits,) = run_ranks(1, places_of_waits, preset, dtype)
    assert waits == [[], ["streams.py"] * 3, []]
