"""Lanes on simulated streams: every access to memory is ordered by events, and faults that are planted are found."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tests.support.ranks import on_ranks
from tests.support.training import grids
from tests.support.training.ordered import Outcome, assert_ordered, check_cases, checked, preset
from tests.support.training.parity import Case, distinct_presets, valid_plans
from torch import nn
from torch.utils.checkpoint import checkpoint

import thinwire as tw
from thinwire.sharding.api import runtime
from thinwire.sharding.corruption_check import sums_of
from thinwire.sharding.lanes import streams
from thinwire.sharding.optimizer.sharded_optimizer import ShardedOptimizer
from thinwire.testing import run_ranks
from thinwire.testing.simulated import Answer, SimulatedStream, SimulatedStreams
from thinwire.testing.streams import StreamCheck, check_streams
from thinwire.train.models.common import cross_entropy

pytestmark = pytest.mark.ranks

ENCODED = ("zeropp", "zeropp-8bit", "thinwire")


def test_presets_order_every_access() -> None:
    names = ("zero1", "zero3", "hpz", "thinwire")
    cases = {name: Case(preset(name), codec_backend="reference") for name in names}
    assert_ordered(run_ranks(4, check_cases, cases, "never"))


@pytest.mark.slow
def test_reductions_under_input_gradients_order_every_access() -> None:
    plan = preset("zero3", granularity="module", recompute=True, overlap={"input_gradient": True})
    assert_ordered(run_ranks(4, check_cases, {"zero3": Case(plan)}, "never"))


@pytest.mark.slow
@pytest.mark.parametrize("answers", ["never", "always", "random"])
def test_all_presets_order_every_access(answers: Answer) -> None:
    plans = distinct_presets(2, 2, compute_dtype="float32") | {name: preset(name) for name in ENCODED}
    cases = {name: Case(plan, codec_backend="reference") for name, plan in plans.items()}
    assert_ordered(run_ranks(4, check_cases, cases, answers))


@pytest.mark.slow
@pytest.mark.parametrize("answers", ["never", "random"])
def test_every_way_of_sharding_orders_every_access(answers: Answer) -> None:
    plans = {
        f"{name} {partition}": plan
        for partition in ("intra", "inter")
        for name, plan in valid_plans(tw.Factor(local=2, nodes=2), partition).items()
    }
    assert len(plans) == 46
    cases = {name: Case(plan, micro_batches=2) for name, plan in plans.items()}
    assert_ordered(run_ranks(4, check_cases, cases, answers))


FIELDS = {
    "two micro-batches": {},
    "modules": {"granularity": "module"},
    "input gradients": {"granularity": "module", "overlap": {"input_gradient": True}},
    "modules again": {"granularity": "module", "recompute": True, "overlap": {"input_gradient": True}},
    "prefetch 3": {"prefetch": 3},
    "no prefetch": {"prefetch": 0},
    "small buckets": {"bucket_bytes": 1024},
    "no overlap": {"overlap": {"gather": False, "reduce": False, "sync": False, "spread": False}},
    "whole collectives": {"overlap": {"stages": False}},
    "keep the last": {"keep_gathered": "last"},
    "bf16 sums": {"accumulate_dtype": "bfloat16"},
}


@pytest.mark.slow
@pytest.mark.parametrize("answers", ["never", "random"])
@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3", "hpz", "thinwire", "zeropp"])
def test_options_order_every_access(name: str, answers: Answer) -> None:
    cases = {option: Case(preset(name, **fields), 2, codec_backend="reference") for option, fields in FIELDS.items()}
    assert_ordered(run_ranks(4, check_cases, cases, answers))


# -- loops -----------------------------------------------------------------------------------------------------


class Biased(nn.Linear):
    """A call may leave the bias out."""

    def forward(self, x: torch.Tensor, biased: bool = True) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias if biased else None)


class Tied(nn.Module):
    """Its head is its embedding, which the root unit holds."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList([Biased(8, 8) for _ in range(3)])

    def forward(self, ids: torch.Tensor, *, recompute: bool = False, ahead: bool = False) -> torch.Tensor:
        x = self.embedding(ids)
        if ahead:
            x = x + self.blocks[2].bias
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if recompute else block(x).tanh()
        return nn.functional.linear(x, self.embedding.weight)


def retained(model: nn.Module, ids: torch.Tensor) -> None:
    loss = model(ids).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def recomputed(model: nn.Module, ids: torch.Tensor) -> None:
    model(ids, recompute=True).square().mean().backward()


def read_ahead(model: nn.Module, ids: torch.Tensor) -> None:
    """A parameter is read before the forward of its block."""
    model(ids, ahead=True).square().mean().backward()


def evaluated(model: nn.Module, ids: torch.Tensor) -> None:
    with torch.no_grad():
        model(ids)
    model(ids).square().mean().backward()


def inspected(model: nn.Module, ids: torch.Tensor) -> None:
    model(ids).square().mean().backward()
    total = sum(parameter.square().sum() for parameter in model.parameters())
    assert total == total
    with tw.full_parameters(model):
        copy.deepcopy([parameter.detach() for parameter in model.parameters()])


def generated(model: nn.Module, ids: torch.Tensor) -> None:
    """Forwards between steps, from whole parameters, and from secondary shards where the plan can have some."""
    with torch.no_grad(), tw.generating(model):
        model(ids)
    params = runtime(model).plan.params
    with torch.no_grad(), tw.generating(model, keep="secondary" if params.nodes > 1 < params.local else None):
        model(ids)
        model(ids)
    model(ids).square().mean().backward()


class Stopped(Exception):
    """Raised by a module between the gather of the next one and its use."""


def stop(model: nn.Module, ids: torch.Tensor, way: contextlib.AbstractContextManager[Any]) -> None:
    """A forward that ends before its second block."""

    def refuse(*_: Any) -> None:
        raise Stopped

    handle = model.blocks[1].register_forward_pre_hook(refuse)  # type: ignore[union-attr]
    with pytest.raises(Stopped), way:
        model(ids)
    handle.remove()


def stopped(model: nn.Module, ids: torch.Tensor) -> None:
    """A gather is under way when the next forward begins, or nobody needs it before the update frees its unit."""
    stop(model, ids, contextlib.nullcontext())
    stop(model, ids, torch.no_grad())
    model(ids).square().mean().backward()


def stopped_at_last(model: nn.Module, ids: torch.Tensor) -> None:
    model(ids).square().mean().backward()
    stop(model, ids, torch.no_grad())


def accumulated(model: nn.Module, ids: torch.Tensor) -> None:
    """Backwards follow each other without a step in between."""
    for _ in range(2):
        model(ids).square().mean().backward()


def late(model: nn.Module, ids: torch.Tensor) -> None:
    """A backward in two parts: gradients of a unit come after it has been reduced."""
    x = model(ids).square().mean()
    y = model(ids).abs().mean()
    x.backward(retain_graph=True)
    (x + y).backward()


def nested(model: nn.Module, ids: torch.Tensor) -> None:
    """Backwards inside a backward: gradients of units come after their turn, all of a unit and one by itself."""
    first, second, last = model.blocks  # type: ignore[misc]
    x = model.embedding(ids)  # type: ignore[operator]
    for block, biased in ((first, False), (second, False), (first, True), (second, True), (last, True)):
        x = checkpoint(block, x, biased, use_reentrant=True)
    last(x).square().mean().backward()


def failed(model: nn.Module, ids: torch.Tensor) -> None:
    """A backward that fails while a reduction and a gather are under way, and one that follows it."""

    def refuse(_: torch.Tensor) -> None:
        raise Stopped

    def watch(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(refuse)

    handle = model.blocks[1].register_forward_hook(watch)  # type: ignore[union-attr]
    loss = model(ids).square().mean()
    handle.remove()
    with pytest.raises(Stopped):
        loss.backward()
    model(ids).square().mean().backward()


def logged(model: nn.Module, ids: torch.Tensor) -> None:
    """What programs read between a backward and a step."""
    model(ids).square().mean().backward()
    values = [p.grad.norm() for p in model.parameters() if p.grad is not None and p.grad.numel()]
    assert all(value == value for value in values)
    model.state_dict()


def timed(model: nn.Module, ids: torch.Tensor) -> None:
    with tw.timeline(model) as timeline:
        model(ids).square().mean().backward()
    assert timeline.spans


LOOPS = (
    retained, recomputed, read_ahead, evaluated, inspected, stopped, stopped_at_last, accumulated, late, nested, failed,
    logged, timed, generated,
)  # fmt: skip


def check_loops(names: tuple[str, ...], answers: Answer, loops: Sequence[Callable[..., None]]) -> Outcome:
    problems, issues = [], {}
    for name, loop in itertools.product(names, loops):
        with check_streams(answers) as check:
            torch.default_generator.manual_seed(0)
            model = tw.shard(Tied(), preset(name, bucket_bytes=1, grad_reduce="sum"), codec_backend="reference")
            optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-2)
            for _ in range(3):
                loop(model, torch.arange(6).view(2, 3))
                tw.clip_grad_norm_(model, 1.0)
                optim.step()
                optim.zero_grad()
        problems += [f"{name}, {loop.__name__}: {hazard}" for hazard in check.hazards]
        issues[f"{name}, {loop.__name__}"] = check.issues
    return problems, issues


@pytest.mark.slow
@pytest.mark.parametrize("answers", ["never", "always", "random"])
@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "zero3", "hpz", "thinwire", "zeropp"])
def test_loops_order_every_access(name: str, answers: Answer) -> None:
    assert_ordered(run_ranks(4, check_loops, [name], answers, LOOPS))


# -- what happens between a backward and the next step -----------------------------------------------------------


def clipped(model: nn.Module, optim: Any) -> None:
    tw.clip_grad_norm_(model, 1.0)
    optim.step()


def unclipped(model: nn.Module, optim: Any) -> None:
    optim.step()


def clipped_otherwise(model: nn.Module, optim: Any) -> None:
    tw.clip_grad_norm_(model, 1.0, norm_type=math.inf)
    optim.step()


def read_and_set(model: nn.Module, optim: Any) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad * 0.5
    optim.step()


def forgotten(model: nn.Module, optim: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = None
    optim.step()


def regularised(model: nn.Module, optim: Any) -> None:
    (1e-3 * sum(parameter.square().sum() for parameter in model.parameters())).backward()
    optim.step()


def discarded(model: nn.Module, optim: Any) -> None:
    optim.zero_grad()
    model(torch.arange(6).view(2, 3)).square().mean().backward()
    optim.step()


def written(model: nn.Module, optim: Any) -> None:
    optim.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def written_first(model: nn.Module, optim: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    optim.step()


def replaced(model: nn.Module, optim: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optim.step()


def edited(model: nn.Module, optim: Any) -> None:
    optim.step()
    with tw.full_parameters(model, write=True), torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)


def compared(model: nn.Module, optim: Any) -> None:
    if isinstance(optim, ShardedOptimizer):
        sums_of(optim.runtime, optim.fragments)
    optim.step()


def hooked(model: nn.Module, optim: Any) -> None:
    """Hooks of the optimizer see one update of all parameters."""
    handle = getattr(optim, "inner", optim).register_step_pre_hook(lambda *_: None)
    optim.step()
    handle.remove()


ENDINGS = (
    clipped, unclipped, clipped_otherwise, read_and_set, replaced, forgotten, regularised, discarded, written,
    written_first, edited, compared, hooked,
)  # fmt: skip

Ending = Callable[[nn.Module, Any], None]


def check_endings(name: str, own: bool, endings: tuple[Ending, ...]) -> None:
    """Steps that end in each way, with thinwire's optimizer or with torch's own, have no hazards."""
    for ending in endings:
        with check_streams("never") as check:
            torch.default_generator.manual_seed(0)
            model = tw.shard(Tied(), preset(name, bucket_bytes=1), codec_backend="reference")
            optim: Any = tw.optimizer(model, torch.optim.AdamW, lr=1e-2) if own else None
            optim = optim or torch.optim.AdamW(model.parameters(), lr=1e-2)
            for _ in range(3):
                model(torch.arange(6).view(2, 3)).square().mean().backward()
                ending(model, optim)
                optim.zero_grad()
        assert not check.hazards, f"{ending.__name__}: " + "\n".join(map(str, check.hazards[:3]))


@pytest.mark.slow
@pytest.mark.parametrize("endings", [ENDINGS])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("name", ["zero1", "zero3", "ddp", "thinwire"])
@on_ranks(4)
def test_every_end_of_a_step_orders_every_access(name: str, own: bool, endings: tuple[Ending, ...]) -> None:
    check_endings(name, own, endings)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fused"), [("zero3", False), *(("zeropp", fused) for fused in (False, True))])
@on_ranks(4)
def test_steps_with_a_loss_scale_order_every_access(name: str, fused: bool) -> None:
    """Steps in float16, one of which is skipped: by the device, if the optimizer is fused."""
    with check_streams("never") as check:
        torch.default_generator.manual_seed(0)
        plan = tw.Plan.preset(
            name, nodes=2, local=2, compute_dtype="float16", wire={"error_feedback": name == "zeropp"}
        )
        model = tw.shard(Tied(), plan, codec_backend="reference")
        scale = tw.LossScale(1024.0, growth_interval=1)
        optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-2, fused=fused, loss_scale=scale)
        for factor in (1.0, math.inf, 1.0, 1.0):
            scale.scale(factor * model(torch.arange(6).view(2, 3)).float().square().mean()).backward()
            optim.step()
            optim.zero_grad()
    assert not check.hazards, "\n".join(map(str, check.hazards[:3]))


@pytest.mark.slow
@on_ranks(4)
def test_the_end_of_encoding_orders_every_access() -> None:
    """Steps whose gradients are encoded no longer, and then again, from before an update on."""
    with check_streams("never") as check:
        torch.default_generator.manual_seed(0)
        plan = preset("zeropp", bucket_bytes=1, wire={"error_feedback": True, "schedule": 0.5})
        model = tw.shard(Tied(), plan, codec_backend="reference")
        optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-2)
        tw.progress(model, 0.0)
        for share in (0.0, 0.0, 1.0, 0.0, 0.0):
            model(torch.arange(6).view(2, 3)).square().mean().backward()
            tw.progress(model, share)
            optim.step()
            optim.zero_grad()
    assert not check.hazards, "\n".join(map(str, check.hazards[:3]))


@pytest.mark.slow
@on_ranks(4)
def test_clipping_of_slices_orders_every_access() -> None:
    """Clipping under tensor parallelism, where ranks measure the parameters that they alone hold."""
    with check_streams("never") as check:
        plan = grids.plan_for(2, 2, 1)
        model = tw.parallelize(grids.build("llama"), plan, loss=cross_entropy)
        optim = model.optimizer(torch.optim.AdamW, lr=1e-2)
        for step in grids.batches(plan, model.grid.sampler)[:2]:
            model.step(step)
            model.clip_grad_norm_(1.0)
            optim.step()
            optim.zero_grad()
    assert not check.hazards, "\n".join(map(str, check.hazards[:3]))


# -- workers ---------------------------------------------------------------------------------------------------


def test_a_drained_worker_has_nothing_left_to_do() -> None:
    with check_streams("never") as check:
        worker = streams.StreamWorker("lane", check.streams, streams.Recorder(check.streams))
        ticket = worker.submit(torch.zeros(8).zero_, (), "body")
        assert not ticket.done()
        worker.drain()
        assert ticket.done()


def test_who_waits_for_the_last_hop_releases_the_memory_of_all() -> None:
    with check_streams("never") as check:
        recorder = streams.Recorder(check.streams)
        first, second = (streams.StreamWorker(name, check.streams, recorder) for name in ("first", "second"))
        memory = torch.zeros(8)
        used = weakref.ref(memory)
        earlier = first.submit(memory.zero_, (), "first hop")
        later = second.submit(lambda: None, (earlier,), "second hop")
        del memory
        assert used() is not None
        later.wait()
        assert used() is None


# -- streams of the user's own ---------------------------------------------------------------------------------


class _SameForward(torch.autograd.Function):
    """Its forward changes nothing; its backward uses a stream."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, streams: SimulatedStreams, side: SimulatedStream) -> torch.Tensor:
        ctx.streams, ctx.side = streams, side
        return x.view_as(x)


class _LeaveInBackward(_SameForward):
    """Backward begins to run on a stream, as autograd on GPUs does for operations whose forward ran there."""

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.side.wait_stream(ctx.streams.current())
        ctx.side.inside = ctx.streams.use(ctx.side)
        ctx.side.inside.__enter__()
        return grads[0], None, None


class _ReturnInBackward(_SameForward):
    """Backward goes on where it ran before."""

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.side.inside.__exit__(None, None, None)
        ctx.streams.current().wait_stream(ctx.side)
        return grads[0], None, None


class OnTwoStreams(nn.Module):
    """Its middle block runs on a stream of its own."""

    def __init__(self, streams: SimulatedStreams) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self._streams, self._side = streams, streams.stream()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        streams, side = self._streams, self._side
        x = self.blocks[0](self.embedding(ids)).tanh()
        side.wait_stream(streams.current())
        with streams.use(side):
            x = self.blocks[1](_ReturnInBackward.apply(x, streams, side)).tanh()
        streams.current().wait_stream(side)
        return self.blocks[2](_LeaveInBackward.apply(x, streams, side))


def check_two_streams(name: str, answers: Answer) -> Outcome:
    """Hazards that the model alone does not have: autograd frees what it has saved while other streams may read it."""
    own = {(hazard.kind, hazard.other) for hazard in train_on_two_streams(None, answers).hazards}
    check = train_on_two_streams(name, answers)
    return [str(h) for h in check.hazards if (h.kind, h.other) not in own], {name: check.issues}


INPUT_GRADIENTS: dict[str, Any] = {"granularity": "module", "recompute": True, "overlap": {"input_gradient": True}}


def train_on_two_streams(name: str | None, answers: Answer) -> StreamCheck:
    with check_streams(answers) as check:
        torch.default_generator.manual_seed(0)
        model: nn.Module = OnTwoStreams(check.streams)
        optim: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if name is not None:
            fields = INPUT_GRADIENTS if name == "zero3, input gradients" else {}
            model = tw.shard(model, preset(name.partition(",")[0], bucket_bytes=1, **fields))
            optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-2)
        for _ in range(3):
            model(torch.arange(6).view(2, 3)).square().mean().backward()
            optim.step()
            optim.zero_grad()
    return check


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "answers"),
    [
        ("zero3", "never"),
        ("zero3, input gradients", "never"),
        *((name, "random") for name in ("ddp", "zero1", "zero2", "zero3", "hpz")),
    ],
)
def test_a_model_may_use_streams_of_its_own(name: str, answers: Answer) -> None:
    assert_ordered(run_ranks(4, check_two_streams, name, answers))


# -- planted faults --------------------------------------------------------------------------------------------


def start_at_once(_stream: SimulatedStream, _other: SimulatedStream) -> None:
    """Lanes do not wait for what computation has queued."""


def go_on(ticket: streams._StreamTicket) -> None:
    """Computation does not wait for lanes."""
    ticket._release()


submit = streams.StreamWorker.submit
make_ticket = streams._StreamTicket.__init__


def run_ahead(worker, body, after, label):  # type: ignore[no-untyped-def]
    """Moves do not wait for each other."""
    return submit(worker, body, (), label)


def let_go(ticket, worker, event, body, after, label):  # type: ignore[no-untyped-def]
    """Tickets keep no memory."""
    make_ticket(ticket, worker, event, lambda: None, (), label)


FAULTS: dict[str, tuple[type, str, Callable[..., object]]] = {
    "start": (SimulatedStream, "wait_stream", start_at_once),
    "wait": (streams._StreamTicket, "wait", go_on),
    "moves": (streams.StreamWorker, "submit", run_ahead),
    "memory": (streams._StreamTicket, "__init__", let_go),
}


@contextlib.contextmanager
def planted(fault: str) -> Iterator[None]:
    owner, name, replacement = FAULTS[fault]
    with mock.patch.object(owner, name, replacement):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("names", [("zero3",), ("zero1", "zero2", "hpz", "thinwire", "zeropp")])
@on_ranks(4)
def test_planted_faults_are_found(names: tuple[str, ...]) -> None:
    for name in names:
        kinds = {}
        for fault in FAULTS:
            with planted(fault):
                check, _ = checked(Case(preset(name), codec_backend="reference"), "never")
            kinds[fault] = {hazard.kind for hazard in check.hazards}
        assert "race" in kinds["start"], name
        assert {"race", "freed in use"} & kinds["wait"], name
        assert {"race", "freed in use"} & kinds["moves"], name
        assert "freed in use" in kinds["memory"], name


# -- what the host reads ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("answers", ["never", "random"])
@pytest.mark.parametrize("name", ["zero3", "zeropp"])
@on_ranks(4)
def test_a_save_in_the_background_writes_what_has_arrived(name: str, tmp_path: Path, answers: Answer) -> None:
    with check_streams(answers) as check:
        torch.default_generator.manual_seed(0)
        plan = preset(name, wire={"error_feedback": name == "zeropp"})
        model = tw.shard(Tied(), plan, codec_backend="reference")
        optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-2)

        def step(*, saves: bool = False) -> None:
            model(torch.arange(6).view(2, 3)).square().mean().backward()
            if saves:  # while gradients travel
                tw.save(model, optim, tmp_path / "early")
            tw.clip_grad_norm_(model, 1.0)
            optim.step()
            optim.zero_grad()

        step(saves=True)
        for number in range(2):  # the second copy goes where the first one was
            with tw.full_parameters(model):
                began = [value for p in model.parameters() for value in p.detach().flatten().tolist()]
            saving = tw.async_save(model, optim, tmp_path / f"{number}")
            step()
            step()
            saving.result()
        tw.load(model, optim, tmp_path / "1")
        with tw.full_parameters(model):
            saved = [value for p in model.parameters() for value in p.detach().flatten().tolist()]
    assert not check.hazards
    assert saved == began


def test_the_host_reads_what_has_arrived() -> None:
    with check_streams() as check:
        streams = check.streams
        value, copy_ = torch.full((), 3.0), torch.empty(())
        streams.send(value, copy_)
        arrived = streams.event()
        arrived.record(streams.current())
        assert math.isnan(float(copy_)), "nothing of use is there yet"
        assert [hazard.kind for hazard in check.hazards] == ["read before arrival"]
        arrived.synchronize()
        assert float(copy_) == 3.0
        assert len(check.hazards) == 1


# -- launches --------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A transformer block's nine parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(32) for _ in range(2))
        self.inside = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(4))
        self.widen = nn.ModuleList(nn.Linear(32, 96, bias=False) for _ in range(2))
        self.narrow = nn.Linear(96, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norms[0](x)
        query, key, value, output = self.inside
        x = x + output(query(h) * key(h) + value(h))
        h = self.norms[1](x)
        return x + self.narrow(self.widen[0](h) * self.widen[1](h))


def count_launches(name: str | None, depth: int) -> int:
    """Launches of the fourth step: with thinwire, or of torch alone in bf16."""
    torch.default_generator.manual_seed(0)
    model: nn.Module = nn.Sequential(*(Layer() for _ in range(depth)))
    with check_streams() as check:
        if name is None:
            model = model.bfloat16()
            optim: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, foreach=True)
        else:
            nodes = 1 if name in ("zero1", "zero3") else 2
            plan = tw.Plan.preset(name, nodes=nodes, local=4 // nodes)
            model = tw.shard(model, plan)
            optim = tw.optimizer(model, torch.optim.SGD, lr=1e-2, foreach=True)
        for _ in range(4):
            check.launches.clear()
            model(torch.randn(4, 32, dtype=torch.bfloat16)).sum().backward()
            optim.step()
            optim.zero_grad()
    return check.launches.total()


@pytest.mark.parametrize(
    ("name", "budget"),
    [
        ("zero3", 12),
        pytest.param("thinwire", 30, marks=pytest.mark.slow),
        pytest.param("zero1", 12, marks=pytest.mark.slow),
        pytest.param("zeropp", 30, marks=pytest.mark.slow),
    ],
)
@on_ranks(4)
def test_units_launch_little(name: str, budget: int) -> None:
    """For each unit and step, beyond what torch alone launches; what does not depend on the depth cancels out."""
    ours, plain = (count_launches(which, 5) - count_launches(which, 3) for which in (name, None))
    assert 0 < (ours - plain) / 2 <= budget


@pytest.mark.slow
@on_ranks(4)
def test_times_are_taken_once_somebody_asks() -> None:
    """Events of a step before anybody asks for times, and of one after."""
    counts = []
    with check_streams("random") as check:
        model = tw.shard(nn.Sequential(*(Layer() for _ in range(3))), tw.Plan.preset("zero3", nodes=1, local=4))
        optim = tw.optimizer(model, torch.optim.SGD, lr=1e-2)
        for _ in range(4):
            before = check.streams.events
            model(torch.randn(4, 32, dtype=torch.bfloat16)).sum().backward()
            optim.step()
            optim.zero_grad()
            counts.append(check.streams.events - before)
            if len(counts) > 2:
                assert set(tw.exposed(model).values()) == {0.0}  # what simulated events say
                assert tw.worked(model)["gather"] == {"transfer": 0.0, "codec": 0.0}
    assert counts[2] < counts[3]
    assert counts[2] <= 4 * 5  # one for each collective: two gathers, a reduction and some to spare for four units
