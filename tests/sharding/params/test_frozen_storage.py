"""Frozen parameters that are kept encoded train as their decoded values do, bit for bit, and take the bytes that plans
say."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import on_ranks
from tests.support.training.quantized import rounded
from torch import nn

import thinwire as tw
from thinwire.cost.memory.peak import Memory, memory
from thinwire.cost.memory.states import frozen_bytes
from thinwire.errors import CheckpointError, SpecError
from thinwire.integrations.common.optimizers import is_sharded
from thinwire.program import host_bytes
from thinwire.sharding.api import runtime
from thinwire.sharding.checkpointing.saved_model import SavedModel
from thinwire.sharding.checkpointing.stored_parameters import frozen
from thinwire.spec import ModelSpec, Plan
from thinwire.testing import run_ranks
from thinwire.weights.owned import snapshot

pytestmark = pytest.mark.ranks

WORLD, WIDTH = 4, 24
INT8, INT4 = "int8:256", "int4:64"


class Adapted(nn.Module):
    """A frozen linear layer with a bias and a trained adapter, as LoRA has them."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 3, bias=False), nn.Linear(3, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x)) + self.up(self.down(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Adapted(), Adapted()
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.first(self.norm(x)))


class Model(nn.Module):
    """Units that mix frozen and trained parameters, one that is frozen, and one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, WIDTH).requires_grad_(False)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build() -> Model:
    torch.default_generator.manual_seed(0)
    return Model()


def plan(name: str, codec: str = INT8, **changes: Any) -> Plan:
    changes = {"compute_dtype": "float32", **changes}
    made = Plan.preset(name, nodes=2, local=2, frozen={"storage": codec}, **changes)
    return made.with_(wire={"gather": "none"})  # which would round frozen parameters of the other model


def samples(step: int, rank: int) -> torch.Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(1000 * rank + step))


def train(model: nn.Module, optim: torch.optim.Optimizer, batches: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """The losses and the gradients of some steps."""
    found = []
    for micro_batches in batches:
        losses = []
        for x in tw.micro_batches(model, micro_batches) if is_sharded(model) else micro_batches:
            loss = model(x).float().square().mean()
            loss.backward()
            losses.append(loss.detach())
        found += losses
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                grad = parameter.grad
                found.append((grad.full_tensor() if is_sharded(model) else grad).clone())
                assert found[-1].shape == parameter.shape, name
        optim.step()
        optim.zero_grad()
    return found


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    if is_sharded(model):
        return tw.optimizer(model, torch.optim.AdamW, lr=1e-2)
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


@pytest.mark.parametrize(
    ("names", "codec"),
    [
        (("zero1", "hpz"), INT8),
        (("zero3", "ddp"), "int4:64,hadamard"),
        pytest.param(("zero3", "ddp"), INT8, marks=pytest.mark.slow),
        pytest.param(("zero3", "ddp", "zero1", "hpz"), INT4, marks=pytest.mark.slow),
        pytest.param(("amsp-30b", "mics"), INT8, marks=pytest.mark.slow),
    ],
    ids=str,
)
@on_ranks(WORLD)
def test_training_equals_one_process_with_rounded_weights(names: tuple[str, ...], codec: str) -> None:
    """Every rank has the same data, so that the means of gradients are exact."""
    batches = [[samples(7 * step, 0)] for step in range(3)]
    for each in (plan(name, codec) for name in names):
        alone = rounded(build(), str(each.frozen.storage))
        want = train(alone, adamw(alone), batches)
        model = tw.shard(build(), each)
        got = train(model, adamw(model), batches)
        assert all(map(torch.equal, got, want)), each.describe()
        for name, value in tw.full_state_dict(model).items():
            assert torch.equal(value, alone.state_dict()[name]), (name, each.describe())


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"compute_dtype": "bfloat16"},
    "modules": {"granularity": "module"},
    "modules together": {"granularity": "module", "gather_bytes": "1MiB"},
    "together": {"gather_bytes": "1MiB", "reduce_bytes": "1MiB"},
    "recomputed": {"recompute": True},
    "kept": {"persist_bytes": 1000, "reuse_bytes": 3000},
    "on the host": {"residence": {"params": "host", "optimizer": "host-stream", "gradients": "host"}},
    "whole tensors": {"partition": "inter"},
}


@pytest.mark.parametrize(
    "way",
    [way if way == "on the host" else pytest.param(way, marks=pytest.mark.slow) for way in WAYS],
)
@pytest.mark.parametrize(
    "names",
    [
        ("zero3", "ddp", "hpz"),
        pytest.param(("zeropp-8bit", "thinwire", "zero1-node", "hpz again", "mics"), marks=pytest.mark.slow),
    ],
    ids=str,
)
@on_ranks(WORLD)
def test_every_way_to_train(names: tuple[str, ...], way: str) -> None:
    """Ranks have data of their own: the same plan without the key trains a model of rounded weights alike."""
    rank, micro_batches = torch.distributed.get_rank(), 3 if way in ("plain", "kept", "on the host") else 1
    batches = [[samples(7 * step + k, rank) for k in range(micro_batches)] for step in range(3)]
    for name in names:
        each = plan(name.removesuffix(" again"), secondary_reuse=name.endswith("again"), **WAYS[way])
        dtype = getattr(torch, each.compute_dtype)
        plain = tw.shard(rounded(build(), str(each.frozen.storage), dtype), each.with_(frozen={"storage": "none"}))
        want = train(plain, adamw(plain), batches)
        model = tw.shard(build(), each)
        assert all(map(torch.equal, train(model, adamw(model), batches), want)), each.describe()
        want, got = tw.full_state_dict(plain), tw.full_state_dict(model)
        assert all(torch.equal(value, got[name]) for name, value in want.items()), each.describe()


# -- bytes ---------------------------------------------------------------------------------------------------------


def held(model: nn.Module) -> dict[str, int]:
    """Bytes that this rank keeps of parameters: in its P shard, of those that are frozen, and in its secondary one."""
    buffers = [buffer for unit in runtime(model).units for buffer in unit.buffers]
    frozen = [buffer for buffer in buffers if not buffer.layout.trainable]
    return {
        "params": sum(buffer.shard.nbytes for buffer in buffers),
        "frozen": sum(buffer.shard.nbytes for buffer in frozen),
        "secondary": sum(buffer.secondary.nbytes for buffer in buffers if buffer.secondary is not None),
        "gathered": sum(buffer.full.untyped_storage().nbytes() for buffer in buffers if buffer.gathered),
    }


def predicted(model: nn.Module, plan: Plan) -> Memory:
    """The memory of the units that the model has; the shape of a model counts for activations only."""
    infos = [unit.info for unit in runtime(model).units]
    return memory(ModelSpec.preset("llama-2-7b"), plan, infos, seq=8, overhead=0)


@on_ranks(WORLD)
def test_memory_is_what_plans_predict() -> None:
    on_host = {"residence": {"params": "host"}}
    plans = [plan(name, INT8) for name in ("ddp", "zero1", "zero3", "hpz", "mics")]
    plans += [plan("zero3", INT4), plan("zero3", compute_dtype="bfloat16")]
    plans += [plan(name, **on_host) for name in ("zero3", "ddp")]
    for each in plans:
        model, plain = tw.shard(build(), each), tw.shard(build(), each.with_(frozen={"storage": "none"}))
        before, after = held(plain), held(model)
        want = predicted(model, each)
        if not each.residence.streams_params:
            assert (after["params"], after["secondary"]) == (want.params, want.secondary), each.describe()
        else:
            assert after["params"] == host_bytes(each, [unit.info for unit in runtime(model).units])
        assert after["frozen"] == frozen_bytes(each, [unit.info for unit in runtime(model).units])[0]
        train(model, adamw(model), [[samples(0, 0)]])
        assert held(model) == {**after, "gathered": 0}, "nothing that was decoded stays"
        if each is plans[0]:
            few = "a quarter, scales, padding to blocks, and what stays as it is"
            assert after["frozen"] < before["frozen"] / 2, few


# -- checkpoints ---------------------------------------------------------------------------------------------------


def messages(model: nn.Module) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """What this rank keeps of each frozen matrix, with where it begins."""
    found = {}
    for buffer, slot, offset, run in frozen(runtime(model).sharded):
        if buffer.stored is not None:
            found[f"{slot.name} {offset}"] = (buffer.stored.codes(run).clone(), buffer.stored.scales(run).clone())
    return found


def check_resume(path: str, first: Plan, second: Plan) -> None:
    """Three steps, a checkpoint, three more: the same from the checkpoint, into a model with other values."""
    rank = torch.distributed.get_rank()
    batches = [[samples(step, rank)] for step in range(6)]
    model = tw.shard(build(), first)
    optim = adamw(model)
    train(model, optim, batches[:3])
    tw.save(model, optim, path)
    saved = {name: value.clone() for name, value in tw.full_state_dict(model).items()}
    want = train(model, optim, batches[3:])
    other = build()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(-3.0)
    other = tw.shard(other, second)
    optim = adamw(other)
    train(other, optim, batches[:1])
    tw.load(other, optim, path)
    loaded = tw.full_state_dict(other)
    reader = SavedModel(Path(path))
    for name, value in saved.items():
        assert torch.equal(reader.read(name), value), name
        if first.frozen == second.frozen or second.frozen.storage.is_none:
            assert torch.equal(loaded[name], value), name
    if first == second:
        mine, its = messages(model), messages(other)
        assert mine.keys() == its.keys()
        assert all(torch.equal(a, b) for key in mine for a, b in zip(mine[key], its[key], strict=True))
        assert all(map(torch.equal, train(other, optim, batches[3:]), want))


@pytest.mark.parametrize("codec", [INT4, pytest.param(INT8, marks=pytest.mark.slow), "int4:64,hadamard"])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("zero3", "zero3"),
        ("zero3", "ddp"),
        pytest.param("hpz", "zero3", marks=pytest.mark.slow),
        pytest.param("ddp", "ddp", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_resume_is_exact(tmp_path: Path, first: str, second: str, codec: str) -> None:
    run_ranks(WORLD, check_resume, str(tmp_path / "run"), plan(first, codec), plan(second, codec))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("none", INT8),
        (INT8, INT4),
        pytest.param(INT8, "none", marks=pytest.mark.slow),
        pytest.param(INT4, "int8:64", marks=pytest.mark.slow),
    ],
)
def test_checkpoints_go_from_one_storage_to_another(tmp_path: Path, first: str, second: str) -> None:
    run_ranks(WORLD, check_resume, str(tmp_path / "run"), plan("zero3", first), plan("zero1", second))


@on_ranks(WORLD)
def test_what_is_saved_encoded_is_not_trained(tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    each = plan("zero3")
    model = tw.shard(build(), each)
    tw.save(model, adamw(model), path)
    other = tw.shard(build().requires_grad_(True), each)
    with pytest.raises(CheckpointError, match=r"enter.weight is saved as blocks of int8:256, .* freeze it before"):
        tw.load(other, None, path)


# -- outside of passes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["hpz", "ddp", pytest.param("zero3", marks=pytest.mark.slow)])
@on_ranks(WORLD)
def test_reads_writes_and_copies(name: str) -> None:
    """Reads see decoded values; a write encodes again, from what was written, and no block that keeps its values."""
    each = plan(name)
    rank, codec = torch.distributed.get_rank(), str(each.frozen.storage)
    model, alone = tw.shard(build(), each), rounded(build(), codec)
    x, before = samples(0, rank), messages(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.full_tensor(), alone.get_parameter(name)), name
        state = tw.full_state_dict(model)
        for name, parameter in model.named_parameters():
            parameter.copy_(state[name])
        model(x)
        same = messages(model)
        assert all(torch.equal(a, b) for key in before for a, b in zip(before[key], same[key], strict=True))
        weight, its = model.get_parameter("enter.weight"), alone.get_parameter("enter.weight")
        weight.mul_(1.7).data.add_(0.01)
        its.mul_(1.7).add_(0.01)
        rounded(alone.enter, codec)
        assert torch.equal(model(x), alone(x))
        assert torch.equal(weight.full_tensor(), its)
        with tw.full_parameters(model, write=True):
            model.layers[1].first.base.weight.fill_(0.3)
        alone.layers[1].first.base.weight.fill_(0.3)
        rounded(alone.layers[1].first, codec)
        assert torch.equal(model(x), alone(x))
        for name, parameter in model.named_parameters():  # as the original state does
            parameter.copy_(build().get_parameter(name))
        model(x)
        again = messages(model)
        assert all(torch.equal(a, b) for key in before for a, b in zip(before[key], again[key], strict=True))
        twin = copy.deepcopy(model)
        assert torch.equal(twin(x), model(x))
        copied = messages(twin)
        assert all(torch.equal(a, b) for key in before for a, b in zip(before[key], copied[key], strict=True))
        want = model(x).clone()
        for keep in ("whole", "encoded", "secondary", "nothing"):
            if each.params.ranks == 1 and keep == "secondary":
                continue
            with tw.generating(model, keep=keep):
                assert torch.equal(model(x), want), keep
                assert torch.equal(model(x), want), keep
        assert held(model)["gathered"] == 0
        pieces, values = snapshot([runtime(model)], "")
        published = values["float32"].split([piece.numel for piece in pieces]) if pieces else ()
        for piece, value in zip(pieces, published, strict=True):
            flat = state[piece.name].flatten()
            assert torch.equal(value, flat[piece.offset : piece.offset + piece.numel]), piece.name


@on_ranks(WORLD)
def test_nothing_is_frozen_or_everything() -> None:
    """Nothing is frozen, or everything is."""
    rank = torch.distributed.get_rank()
    for name in ("zero3", "ddp"):
        each = plan(name)
        model = tw.shard(build().requires_grad_(True), each)
        plain = tw.shard(build().requires_grad_(True), each.with_(frozen={"storage": "none"}))
        batches = [[samples(0, rank)]]
        assert all(map(torch.equal, train(model, adamw(model), batches), train(plain, adamw(plain), batches)))
        assert held(model) == held(plain)
        frozen = tw.shard(build().requires_grad_(False), each)
        alone = rounded(build().requires_grad_(False), INT8)
        with torch.no_grad():
            assert torch.equal(frozen(samples(1, rank)), alone(samples(1, rank)))


class Values:
    """The initial values of a model on the meta device."""

    def __init__(self) -> None:
        self._model = build()

    def open(self) -> str:
        return "those of build()"

    def read(self, name: str, region: tuple[slice, ...]) -> torch.Tensor:
        return self._model.get_parameter(name).detach()[region]


@on_ranks(WORLD)
def test_a_model_that_no_rank_holds() -> None:
    """No rank holds the model: each encodes what it reads for its shard."""
    each = plan("zero3")
    with torch.device("meta"):
        empty = Model()
    model, plain = tw.shard(empty, each, values=Values(), device="cpu"), tw.shard(build(), each)
    mine, its = messages(model), messages(plain)
    assert mine.keys() == its.keys()
    assert all(torch.equal(a, b) for key in mine for a, b in zip(mine[key], its[key], strict=True))


@on_ranks(WORLD)
def test_exceptions_stay_as_they_are() -> None:
    """Parameters that ``wire.exclude`` names, and units that travel unencoded, stay what they are."""
    each = plan("zero3").with_(wire={"exclude": ["enter.*"]}, units=[{"match": "layers.1", "codec": "none"}])
    model, original = tw.shard(build(), each), build()
    for name, value in tw.full_state_dict(model).items():
        rounds = name.endswith("base.weight") and not name.startswith("layers.1")
        assert torch.equal(value, original.get_parameter(name)) is not rounds, name


@pytest.mark.parametrize(
    "codec", ["mpc", "exp3", "int8:tensor", "int8:256,stochastic", "zfp:8", "bf16", "topk:1/32,int2"]
)
def test_other_codecs_are_refused(codec: str) -> None:
    with pytest.raises(SpecError, match=r"frozen.storage = .* valid are 'none', 'intN:BLOCK'"):
        Plan.preset("zero3", nodes=1, local=1, frozen={"storage": codec})


def test_an_unknown_codec_and_a_pipeline_are_refused() -> None:
    with pytest.raises(SpecError, match="'nf4' is not a codec: valid are"):
        Plan.preset("zero3", nodes=1, local=1, frozen={"storage": "nf4"})
    with pytest.raises(SpecError, match="storage = 'int8:256' with pp = 2"):
        Plan.preset("ddp", nodes=1, local=1, pp=2, frozen={"storage": INT8})


@on_ranks(1)
def test_one_rank_alone() -> None:
    reference = rounded(build(), INT8)
    model = tw.shard(build(), Plan.preset("ddp", nodes=1, local=1, compute_dtype="float32", frozen={"storage": INT8}))
    batches = [[samples(step, 0)] for step in range(3)]
    assert all(map(torch.equal, train(model, adamw(model), batches), train(reference, adamw(reference), batches)))
    assert held(model)["gathered"] == 0
