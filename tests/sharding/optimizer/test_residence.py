"""States that live on the host train as those on the device do, bit for bit."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tests.support.ranks import on_ranks
from tests.support.training import grids
from tests.support.training.edge import build, samples
from tests.support.training.models import Skipping, Stack

import thinwire as tw
from thinwire.errors import UsageError
from thinwire.program import Axis, Event, HostLane, Lane, Phase
from thinwire.sharding.api import runtime
from thinwire.sharding.grads.host_states import HostStates
from thinwire.sharding.lanes.lanes import Lanes
from thinwire.sharding.step.param_broadcast import Spreads
from thinwire.testing.simulated import SimulatedStreams
from thinwire.testing.streams import check_streams
from thinwire.train.models.common import cross_entropy

pytestmark = pytest.mark.ranks

WORLD = 4
PRESETS = ("ddp", "zero1", "zero1-node", "zero2", "zero3", "hpz", "zeropp", "thinwire")
ON_HOST: dict[str, Any] = {"residence": {"optimizer": "host-stream"}}
GRADIENTS: dict[str, Any] = {"residence": {"gradients": "host"}}
BOTH: dict[str, Any] = {"residence": {"optimizer": "host-stream", "gradients": "host"}}
UPDATE: dict[str, Any] = {"residence": {"optimizer": "host-update"}}
ALL: dict[str, Any] = {"residence": {"optimizer": "host-stream", "gradients": "host", "params": "host"}}
UPDATE_ALL: dict[str, Any] = {"residence": {"optimizer": "host-update", "gradients": "host", "params": "host"}}
RESIDENCES = {
    "optimizer": ON_HOST,
    "gradients": GRADIENTS,
    "both": BOTH,
    "update": UPDATE,
    "params": {"residence": {"params": "host"}},
    "all": ALL,
    "update all": UPDATE_ALL,
}
STREAMED = ("optimizer", "gradients", "both", "all")
ADAMW = (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1})
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": ADAMW,
    "fused adamw": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "amsgrad": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    "momentum": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    "sgd": (torch.optim.SGD, {"lr": 1e-2}),
    "adafactor": (torch.optim.Adafactor, {"lr": 1e-2}),
}


def data(step: int, rank: int) -> torch.Tensor:
    return samples(step, 1, WORLD)[0, rank]


def trained(plan: tw.Plan, kind: type[torch.optim.Optimizer], options: dict[str, Any], **how: Any) -> dict[str, Any]:
    """Everything that a rank holds after some steps, and the losses."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model = tw.shard(build(Stack), plan)
    scale = tw.LossScale(1024.0) if plan.scales_loss else None
    optim = tw.optimizer(model, kind, skip_nonfinite=how.get("skip", False), loss_scale=scale, **options)
    found: dict[str, Any] = {"loss": []}
    for step in range(how.get("steps", 4)):
        for number in tw.micro_batches(model, range(how.get("micro_batches", 1))):
            loss = model(data(step + 7 * number, rank)).float().square().mean()
            (loss if scale is None else scale.scale(loss)).backward()
            found["loss"].append(loss.detach())
        if how.get("clip"):
            found["norm"] = tw.clip_grad_norm_(model, 0.05)
        optim.step()
        optim.zero_grad()
    runtime(model).join_spreads()
    for unit in runtime(model).units:
        for number, buffer in enumerate(unit.buffers):
            found[f"{unit.name}.{number}"] = buffer.shard.clone()
    return found | held(model, optim)


def differences(
    preset: str,
    fields: dict[str, Any],
    optimizer: str,
    how: dict[str, Any],
    residences: tuple[str, ...] = ("optimizer",),
) -> list[str]:
    """What differs in any bit from states on the device, by residence."""
    kind, options = OPTIMIZERS[optimizer]
    plan = tw.Plan.preset(preset, nodes=2, local=2, **fields)
    resident = trained(plan, kind, options, **how)
    return [
        f"{residence}: {found}"
        for residence in residences
        for found in unlike(resident, trained(plan.with_(**RESIDENCES[residence]), kind, options, **how))
    ]


def unlike(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """What differs between two ranks' states in any bit."""
    assert one.keys() == other.keys()
    pairs = [(key, one[key], other[key]) for key in one]
    listed = [(key, *(each if isinstance(each, list) else [each] for each in pair)) for key, *pair in pairs]
    return [key for key, mine, its in listed if not all(map(torch.equal, mine, its))]


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "clipped": ({}, {"clip": True}),
    "accumulated": ({}, {"micro_batches": 3}),
    "skipped": ({}, {"skip": True}),
    "scaled": ({"compute_dtype": "float16"}, {"clip": True}),
    "recomputed": ({"recompute": True}, {}),
}


def in_every_run(*values: str, all_of: Iterable[str]) -> list[Any]:
    """All of the values as parameters, of which only these are in the default suite."""
    return [value if value in values else pytest.param(value, marks=pytest.mark.slow) for value in all_of]


@pytest.mark.parametrize(
    "residences",
    [
        ("all", "update all"),
        pytest.param(("optimizer", "gradients", "both", "update", "params"), marks=pytest.mark.slow),
    ],
    ids=["all", "some"],
)
@pytest.mark.parametrize("way", in_every_run("clipped", "accumulated", all_of=WAYS))
@pytest.mark.parametrize("preset", in_every_run("zero3", "thinwire", all_of=PRESETS))
@on_ranks(WORLD)
def test_presets(preset: str, way: str, residences: tuple[str, ...]) -> None:
    fields, how = WAYS[way]
    assert differences(preset, fields, "adamw", how, residences) == []


FIELDS: dict[str, dict[str, Any]] = {
    "fp32": {"compute_dtype": "float32"},
    "bf16 sums": {"accumulate_dtype": "bfloat16"},
    "inter": {"partition": "inter"},
    "no overlap": {"overlap": {"spread": False, "stages": False}},
    "spread together": {"spread_bytes": 1 << 20},
    "differences": {"wire": {"spread": "int8:64", "spread_difference": True}},
}


@pytest.mark.parametrize("label", in_every_run("bf16 sums", "differences", all_of=FIELDS))
@on_ranks(WORLD)
def test_plans(label: str) -> None:
    assert differences("zero1", FIELDS[label], "adamw", {}, ("optimizer", "all", "update all")) == []


@pytest.mark.parametrize("optimizer", in_every_run("amsgrad", "adafactor", all_of=OPTIMIZERS))
@on_ranks(WORLD)
def test_optimizers(optimizer: str) -> None:
    fields = {"partition": "inter"} if optimizer == "adafactor" else {}
    assert differences("zero1", fields, optimizer, {}, ("optimizer", "all", "update all")) == []


def held(model: torch.nn.Module, optim: Any) -> dict[str, Any]:
    """Masters and optimizer states of a rank."""
    found = {f"master {name}": share.to_local().clone() for name, share in model.named_parameters()}
    for owned in optim.fragments:
        for key, value in optim.state.get(owned.value, {}).items():
            found[f"{owned.fragment.slot.name} {key}"] = torch.as_tensor(value).clone()
    return found


@pytest.mark.parametrize(("saved", "loaded"), [("zero1", "zero1"), ("zero3", "zero1"), ("zero1", "zero3")])
@pytest.mark.parametrize("on_host", [(True, True), (False, True), (True, False)], ids=str)
@on_ranks(WORLD)
def test_checkpoints_know_no_residence(tmp_path: Path, saved: str, loaded: str, on_host: tuple[bool, bool]) -> None:
    """What goes on after a load under another plan is what goes on under it with states on the device."""
    rank = torch.distributed.get_rank()

    def step(model: torch.nn.Module, optim: Any, number: int) -> None:
        model(data(number, rank)).float().square().mean().backward()
        optim.step()
        optim.zero_grad()

    def made(preset: str, *, on_host: bool) -> tuple[torch.nn.Module, Any]:
        torch.manual_seed(0)
        model = tw.shard(build(Stack), tw.Plan.preset(preset, nodes=2, local=2, **(ON_HOST if on_host else {})))
        return model, tw.optimizer(model, torch.optim.AdamW, lr=1e-2)

    first, again, twin = made(saved, on_host=on_host[0]), made(loaded, on_host=on_host[1]), made(loaded, on_host=False)
    for number in range(2):
        step(*first, number)
    tw.save(*first, tmp_path)
    for pair in (again, twin):
        tw.load(*pair, tmp_path)
        step(*pair, 2)
    assert unlike(held(*again), held(*twin)) == []


@pytest.mark.parametrize("fields", [{}, {"islands": {"delay": 1, "blend": 0.25}}], ids=str)
@on_ranks(WORLD)
def test_islands(fields: dict[str, Any]) -> None:
    plan = tw.Plan.preset("islands", nodes=2, local=2, **fields)
    plan = plan.with_(islands={"every": 2})
    kind, options = ADAMW
    assert unlike(trained(plan, kind, options, steps=5), trained(plan.with_(**ALL), kind, options, steps=5)) == []


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
@on_ranks(WORLD)
def test_parts_of_a_model(tensor: int, pipeline: int) -> None:
    found = []
    for residence in ({}, BOTH):
        plan = grids.plan_for(WORLD // (tensor * pipeline), tensor, pipeline).with_(**residence)
        model = tw.parallelize(grids.build("llama"), plan, loss=cross_entropy)
        optim = model.optimizer(torch.optim.AdamW, lr=1e-2)
        losses = []
        for step in grids.batches(plan, model.grid.sampler)[:3]:
            losses.append(torch.as_tensor(model.step(step)))
            model.clip_grad_norm_(1.0)
            optim.step()
            optim.zero_grad()
        found.append({"losses": losses})
    assert unlike(*found) == []


@pytest.mark.parametrize("way", ["write", "states", "whole", "copy", "gradients"])
@on_ranks(WORLD)
def test_code_outside_of_steps(way: str) -> None:
    """What differs where code outside of steps reads and writes masters and states."""
    rank, found = torch.distributed.get_rank(), []
    for residence in ({}, ALL):
        torch.manual_seed(0)
        model = tw.shard(build(Stack), tw.Plan.preset("zero1", nodes=2, local=2, **residence))
        optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-2)
        for step in range(4):
            model(data(step, rank)).float().square().mean().backward()
            if way == "gradients":
                for number, parameter in enumerate(model.parameters()):
                    if number % 3 == 0:
                        parameter.grad = None
                    elif number % 3 == 1:
                        assert parameter.grad is not None
                        parameter.grad.mul_(0.5)
                    else:
                        parameter.grad = torch.ones(parameter.shape)
            optim.step()
            if way == "gradients" and not step:
                continue  # the next gradients are added to these
            optim.zero_grad()
            if way == "write":
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(0.9)
            elif way == "states":
                for state in optim.state.values():
                    state["exp_avg"].mul_(0.5)
            elif way == "whole":
                tw.full_state_dict(model)
                with tw.full_parameters(model, write=True), torch.no_grad():
                    model.first.weight.mul_(0.9)
            elif way == "copy":
                model = copy.deepcopy(model)
                optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-2)
        found.append(held(model, optim))
    assert unlike(*found) == []


@on_ranks(WORLD)
def test_torchs_own_optimizers_are_refused() -> None:
    model = tw.shard(build(Stack), tw.Plan.preset("zero1", nodes=2, local=2, **ON_HOST))
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(data(0, torch.distributed.get_rank())).float().square().mean().backward()
    with pytest.raises(UsageError, match=r"thinwire\.optimizer\(model, AdamW, \.\.\.\)"):
        optim.step()


@on_ranks(WORLD)
def test_a_host_that_is_too_small_is_refused() -> None:
    free = mock.Mock(available=1000)
    refused = pytest.raises(UsageError, match="are free; shard them over more ranks")
    with mock.patch("psutil.virtual_memory", return_value=free), refused:
        tw.shard(build(Stack), tw.Plan.preset("zero1", nodes=2, local=2, **ON_HOST))


@pytest.mark.parametrize("fields", [{}, {"compute_dtype": "float32"}, {"spread_bytes": 1 << 20}], ids=str)
@pytest.mark.parametrize("name", ["zero1", "zero3", "hpz", "zeropp"])
@pytest.mark.parametrize("residence", in_every_run("all", all_of=STREAMED))
@on_ranks(WORLD)
def test_the_runtime_copies_what_the_program_says(name: str, fields: dict[str, Any], residence: str) -> None:
    """Units and bytes of a step's copies."""
    happened: list[Any] = []
    begin = HostStates._begin

    def noted(states: HostStates, units: Any) -> Any:
        begun = begin(states, units)
        both_ways, gradients = begun[1].copies, begun[1].gradients
        nbytes = sum(host.nbytes for host, _ in both_ways) + sum(one.memory.nbytes for one, _ in gradients)
        happened.append((tuple(units), nbytes))
        return begun

    plan = tw.Plan.preset(name, nodes=2, local=2, **fields, **RESIDENCES[residence])
    model = tw.shard(build(Stack), plan)
    optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-2)
    for step in range(3):
        model(data(step, torch.distributed.get_rank())).float().square().mean().backward()
        with mock.patch.object(HostStates, "_begin", noted) if step == 2 else contextlib.nullcontext():
            optim.step()
        optim.zero_grad()
    engine = runtime(model)
    share = engine.sharded.axes[Axis.SHARD, Lane.REDUCE].index
    said = []
    moments = 8 * plan.residence.streams_states
    step_event = Event(Phase.STEP, -1, 0)
    for op in (op for op in engine.programs.program(1).starts(step_event) if op.lane is HostLane.UP):
        buffers = [b for unit in op.units for b in engine.units[unit].buffers if b.layout.trainable]
        padded = sum(run.length for b in buffers for run in b.shares[share])
        owned = sum(one.value.numel() for one in optim.fragments if one.unit in op.units)
        said.append((op.units, op.size - moments * (padded - owned)))  # padding has no moments
    assert happened == said
    assert sum(nbytes for _, nbytes in said) > 0


@pytest.mark.parametrize("fields", [{"micro_batches": 3}, {"accumulate_dtype": "bfloat16"}], ids=str)
@pytest.mark.parametrize("name", in_every_run("zero1", "zero3", all_of=["ddp", "zero1", "zero2", "zero3", "thinwire"]))
@pytest.mark.parametrize("residence", in_every_run("all", "update", all_of=RESIDENCES))
@on_ranks(WORLD)
def test_what_goes_down_is_what_the_program_says(name: str, fields: dict[str, Any], residence: str) -> None:
    """Bytes of a step that went to the host."""
    plan = tw.Plan.preset(name, nodes=2, local=2, **fields, **RESIDENCES[residence])
    model = tw.shard(build(Stack), plan)
    optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-2)
    sent: list[int] = []
    send = Lanes.send

    def noted(lanes: Lanes, source: torch.Tensor, target: torch.Tensor) -> None:
        sent.append(source.nbytes)
        send(lanes, source, target)

    with mock.patch.object(Lanes, "send", noted):
        for step in range(3):
            sent.clear()
            for number in tw.micro_batches(model, range(plan.micro_batches)):
                model(data(step + 7 * number, torch.distributed.get_rank())).float().square().mean().backward()
            optim.step()
            optim.zero_grad()
            runtime(model).join_spreads()
    engine = runtime(model)
    program = engine.programs.program(plan.micro_batches)
    said = sum(op.size for op in program.operations if op.lane is HostLane.DOWN)
    share = engine.sharded.axes[Axis.SHARD, Lane.REDUCE].index
    trained = [b for unit in engine.units for b in unit.buffers if b.layout.trainable]
    padded = sum(run.length for buffer in trained for run in buffer.shares[share])
    padding = padded - sum(one.value.numel() for one in optim.fragments)
    moments = 8 * (plan.residence.optimizer == "host-stream")
    assert sum(sent) == said - moments * padding  # padding has no moments


# -- the order of copies and updates ---------------------------------------------------------------------------


def stepped(name: str, dtype: str, fused: bool, skip: bool, residence: str = "optimizer", **fields: Any) -> list[str]:
    """Hazards of some steps on simulated streams."""
    with check_streams("never") as check:
        torch.default_generator.manual_seed(0)
        fields = {"compute_dtype": dtype, "bucket_bytes": 1, **RESIDENCES[residence], **fields}
        model = tw.shard(build(Stack), tw.Plan.preset(name, nodes=2, local=2, **fields), codec_backend="reference")
        options = {"lr": 1e-2, "fused": fused}
        optim = tw.optimizer(model, torch.optim.AdamW, skip_nonfinite=skip, **options)
        for step in range(4):
            for number in tw.micro_batches(model, range(1 + step % 2)):
                model(data(step + 7 * number, torch.distributed.get_rank())).float().square().mean().backward()
            if step % 2:
                tw.clip_grad_norm_(model, 0.05)
            optim.step()
            optim.zero_grad()
        tw.full_state_dict(model)
    return [str(hazard) for hazard in check.hazards]


def skipped(name: str, residence: str = "optimizer") -> list[str]:
    """Hazards of steps in which the last unit does not run, so that nothing but its update is about its gradients."""
    with check_streams("never") as check:
        torch.default_generator.manual_seed(0)
        plan = tw.Plan.preset(name, nodes=2, local=2, compute_dtype="float32", bucket_bytes=1, **RESIDENCES[residence])
        model = tw.shard(Skipping(), plan)
        optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-2, fused=True)  # others make the host wait
        for step in range(4):
            model(data(step, torch.distributed.get_rank()), 3 - step % 2).square().mean().backward()
            optim.step()
            optim.zero_grad()
    return [str(hazard) for hazard in check.hazards]


def given(name: str, residence: str = "optimizer") -> list[str]:
    """Hazards where gradients are given right after a step, whose updates read the last ones."""
    with check_streams("never") as check:
        torch.default_generator.manual_seed(0)
        plan = tw.Plan.preset(name, nodes=2, local=2, compute_dtype="float32", bucket_bytes=1, **RESIDENCES[residence])
        model = tw.shard(build(Stack), plan)
        optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-2, fused=True)  # others make the host wait
        for step in range(3):
            model(data(step, torch.distributed.get_rank())).square().mean().backward()
            optim.step()
            for parameter in model.parameters():
                parameter.grad = torch.ones(parameter.shape)
            optim.step()
            optim.zero_grad()
    return [str(hazard) for hazard in check.hazards]


@pytest.mark.parametrize("residence", in_every_run("all", all_of=RESIDENCES))
@pytest.mark.parametrize("name", ["zero1", pytest.param("ddp", marks=pytest.mark.slow)])
@on_ranks(WORLD)
def test_whatever_writes_gradients_waits_for_their_update(name: str, residence: str) -> None:
    """Of steps, of gradients that are given, and of units that do not run."""
    assert stepped(name, "bfloat16", False, False, residence) == []
    assert stepped(name, "bfloat16", True, False, residence, spread_bytes=1 << 20) == []  # fewer batches than slots
    assert given(name, residence) == []
    assert skipped(name, residence) == []


@pytest.mark.parametrize(
    ("name", "dtype", "fused", "skip"),
    [
        ("zero1", "bfloat16", True, True),
        ("zero3", "float32", False, False),
        pytest.param("thinwire", "bfloat16", False, True, marks=pytest.mark.slow),
        pytest.param("ddp", "bfloat16", False, False, marks=pytest.mark.slow),
        pytest.param("zeropp", "bfloat16", True, False, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("residence", in_every_run("all", "update", all_of=RESIDENCES))
@on_ranks(WORLD)
def test_every_access_is_ordered(name: str, dtype: str, fused: bool, skip: bool, residence: str) -> None:
    assert stepped(name, dtype, fused, skip, residence) == []


submit = Lanes.submit


@pytest.mark.parametrize(
    "lane",
    [
        HostLane.UP,  # into a slot that another batch still uses
        pytest.param(HostLane.UPDATE, marks=pytest.mark.slow),  # of states that have not come
        pytest.param(HostLane.DOWN, marks=pytest.mark.slow),  # of states before their update
        Lane.SPREAD,  # of parameters before their update
    ],
)
@on_ranks(WORLD)
def test_planted_faults_of_order_are_found(lane: Lane) -> None:
    """What runs on a lane waits for nothing but computation."""

    def run_ahead(self: Lanes, of: Lane, work: Any, *, after: Any = (), **rest: Any) -> Any:
        return submit(self, of, work, after=() if of is lane else after, **rest)

    with mock.patch.object(Lanes, "submit", run_ahead):
        assert "race" in " ".join(stepped("zero1", "bfloat16", False, False))


@on_ranks(WORLD)
def test_a_forward_before_the_update_is_found() -> None:
    with mock.patch.object(Spreads, "expect", return_value=None):
        assert stepped("zero3", "float32", False, False)


def test_a_dropped_model_gives_its_memory_of_the_host_back() -> None:
    """It is unlocked before it is freed, though the job goes on, and once the device copies nothing there."""
    locked, copying = [], []

    def pin(streams: SimulatedStreams, memory: torch.Tensor) -> Any:
        def unlock() -> None:
            copying.extend(s.name for s in streams.all if s.clock.get(s.number, 0) > streams.host.get(s.number, 0))
            locked.remove(memory.data_ptr())

        locked.append(memory.data_ptr())
        return unlock

    with check_streams("never"), mock.patch.object(SimulatedStreams, "pin", pin):
        plan = tw.Plan.preset(
            "zero1", nodes=1, local=1, compute_dtype="float32", residence={"optimizer": "host-stream"}
        )
        model = tw.shard(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)), plan)
        optimizer = tw.optimizer(model, torch.optim.AdamW, lr=1e-3)
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        assert locked
        alive = weakref.ref(model)
        del model, optimizer
        gc.collect()
    assert alive() is None
    assert not locked
    assert not copying
