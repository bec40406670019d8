"""Checkpoints of unusual models, between unusual plans; a checkpoint that does not fit changes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import on_ranks
from tests.support.training.edge import ADAMW, WIDTH, build, gap, plan, raised, samples, train_sharded, whole
from tests.support.training.models import Shapes, Stack, UnusedParameters
from torch import nn

import thinwire as tw
from thinwire.checkpoint.manifest import MANIFEST_NAME, seal
from thinwire.errors import CheckpointError, UsageError

pytestmark = pytest.mark.ranks

Kind = type[torch.optim.Optimizer]


def start(
    name: str,
    model_class: Callable[[], nn.Module] = Stack,
    *,
    kind: Kind = torch.optim.AdamW,
    seed: int = 0,
    options: Any = None,
    **changes: Any,
) -> tuple[nn.Module, Any]:
    model = tw.shard(build(model_class, seed), plan(name, **changes))
    return model, tw.optimizer(model, kind, **(options or ADAMW))


class Odd(Shapes):
    """Scalars, empty and strided parameters, some of them frozen, and buffers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(3, 5).requires_grad_(False)
        self.blocks[0].gain.requires_grad_(False)
        self.spare = nn.Parameter(torch.randn(4))
        self.register_buffer("count", torch.randint(0, 1000, ()))
        self.register_buffer("turned", torch.randn(3, 2).t())
        self.register_buffer("precise", torch.randn(2, dtype=torch.float64))
        self.register_buffer("flags", torch.randint(0, 2, (5,)).bool())
        self.register_buffer("secret", torch.randn(2), persistent=False)


Move = tuple[type[nn.Module], Kind, dict[str, Any], str, str]
NAMES = ("zero3", "inter", "zero1-node", "whole tensors", "amsp-13b")
MOVES: list[Move] = [(Odd, torch.optim.AdamW, ADAMW, *pair) for pair in zip(NAMES, NAMES[1:] + NAMES[:1], strict=True)]
ADAGRAD = {"lr": 1e-2, "eps": 0.1}  # has state before its first step, that of unused parameters included
MOVES += [(UnusedParameters, torch.optim.Adagrad, ADAGRAD, *pair) for pair in (NAMES[:2], NAMES[3:])]


@pytest.mark.slow
@pytest.mark.parametrize("move", MOVES, ids=lambda move: f"{move[0].__name__} {move[3]}-{move[4]}")
@on_ranks(4)
def test_unusual_models_move_between_plans(tmp_path: Path, move: Move) -> None:
    """Saved under one plan and loaded under each other one, training continues without a difference."""
    model_class, kind, options, saved, loaded = move
    path = str(tmp_path / saved)
    model, optim = start(saved, model_class, kind=kind, options=options)
    train_sharded(model, optim, steps=range(2), micro_batches=1)
    tw.save(model, optim, path, extra={"step": 2, "list": [1, None, "a"]})
    other, resumed = start(loaded, model_class, kind=kind, options=options, seed=1)
    secret = getattr(other, "secret", torch.zeros(1)).clone()
    assert tw.load(other, resumed, path) == {"step": 2, "list": [1, None, "a"]}
    label = f"{path} under {loaded}"
    assert gap(whole(other), whole(model)) == 0.0, label
    for (name, a), b in zip(other.named_buffers(), model.buffers(), strict=True):
        assert torch.equal(a, secret if name == "secret" else b), f"{label}: {name}"
    for net, optimizer in ((model, optim), (other, resumed)):
        train_sharded(net, optimizer, steps=range(2, 4), micro_batches=1)
    assert gap(whole(other), whole(model)) <= 1e-6, label
    assert gap(whole(other), list(build(model_class).parameters())) > 1e-3


@pytest.mark.slow
@on_ranks(4)
def test_masters_survive_any_compute_type(tmp_path: Path) -> None:
    """Checkpoints store masters, so trained values lose nothing to bf16; only frozen values do."""
    path = str(tmp_path / "c")
    model, optim = start("zero3", Odd, compute_dtype="bfloat16")
    train_sharded(model, optim, steps=range(2), micro_batches=1)
    masters = {(o.fragment.slot.name, o.fragment.offset): o.value.detach().clone() for o in optim.fragments}
    tw.save(model, optim, path)
    wide, wide_optim = start("zero3", Odd, seed=1)
    tw.load(wide, wide_optim, path)
    exact = {(o.fragment.slot.name, o.fragment.offset): o.value.detach() for o in wide_optim.fragments}
    assert not any(torch.equal(value, value.bfloat16().float()) for value in exact.values() if value.numel() > 8)
    with tw.full_parameters(model), tw.full_parameters(wide):
        for a, b in zip(model.parameters(), wide.parameters(), strict=True):
            assert torch.equal(a, b.to(a.dtype))
    tw.save(wide, wide_optim, path)
    narrow, narrow_optim = start("zero3", Odd, seed=2, compute_dtype="bfloat16")
    tw.load(narrow, narrow_optim, path)
    for owned in narrow_optim.fragments:
        assert torch.equal(owned.value, masters[owned.fragment.slot.name, owned.fragment.offset])
    assert gap(whole(narrow), whole(model)) == 0.0


@pytest.mark.slow
@on_ranks(4)
def test_parameters_alone_and_back_in_time(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    model, optim = start("zero3")
    train_sharded(model, optim, steps=range(1), micro_batches=1)
    tw.save(model, None, path)
    other, fresh = start("inter", seed=1)
    assert "saved without an optimizer" in raised(CheckpointError, tw.load, other, fresh, path)
    tw.load(other, None, path)
    assert gap(whole(other), whole(model)) == 0.0
    tw.save(model, optim, path)  # takes the other one's place
    train_sharded(model, optim, steps=range(1, 2), micro_batches=1)
    tw.load(model, optim, path)
    assert gap(whole(model), whole(other)) == 0.0


# -- what does not fit -----------------------------------------------------------------------------------------


class Turned(Stack):
    """As many elements in another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].up.weight = nn.Parameter(torch.randn(WIDTH, 11))


class Smaller(Stack):
    def __init__(self) -> None:
        super().__init__(2)


class Larger(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].extra = nn.Parameter(torch.ones(2))


def state_of(optim: Any) -> dict[tuple[int, str], torch.Tensor]:
    """Copies of an optimizer's state."""
    return {
        (number, key): torch.as_tensor(value).clone()
        for number, owned in enumerate(optim.fragments)
        for key, value in optim.state.get(owned.value, {}).items()
    }


@pytest.mark.slow
@on_ranks(4)
def test_a_checkpoint_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    model, optim = start("zero3")
    train_sharded(model, optim, steps=range(1), micro_batches=1)
    tw.save(model, optim, path, extra={"a": 1})
    misfits: list[tuple[type[nn.Module], Kind, Any, str]] = [
        (Turned, torch.optim.AdamW, ADAMW, "blocks.1.up.weight is [11, 8] in the checkpoint, [8, 11] in the model"),
        (Smaller, torch.optim.AdamW, ADAMW, "blocks.2.norm.weight is [8] in the checkpoint, missing in the model"),
        (Larger, torch.optim.AdamW, ADAMW, "blocks.0.extra is missing in the checkpoint, [2] in the model"),
        (Stack, torch.optim.Adam, ADAMW, "saved with optimizer AdamW, loaded into Adam"),
        (Stack, torch.optim.AdamW, {**ADAMW, "amsgrad": True}, "none called 'max_exp_avg_sq'"),
    ]
    for model_class, kind, options, message in misfits:
        for trained in (False, True):
            other, fresh = start("inter", model_class, kind=kind, options=options, seed=1)
            if trained and model_class is Stack:
                train_sharded(other, fresh, steps=range(1), micro_batches=1)
            before = whole(other)
            state = state_of(fresh)
            assert message in raised(CheckpointError, tw.load, other, fresh, path)
            # Nothing has moved: neither parameters nor the optimizer's state nor its options.
            assert gap(whole(other), before) == 0.0
            after = state_of(fresh)
            assert list(after) == list(state)
            assert all(torch.equal(after[key], state[key]) for key in state)
            assert all(group["lr"] == ADAMW["lr"] for group in fresh.param_groups)
    error = raised(CheckpointError, tw.save, model, optim, path, extra={"rank": dist.get_rank()})
    assert "'extra'" in error
    with tw.full_parameters(model):
        assert "load() inside full_parameters()" in raised(UsageError, tw.load, model, optim, path)
    assert tw.load(model, optim, path) == {"a": 1}


@pytest.mark.slow
@on_ranks(4)
def test_error_feedback_of_any_length_is_refused(tmp_path: Path) -> None:
    """Nothing is allocated for it, and no rank waits for one that has found it."""
    path = str(tmp_path / "c")
    wire = {"reduce_intra": "int8:64", "reduce_inter": "int8:64", "error_feedback": True}
    model, optim = start("zero1-node", wire=wire)
    train_sharded(model, optim, steps=range(1), micro_batches=1)
    tw.save(model, optim, path)
    file = Path(path) / MANIFEST_NAME
    body = json.loads(file.read_bytes())["body"]
    key, sizes = next(iter(body["values"]["feedback"].items()))
    for damaged in ([10**12] * len(sizes), sizes[:-1], ["a", *sizes[1:]], [-1, *sizes[1:]], None, 7):
        dist.barrier()
        if dist.get_rank() == 0:
            values = {**body["values"], "feedback": {key: damaged}}
            file.write_bytes(seal({**body, "values": values}))
        dist.barrier()
        assert f"how feedback/{key} is shared out" in raised(CheckpointError, tw.load, model, optim, path)


@on_ranks(4)
def test_a_load_forgets_gradients(tmp_path: Path) -> None:
    """A load in the middle of an accumulation restarts the step."""
    path = str(tmp_path / "c")
    model, optim = start("zero1-node")
    train_sharded(model, optim, steps=range(1), micro_batches=1)
    tw.save(model, optim, path)
    train_sharded(model, optim, steps=range(1, 2), micro_batches=1)
    expected = whole(model)
    model(samples(7, 1, 4)[0, dist.get_rank()]).square().mean().backward()
    tw.load(model, optim, path)
    train_sharded(model, optim, steps=range(1, 2), micro_batches=1)
    assert gap(whole(model), expected) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["short", "header", "block"])
@on_ranks(4)
def test_a_model_that_a_load_has_half_filled_is_not_used(tmp_path: Path, damage: str) -> None:
    """What was found out before anything changed leaves the model as it was; what was found too late bars its use."""
    path = str(tmp_path / "c")
    model, optim = start("zero1-node")
    train_sharded(model, optim, steps=range(1), micro_batches=1)
    tw.save(model, optim, path)
    expected = whole(model)
    train_sharded(model, optim, steps=range(1, 2), micro_batches=1)
    before, state = whole(model), state_of(optim)
    (file,) = sorted(Path(path).glob("*.safetensors"))[:1]
    sound = file.read_bytes()
    damaged = {"short": sound[:-1], "header": sound[:9] + b"?" + sound[10:], "block": sound[:-1] + b"\x7f"}[damage]
    dist.barrier()
    if dist.get_rank() == 0:
        file.write_bytes(damaged)
    dist.barrier()
    assert file.name in raised(CheckpointError, tw.load, model, optim, path)
    x = samples(7, 1, 4)[0, dist.get_rank()]
    if damage != "block":
        assert gap(whole(model), before) == 0.0
        assert all(torch.equal(state[key], value) for key, value in state_of(optim).items())
    else:
        uses: list[tuple[Callable[..., object], tuple[Any, ...]]] = [
            (model, (x,)),
            (model.eval(), (x,)),
            (model.train().blocks[0], (x,)),
            (optim.step, ()),
            (tw.save, (model, None, f"{path}-again")),
            (tw.async_save, (model, optim, f"{path}-again")),
            (tw.full_state_dict, (model,)),
            (tw.full_parameters(model).__enter__, ()),
        ]
        for use, arguments in uses:
            assert f"half loaded: the load of {path} failed" in raised(CheckpointError, use, *arguments)
        assert not state_of(optim)
        # A refused load changes nothing about that.
        assert "not a checkpoint" in raised(CheckpointError, tw.load, model, optim, f"{path}-none")
        assert "half loaded" in raised(CheckpointError, model, x)
    dist.barrier()
    if dist.get_rank() == 0:
        file.write_bytes(sound)
    dist.barrier()
    tw.load(model, optim, path)
    assert gap(whole(model), expected) == 0.0
    train_sharded(model, optim, steps=range(1, 2), micro_batches=1)
    assert gap(whole(model), before) == 0.0
