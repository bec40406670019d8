"""Training with codecs: lossless codecs change nothing, lossy ones stay close, and the program predicts the bytes."""

from __future__ import annotations

import math
import re
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tests.support.ranks import on_ranks
from tests.support.training.edge import computed
from tests.support.training.parity import (
    EPS,
    LR,
    Case,
    Gap,
    alone,
    assert_parity,
    build,
    gap,
    in_part,
    loss_of,
    part_of,
    sharded,
)
from tests.support.training.program import follow_many
from torch import nn

import thinwire as tw
from thinwire.agreement import Typed
from thinwire.collectives.group import control
from thinwire.collectives.messages import Messages
from thinwire.cost.memory.states import feedback_bytes
from thinwire.errors import SpecError, UsageError
from thinwire.program import Lane, idle_codecs
from thinwire.sharding.api import runtime
from thinwire.testing import run_ranks

pytestmark = pytest.mark.ranks

EVERY_KIND = ("gather", "reduce_intra", "reduce_inter", "spread")


def plan(name: str, codec: str | None = None, nodes: int = 2, local: int = 2, **fields: object) -> tw.Plan:
    """A preset, with one codec for everything or its own."""
    if codec is not None:
        fields["wire"] = dict.fromkeys(EVERY_KIND, codec) | {"error_feedback": False}
    return tw.Plan.preset(name, nodes=nodes, local=local, **fields)


def lossless(nodes: int, local: int) -> dict[str, tw.Plan]:
    """Plans whose messages are all encoded without loss, most of them for bf16 as well."""
    cases = {}
    for name in ("zero1", "zero3", "mics", "amsp-13b", "zero1-node", "ddp", "hpz", "zero2"):
        for partition in ("intra", "inter"):
            chosen = plan(name, "mpc", nodes, local, partition=partition, compute_dtype="float32")
            cases[f"{name} {partition}"] = chosen
            cases[f"{name} {partition}, bf16"] = chosen.with_(compute_dtype="bfloat16")
        cases[f"{name} exp3"] = plan(name, "exp3", nodes, local, bucket_chunks=2, gather_bytes=1 << 12)
    return cases


def changed_bits(cases: dict[str, tw.Plan]) -> list[str]:
    """Plans of which losses, norms or parameters are not those without codecs."""
    changed = []
    for name, chosen in cases.items():
        ours, exact = (sharded(Case(each, micro_batches=2)) for each in (chosen, chosen.uncompressed()))
        alike = (ours.losses, ours.norms) == (exact.losses, exact.norms)
        if not alike or not all(map(torch.equal, ours.parameters, exact.parameters)):
            changed.append(name)
    return changed


@in_part
def test_lossless_codecs_change_no_bit(part: str) -> None:
    assert run_ranks(4, changed_bits, part_of(part, lossless(2, 2)), timeout=300) == [[]] * 4


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "local"), [(3, 2), (1, 4), (4, 1), (2, 1), (1, 2)])
def test_lossless_codecs_change_no_bit_on_any_mesh(nodes: int, local: int) -> None:
    assert run_ranks(nodes * local, changed_bits, lossless(nodes, local), timeout=300) == [[]] * (nodes * local)


def rounded(cases: dict[str, tuple[tw.Plan, float]]) -> dict[str, Gap]:
    world = next(iter(cases.values()))[0].world
    return {name: gap(sharded(Case(chosen)), alone(world, 1)) for name, (chosen, _) in cases.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "local"), [(2, 2), (3, 2)])
def test_rounded_messages_stay_near_means(nodes: int, local: int) -> None:
    """The model has vectors and matrices. A sum in place of a mean, or a mean over nodes alone, would double the norm
    and what vectors that start at zero become."""
    bounds = {"int8:64": 0.05, "int4:64": 0.5, "zfp:16": 0.03}
    cases = {
        f"{name} {codec}": (
            plan(name, None, nodes, local, compute_dtype="float32").with_(
                wire={"gather": "int8:64", "reduce_intra": codec, "reduce_inter": codec, "spread": "none"}
            ),
            bound,
        )
        for name in ("zero1-node", "zero3", "mics", "ddp")
        for codec, bound in bounds.items()
    }
    for rank, result in enumerate(run_ranks(nodes * local, rounded, cases)):
        for name, difference in result.items():
            assert difference.parameters < cases[name][1], (rank, name, difference)
            assert difference.norms < 0.03, (rank, name, difference)


@pytest.mark.slow
def test_the_program_knows_the_bytes() -> None:
    plans = [plan(name, partition="intra", bucket_bytes=1 << 12) for name in ("thinwire", "zeropp-8bit", "zeropp")]
    plans += [
        plan("thinwire", partition="inter"),
        plan("mics", "int4:64"),
        plan("zero2", "zfp:8"),
        plan("ddp", "bf16", reduce_dtype="float32"),
        plan("zero1-node", "int8:64").with_(wire={"scatter": "int4:64"}),
        plan("zero1", "int8:64", bucket_chunks=3).with_(wire={"scatter": "zfp:16"}),
        plan("zero1").with_(wire={"scatter": "int4:64", "exclude": ["embed*"]}),
        plan("amsp-13b", "int4:64", nodes=1, local=4).with_(wire={"scatter": "int8:64"}),
        plan("zero1", wire={"policy": "zhybrid:24-8"}),
        plan("thinwire", wire={"spread": "zfp:16", "reduce_intra": "fp16", "error_feedback": True}),
        plan("hpz", "zfp:17"),
    ]
    for name in ("zeropp", "thinwire"):
        plans.append(plan(name).with_(wire={"exclude": ["embed*", "*norm*"]}))
    run_ranks(4, follow_many, plans, 2)


def by_lane(plans: dict[str, tw.Plan]) -> dict[str, dict[str, int]]:
    """Bytes of gradients that this rank sends in a step, by lane."""
    sent = {}
    for name, chosen in plans.items():
        model = tw.shard(build(), chosen)
        optim = tw.optimizer(model, torch.optim.AdamW, lr=LR)
        losses_of(model, optim, 0, 1)
        tw.traffic(model)
        losses_of(model, optim, 1, 2)
        sent[name] = {lane: sum(counted.values()) for lane, counted in tw.traffic(model).items()}
    return sent


def test_codecs_that_would_not_shorten_messages_send_what_none_sends() -> None:
    """As the program says, to the byte. Sums of a lossless codec are as short as without it, but for headers."""
    left_out, half = plan("zero1-node", "zfp:24"), plan("zero1", wire={"policy": "zhybrid:24-8"})
    followed = [left_out, left_out.uncompressed(), half, half.uncompressed()]
    for sent in run_ranks(4, follow_many, followed, 2):
        (_, of_left_out), (_, of_node), (_, of_half), (_, of_zero1) = sent
        assert of_left_out == of_node
        assert of_half < 0.8 * of_zero1
    sums = {"mpc": plan("zero3", wire={"reduce_inter": "mpc"}), "none": plan("zero3")}
    for lanes in run_ranks(4, by_lane, sums):
        assert lanes["mpc"]["reduce"] < 1.01 * lanes["none"]["reduce"]


@pytest.mark.slow
def test_reductions_to_owners_have_a_codec_of_their_own() -> None:
    """ZeRO-1 inside a node: the reduce-scatter to the owners is apart from the all-reduce of their replicas."""
    alike = plan("zero1-node", "int4:64")
    plans = {"alike": alike, "apart": alike.with_(wire={"scatter": "none"}), "exact": alike.uncompressed()}
    for sent in run_ranks(4, by_lane, plans):
        assert sent["alike"]["reduce"] < sent["apart"]["reduce"] == sent["exact"]["reduce"]
        assert sent["alike"]["sync"] == sent["apart"]["sync"] < sent["exact"]["sync"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero1", "zero2"])
def test_a_lossless_scatter_keeps_gradients_exact_whatever_others_lose(name: str) -> None:
    """All reductions lead to owners, so the codecs of other reductions are not used."""
    lossy = {"reduce_intra": "int2:64", "reduce_inter": "int2:64"}
    cases = {}
    for codec in ("none", "mpc"):
        chosen = plan(name, compute_dtype="float32").with_(wire={**lossy, "scatter": codec})
        assert len([line for line in idle_codecs(chosen) if "wire.scatter" in line]) == 2
        cases[codec] = Case(chosen, micro_batches=2)
    assert_parity(4, cases)


def test_scatter_rounds_where_other_gradients_are_exact() -> None:
    chosen = plan("zero1-node", compute_dtype="float32").with_(wire={"spread": "none", "error_feedback": False})
    cases = {"scatter": (chosen.with_(wire={"scatter": "int4:64"}), 0.5)}
    for result in run_ranks(4, rounded, cases):
        assert 1e-4 < result["scatter"].parameters < 0.5


@on_ranks(4)
def test_whole_parameters_are_exact() -> None:
    """Whole parameters never pass through a codec: without an update, they equal the initial weights."""
    initial = [parameter.detach().clone() for parameter in build().parameters()]
    model = tw.shard(build(), plan("zeropp", compute_dtype="float32"))
    optim = tw.optimizer(model, torch.optim.AdamW, lr=0.0)
    tokens = torch.arange(18).view(2, 9)
    loss_of(model, tokens).backward()
    optim.step()
    optim.zero_grad()
    loss_of(model, tokens)  # gathered through the codec, and never let go by a backward
    with tw.full_parameters(model):
        for parameter, expected in zip(model.parameters(), initial, strict=True):
            assert torch.equal(parameter, expected)


def small_updates(chosen: tw.Plan) -> tuple[torch.Tensor, bool]:
    """How far masters come in updates smaller than what the codec tells apart, and whether the P shard holds them."""
    model = tw.shard(build(), chosen)
    optim = tw.optimizer(model, torch.optim.SGD, lr=1e-4)
    start = [owned.value.detach().clone() for owned in optim.fragments]
    for _ in range(8):
        loss_of(model, torch.arange(18).view(2, 9)).backward()
        optim.step()
        optim.zero_grad()
    runtime(model).join_spreads()
    moved = [(owned.value.detach() - s).view(-1) for owned, s in zip(optim.fragments, start, strict=True)]
    return torch.cat(moved), all(torch.equal(owned.value.view(-1), owned.held) for owned in optim.fragments)


@pytest.mark.slow
@on_ranks(4)
def test_fp32_parameters_that_travel_rounded_keep_masters() -> None:
    exact = plan("zero1", compute_dtype="float32")
    expected, same = small_updates(exact)
    moved, held = small_updates(exact.with_(wire={"spread": "int8:64"}))
    assert same
    assert not held
    assert float((moved - expected).norm()) < 0.05 * float(expected.norm())


@pytest.mark.parametrize("value", [math.nan, math.inf])
@on_ranks(4)
def test_a_gradient_that_is_not_finite_skips_the_step_everywhere(value: float) -> None:
    """One rank's gradient is not finite for one step."""
    model = tw.shard(build(), plan("thinwire", compute_dtype="bfloat16"))
    optim = tw.optimizer(model, torch.optim.AdamW, lr=LR, skip_nonfinite=True)
    tokens = torch.arange(18).view(2, 9)
    before = {}
    finite = []
    for step in range(3):
        loss = loss_of(model, tokens)
        if step == 1 and torch.distributed.get_rank() == 2:
            loss = loss * value
        loss.backward()
        norm = tw.clip_grad_norm_(model, 1.0)
        finite.append(bool(torch.isfinite(norm)))
        with tw.full_parameters(model):
            before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        optim.step()
        optim.zero_grad()
        with tw.full_parameters(model):
            moved = any(not torch.equal(p, before[name]) for name, p in model.named_parameters())
            assert all(torch.isfinite(p).all() for p in model.parameters())
        assert moved == finite[-1]
    assert finite == [True, False, True]


@pytest.mark.slow
@on_ranks(4)
def test_error_feedback_is_kept_where_something_is_lost() -> None:
    for on in (True, False):
        model = tw.shard(build(), plan("thinwire", wire={"error_feedback": on}))
        losses_of(model, tw.optimizer(model, torch.optim.AdamW, lr=LR), 0, 1)
        assert any(lost.any() for lost in runtime(model).reducer.feedback.lost.values()) is on


@on_ranks(4)
def test_error_feedback_follows_the_codec_of_each_reduction() -> None:
    """Optimizer states inside a node, replicas across: which reductions' rounding errors are kept."""
    lossy, exact = "int4:64", "none"
    for across, scatter, kept in (
        (lossy, lossy, {"shard", "replica"}),
        (exact, lossy, {"shard"}),
        (lossy, exact, {"replica"}),
    ):
        wire = {"reduce_intra": exact, "reduce_inter": across, "scatter": scatter, "error_feedback": True}
        chosen = plan("zero1-node", compute_dtype="float32", wire=wire)
        assert idle_codecs(chosen) == ()
        model = tw.shard(build(), chosen)
        losses_of(model, tw.optimizer(model, torch.optim.AdamW, lr=LR), 0, 1)
        lost = runtime(model).reducer.feedback.lost
        assert {key.partition("/")[0] for key, errors in lost.items() if errors.any()} == kept


@on_ranks(4)
def test_rounding_errors_take_what_the_planner_predicts() -> None:
    for nodes, local, name in ((2, 2, "thinwire"), (4, 1, "thinwire"), (1, 4, "ddp"), (4, 1, "ddp"), (2, 2, "mics")):
        chosen = plan(name, "int8:64", nodes, local).with_(wire={"error_feedback": True})
        model = tw.shard(build(), chosen)
        losses_of(model, tw.optimizer(model, torch.optim.AdamW, lr=LR), 0, 1)
        numel = sum(buffer.numel for unit in runtime(model).units for buffer in unit.info.buffers)
        kept = sum(lost.nbytes for lost in runtime(model).reducer.feedback.lost.values())
        assert kept == pytest.approx(feedback_bytes(chosen, numel), rel=0.02), (nodes, local, name)


@pytest.mark.slow
@on_ranks(4)
def test_gradients_are_encoded_for_a_share_of_training() -> None:
    """Gradient bytes sent in each of four steps are those that the program says."""
    model = tw.shard(build(), plan("zeropp").with_(wire={"schedule": 0.5}))
    optim = tw.optimizer(model, torch.optim.AdamW, lr=LR)
    with pytest.raises(UsageError, match=r"thinwire\.progress"):
        loss_of(model, torch.arange(18).view(2, 9)).backward()
    totals = []
    for step in range(4):
        tw.progress(model, step / 4)
        tw.traffic(model)
        losses_of(model, optim, step, step + 1)
        predicted, sent = runtime(model).schedule.programs.program(1).traffic(), tw.traffic(model)
        totals.append(sum(sum(sent[lane].values()) for lane in ("reduce", "sync")))
        assert totals[-1] == sum(sum(predicted[lane].values()) for lane in (Lane.REDUCE, Lane.SYNC))
    assert totals[0] == totals[1] < totals[2] / 3
    assert totals[2] == totals[3]


@pytest.mark.slow
@on_ranks(4)
def test_rounding_errors_of_a_checkpoint_count_while_gradients_are_still_encoded(tmp_path: Path) -> None:
    """``wire.schedule`` ends them, and not the first report of progress after a start."""
    chosen = plan("zero1").with_(wire={"dp": "int2:32", "error_feedback": True, "schedule": 0.5})

    def steps(model: torch.nn.Module, optim: tw.ShardedOptimizer, first: int) -> list[float]:
        losses = []
        for step in (first, first + 1):
            tw.progress(model, step / 8)
            losses += losses_of(model, optim, step, step + 1)
        return losses

    model, optim = started(chosen)
    steps(model, optim, 0)
    tw.save(model, optim, tmp_path / "checkpoint")
    whole = steps(model, optim, 2)
    again, restored = started(chosen)
    tw.load(again, restored, tmp_path / "checkpoint")
    assert steps(again, restored, 2) == whole


def one_step(chosen: tw.Plan) -> dict[str, torch.Tensor]:
    """Parameters after one step."""
    model = tw.shard(build(), chosen)
    optim = tw.optimizer(model, torch.optim.AdamW, lr=LR, eps=EPS)
    losses_of(model, optim, 0, 1)
    with tw.full_parameters(model):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", ["zero1-node", pytest.param("mics", marks=pytest.mark.slow), "zero3"])
@on_ranks(4)
def test_excluded_parameters_are_sent_uncompressed(name: str) -> None:
    """They are equal under a plan with codecs and exclusions and under one without codecs, and no others are."""
    chosen = plan(name, compute_dtype="float32")
    codecs = {"reduce_intra": "int4:64", "reduce_inter": "int4:64", "gather": "none"}
    exact = one_step(chosen)
    encoded = one_step(chosen.with_(wire={**codecs, "exclude": ["embedding.weight", "*norm*"]}))
    for each, value in encoded.items():
        assert torch.equal(value, exact[each]) == (each == "embedding.weight" or "norm" in each), each


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero1", "zero1-node"])
@on_ranks(2)
def test_a_unit_of_which_a_part_is_excluded_waits_for_all_of_it(name: str) -> None:
    """Biases are sent uncompressed and arrive long before matrices, which are decoded: the forward after an update sees
    matrices as they are after all decoding has ended."""
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64))
    tw.shard(model, plan(name, nodes=1, local=2).with_(wire={"spread": "int8:64", "exclude": ["*bias*"]}))
    optim = tw.optimizer(model, torch.optim.SGD, lr=1.0)
    x = torch.linspace(-1, 1, 256).view(4, 64).to(model[0].weight.dtype)
    decode = Messages.decode

    def slow(messages: Messages, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.2)
        decode(messages, *args, **kwargs)

    with mock.patch.object(Messages, "decode", slow):
        model(x).sum().backward()
        optim.step()
        seen: list[torch.Tensor] = []
        for layer in (model[0], model[2]):
            layer.register_forward_hook(lambda layer, args, output: seen.append(layer.weight.detach().clone()))
        with torch.no_grad():
            model(x)
    runtime(model).join_spreads()
    time.sleep(1.0)  # transfers that nothing has waited for
    for layer, value in zip((model[0], model[2]), seen, strict=True):
        assert torch.equal(computed(layer.weight), value)


def losses_of(model: nn.Module, optim: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        tokens = (torch.arange(18) * (step + 1) + torch.distributed.get_rank()).remainder(50).view(2, 9)
        loss = loss_of(model, tokens)
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses


def started(chosen: tw.Plan) -> tuple[nn.Module, tw.ShardedOptimizer]:
    model = tw.shard(build(), chosen)
    return model, tw.optimizer(model, torch.optim.AdamW, lr=LR)


def distance_from_masters(chosen: tw.Plan) -> tuple[float, float, bool]:
    """After some steps: how far what ranks hold is from the masters, relative to the masters and to the rounding of
    masters to the compute dtype; and whether all ranks hold the same."""
    model, optim = started(chosen)
    losses_of(model, optim, 0, 8)
    runtime(model).join_spreads()
    squares = torch.zeros(3, dtype=torch.float64)
    for owned in optim.fragments:
        master = owned.value.detach().reshape(-1)
        parts = (owned.held.float() - master, master.bfloat16().float() - master, master)
        squares += torch.stack([part.double().square().sum() for part in parts])
    lost, rounding, masters = squares.sqrt().tolist()
    held = torch.cat([buffer.shard for unit in runtime(model).units for buffer in unit.buffers])
    everyone = control().all_gather_typed(held.float().tolist(), Typed[list[float]](list[float]))
    return lost / masters, lost / rounding, all(other == everyone[0] for other in everyone)


@pytest.mark.slow
@pytest.mark.parametrize("partition", ["intra", "inter"])
@on_ranks(4)
def test_differences_are_spread_more_exactly_than_parameters(partition: str) -> None:
    whole = plan("zero1", partition=partition).with_(wire={"spread": "int4:64"})
    lost, _, same = distance_from_masters(whole)
    assert lost > 0.05
    assert same
    _, roundings, same = distance_from_masters(whole.with_(wire={"spread_difference": True}))
    assert roundings < 3, "not much more than what rounding to bf16 loses anyway"
    assert same, "ranks hold different parameters"


@on_ranks(4)
def test_replicas_that_round_at_random_hold_the_same() -> None:
    chosen = plan("thinwire", compute_dtype="bfloat16").with_(wire={"spread": "int4:64,stochastic"})
    assert distance_from_masters(chosen)[2], "the nodes hold different parameters"


DIFFERENCES = {"spread": "int4:64", "spread_difference": True}
STOCHASTIC = {"spread": "int8:64,stochastic", "reduce_intra": "int8:64,stochastic", "reduce_inter": "int4:64"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chosen", "other"),
    [
        (plan("zero1", partition="intra").with_(wire=DIFFERENCES), "zero3"),
        (plan("zero1", partition="inter").with_(wire=DIFFERENCES), "zero3"),
        (plan("thinwire").with_(wire={**STOCHASTIC, "error_feedback": True}), "zeropp"),
    ],
    ids=["differences", "differences of fragments", "at random"],
)
@on_ranks(4)
def test_a_resumed_run_continues_exactly(tmp_path: Path, chosen: tw.Plan, other: str) -> None:
    """The second half of a run is the same from a checkpoint, and nearly the same under another plan."""
    model, optim = started(chosen)
    losses_of(model, optim, 0, 3)
    tw.save(model, optim, tmp_path / "checkpoint")
    whole = losses_of(model, optim, 3, 6)
    for each, wanted in ((chosen, whole), (plan(other), pytest.approx(whole, rel=0.05))):
        model, optim = started(each)
        tw.load(model, optim, tmp_path / "checkpoint")
        assert losses_of(model, optim, 3, 6) == wanted


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"wire": {"gather": "exp3"}, "compute_dtype": "float32"}, "exp3 cannot encode float32"),
        ({"wire": {"scatter": "exp3"}, "compute_dtype": "float32"}, "wire.scatter: exp3 cannot encode float32"),
        ({"wire": {"spread": "mpc", "spread_difference": True}}, "spread_difference = true has nothing to make up for"),
    ],
)
def test_codecs_that_cannot_encode_the_model_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        tw.shard(nn.Linear(8, 8), tw.Plan.preset("zero1", nodes=1, local=2, **fields))


def test_an_exclusion_that_matches_nothing_is_refused() -> None:
    chosen = tw.Plan.preset("zero1", nodes=1, local=1, wire={"reduce_intra": "int8:256", "exclude": ["norm*"]})
    with pytest.raises(SpecError, match=r"'norm\*' matches no parameter; names look like 'weight'"):
        tw.shard(nn.Linear(8, 8), chosen)


def test_codecs_without_work_are_named() -> None:
    alone_in_a_node = tw.Plan.preset("zeropp", nodes=1, local=4)
    assert any("one node" in line for line in idle_codecs(alone_in_a_node))
    assert idle_codecs(plan("zeropp")) == ()
    assert any("wire.gather" in line for line in idle_codecs(plan("thinwire", "int8:256")))
    one_by_one = plan("zeropp", bucket_chunks=4, overlap={"stages": False})
    assert any("bucket_chunks = 4 gains nothing" in line for line in idle_codecs(one_by_one))
    assert idle_codecs(one_by_one.with_(bucket_chunks=1)) == ()
    in_buckets = plan("zero1", wire={"reduce_inter": "int8:256"}, bucket_chunks=4, overlap={"stages": False})
    assert not any("bucket_chunks" in line for line in idle_codecs(in_buckets))
    assert any("live_bytes = 9 is not used" in line for line in idle_codecs(plan("zero1", live_bytes=9)))
    assert idle_codecs(plan("zero3", live_bytes=9)) == ()
