"""Frozen weights in a representation of the user's: wrappers around plain tensors, and packed codes."""

from __future__ import annotations

import copy
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import on_ranks
from tests.support.training import grids
from tests.support.training.hf import assert_adapters_train_alike, batches
from tests.support.training.program import Model, freeze, hold
from tests.support.training.quantized import KINDS, Coded, adapted, plain_tensors
from torch import nn

import thinwire as tw
from thinwire.errors import UsageError
from thinwire.sharding.api import runtime
from thinwire.sharding.modules.quantized import inner_tensors, packed_scales
from thinwire.spec import Plan
from thinwire.testing import run_ranks
from thinwire.train.models.common import cross_entropy

pytestmark = pytest.mark.ranks

LIBRARIES = {"int8": "torchao", "nf4": "torchao", "bnb": "bitsandbytes", "bnb-bf16": "bitsandbytes"}


def of_library(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(name) is None, reason=f"needs {name}")


def of_kinds(*kinds: str) -> pytest.MarkDecorator:
    others = {kind: [pytest.mark.slow, of_library(LIBRARIES[kind])] for kind in kinds if kind != "own"}
    return pytest.mark.parametrize("kind", [pytest.param(kind, marks=others.get(kind, ())) for kind in kinds])


def plan_of(name: str, **keys: Any) -> Plan:
    return Plan.preset(name, nodes=2, local=2, **({"compute_dtype": "float32"} | keys))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def step_of(model: nn.Module, optim: Any, step: int) -> torch.Tensor:
    """One step; every rank has the same data, so that means over ranks are exact."""
    (ids,) = batches(step, 1)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.detach()


def same_tensors(state: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    mine, its = plain_tensors(state), plain_tensors(other)
    return mine.keys() == its.keys() and all(torch.equal(mine[name], its[name]) for name in its)


@torch.no_grad()
def blank(model: nn.Module) -> None:
    """Take the values of a model, which something is to bring back."""
    for name, parameter in model.named_parameters():
        for _, inner in inner_tensors(name, parameter):
            inner.zero_()
    for name, scale in packed_scales(model):
        if name.endswith("absmax"):
            scale.zero_()


class Sealed(Coded):
    """A wrapper that keeps its codes."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "codes" and hasattr(self, "codes"):
            raise AttributeError(name)
        super().__setattr__(name, value)


@of_kinds(*KINDS)
@on_ranks(4, timeout=200)
def test_adapters_train_as_in_one_process(kind: str) -> None:
    warnings.simplefilter("ignore")
    for name in ("zero3", "zero1", "hpz"):
        reference, model = adapted(kind), adapted(kind)
        for module in model.modules():
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = True  # as on a CPU that can
        if dist.get_rank():
            blank(model)  # the first rank's values are everyone's
        tw.shard(model, plan_of(name))
        optim, plain = tw.optimizer(model, torch.optim.AdamW, lr=1e-2), adamw(reference)
        assert_adapters_train_alike(model, optim, reference, plain, name)
        assert same_tensors(tw.full_state_dict(model), reference.state_dict()), name
        for module in model.modules():
            if kind.startswith("bnb") and hasattr(module, "support_avx512bf16_for_cpu"):
                assert not module.support_avx512bf16_for_cpu  # it would pack anew what is gathered
        (ids,) = batches(2, 1)
        with torch.no_grad():
            assert torch.equal(model.eval()(input_ids=ids).logits, reference.eval()(input_ids=ids).logits), name
        twin = copy.deepcopy(model)
        with torch.no_grad():
            assert torch.equal(twin(input_ids=ids).logits, reference(input_ids=ids).logits), name


@on_ranks(4)
def test_each_rank_holds_its_part() -> None:
    """Under bf16, what is quantized keeps its bits and dtypes, and each rank holds a fourth of its bytes."""
    whole = sum(value.numel() for name, value in plain_tensors(adapted("own").state_dict()).items() if "codes" in name)
    model = tw.shard(adapted("own"), plan_of("zero3", compute_dtype="bfloat16"))
    buffers = [b for u in runtime(model).units for b in u.buffers if not b.layout.trainable]
    kept = sum(b.shard.nbytes for b in buffers if b.layout.dtype == torch.float8_e4m3fn)
    layouts = [b.layout for b in buffers if b.layout.dtype == torch.float8_e4m3fn]
    padding = sum(layout.numel - layout.slots[-1].offset - layout.slots[-1].numel for layout in layouts)
    assert whole <= 4 * kept <= whole + padding + 16 * len(buffers)
    assert not any(b.full.untyped_storage().nbytes() for b in buffers)
    assert same_tensors(
        {n: v for n, v in tw.full_state_dict(model).items() if "base_layer" in n},
        {n: v for n, v in adapted("own").state_dict().items() if "base_layer" in n},
    )


@on_ranks(4, timeout=200)
def test_what_else_a_model_does() -> None:
    """What a sharded model can do besides training it can do with wrappers as well."""
    warnings.simplefilter("ignore")
    reference, model = adapted("own"), tw.shard(adapted("own"), plan_of("zero3"))
    name, outside = next((n, p) for n, p in model.named_parameters() if isinstance(p, Coded))
    inside = dict(reference.named_parameters())[name]
    assert isinstance(outside, nn.Parameter)
    assert torch.equal(outside.dequantize(), inside.dequantize())  # gathered
    with tw.full_parameters(model):
        assert torch.equal(dict(model.named_parameters())[name].dequantize(), inside.dequantize())
        state = model.state_dict()
    assert same_tensors(state, reference.state_dict())
    (ids,) = batches(0, 1)
    want = reference.eval().generate(input_ids=ids, max_new_tokens=4, do_sample=False)
    for keep in ("whole", "nothing", "secondary"):
        with torch.no_grad(), tw.generating(model.eval(), keep=keep):
            assert torch.equal(model.generate(input_ids=ids, max_new_tokens=4, do_sample=False), want)
    twin = copy.deepcopy(model)
    assert same_tensors(tw.full_state_dict(twin), reference.state_dict())
    optim, plain = tw.optimizer(twin, torch.optim.AdamW, lr=1e-2), adamw(reference)
    for step in range(2):
        assert torch.equal(step_of(twin.train(), optim, step), step_of(reference.train(), plain, step))
    own = torch.optim.AdamW(model.parameters(), lr=1e-2)  # of every parameter, as scripts make it
    before = step_of(model.train(), own, 0)
    assert step_of(model, own, 0) < before


@pytest.mark.slow
@on_ranks(4)
def test_blocks_are_sharded_first() -> None:
    """Blocks that are sharded first, as with FSDP2."""
    reference, model = adapted("own"), adapted("own")
    for block in model.model.model.layers:
        tw.shard(block, plan_of("zero3"))
    tw.shard(model, plan_of("zero3"))
    optim, plain = tw.optimizer(model, torch.optim.AdamW, lr=1e-2), adamw(reference)
    for step in range(2):
        assert torch.equal(step_of(model, optim, step), step_of(reference, plain, step))


@of_kinds(*KINDS)
@on_ranks(4, timeout=200)
def test_resumes_bit_for_bit(kind: str, tmp_path: Path) -> None:
    warnings.simplefilter("ignore")
    folder = tmp_path / "checkpoint"
    model = tw.shard(adapted(kind), plan_of("zero3"))
    optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-2)
    step_of(model, optim, 0)
    tw.save(model, optim, folder)
    want = step_of(model, optim, 1)
    for name in ("zero3", "zero1"):
        other = adapted(kind)
        blank(other)
        tw.shard(other, plan_of(name))
        again = tw.optimizer(other, torch.optim.AdamW, lr=1e-2)
        tw.load(other, again, folder)
        assert torch.equal(step_of(other, again, 1), want), name
        assert same_tensors(tw.full_state_dict(other), tw.full_state_dict(model)), name


@of_kinds("own", "int8", "nf4", "bnb")
@pytest.mark.slow
@on_ranks(4)
def test_receivers_get_what_is_inside(kind: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "store")
    model = tw.shard(adapted(kind), plan_of("zero3"))
    if kind == "bnb":
        with pytest.raises(UsageError, match=r"weight holds codes of bitsandbytes.*save the adapters"):
            tw.publisher(model, folder)
        return
    publisher = tw.publisher(model, folder)
    step_of(model, tw.optimizer(model, torch.optim.AdamW, lr=1e-2), 0)
    publisher.step()
    publisher.close()
    want = tw.full_state_dict(model)
    if dist.get_rank() == 0:
        subscriber, receiver = tw.Subscriber(folder), adapted(kind)
        blank(receiver)
        subscriber.update()
        subscriber.load_into(receiver)
        assert same_tensors(receiver.state_dict(), want)


@pytest.mark.slow
@on_ranks(4, timeout=120)
def test_steps_do_what_programs_say() -> None:
    """A step does what its program says, also with buffers in dtypes of the user's."""
    for name, changes in (("zero3", {}), ("zero3", {"gather_bytes": "1MiB"}), ("hpz", {}), ("zeropp", {})):
        torch.default_generator.manual_seed(0)
        model = freeze(Model())
        for layer in model.layers:
            layer.up.weight = nn.Parameter(Coded.of(layer.up.weight), requires_grad=False)
            layer.up.bias = None
        operations, sent = hold(model, Plan.preset(name, nodes=2, local=2).with_(**changes), 2)
        assert operations > 0 < sent


@on_ranks(4)
def test_what_is_refused_has_a_remedy() -> None:
    trained = nn.Linear(8, 8, bias=False)
    trained.weight = nn.Parameter(Coded.of(trained.weight).requires_grad_())
    with pytest.raises(UsageError, match=r"weight is a Coded that is to be trained.*requires_grad_\(False\)"):
        tw.shard(trained, plan_of("zero3"))
    trained.weight.requires_grad_(False)  # the remedy
    model = tw.shard(nn.Sequential(nn.Linear(8, 8), trained), plan_of("zero3"))
    model(torch.ones(1, 8)).sum().backward()
    model[1].weight.requires_grad_(True)
    optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-2)
    with pytest.raises(UsageError, match=r"1\.weight is a Coded that is to be trained"):
        optim.step()
    hidden = nn.Linear(8, 8, bias=False)
    hidden.weight = nn.Parameter(Sealed.of(hidden.weight), requires_grad=False)
    with pytest.raises(UsageError, match=r"whose codes .*cannot be gathered: exclude .*thinwire.ignore"):
        tw.shard(nn.Sequential(nn.Linear(8, 8), hidden), plan_of("zero3"))
    tw.ignore(hidden.weight)  # the remedy
    model = tw.shard(nn.Sequential(nn.Linear(8, 8), hidden), plan_of("zero3"))
    model(torch.ones(1, 8)).sum().backward()


def with_codes() -> nn.Module:
    """A model that pipelines divide, whose attention is frozen and quantized."""
    torch.default_generator.manual_seed(0)
    model = grids.build("llama")
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "attn" in name:
            module.weight = nn.Parameter(Coded.of(module.weight.detach()), requires_grad=False)
    return model


def train_in_stages(plan: Plan, folder: str) -> list[float]:
    model = tw.parallelize(with_codes(), plan, loss=cross_entropy)
    optimizer = model.optimizer(torch.optim.AdamW, lr=grids.LR, eps=grids.EPS)
    steps = grids.batches(plan, model.grid.data)
    losses = grids.train(model, optimizer, steps[:1])[0]
    path = Path(folder) / f"pp{plan.pp}"
    model.save(optimizer, path, frozen="reference")
    again = tw.parallelize(with_codes(), plan, loss=cross_entropy)
    optimizer = again.optimizer(torch.optim.AdamW, lr=grids.LR, eps=grids.EPS)
    again.load(optimizer, path)
    return losses + grids.train(again, optimizer, steps[1:])[0]


def test_stages_of_a_pipeline_hold_theirs(tmp_path: Path) -> None:
    """Two stages train as one process does, and go on from a checkpoint that refers to the base."""
    one = run_ranks(1, train_in_stages, grids.plan_for(1, 1, 1, micro_batches=4), str(tmp_path))[0]
    two = run_ranks(2, train_in_stages, grids.plan_for(1, 1, 2), str(tmp_path))[0]
    torch.testing.assert_close(torch.tensor(two), torch.tensor(one), rtol=2e-6, atol=0)


@on_ranks(2)
def test_slices_of_them_are_refused() -> None:
    with pytest.raises(UsageError, match=r"q_proj.weight is a quantized Coded, and tp = 2 cuts plain tensors: set tp"):
        tw.parallelize(with_codes(), grids.plan_for(1, 2, 1), loss=cross_entropy)


@of_library("bitsandbytes")
@on_ranks(4)
def test_eight_bits_of_bitsandbytes_are_refused() -> None:
    import bitsandbytes as bnb

    layer = bnb.nn.Linear8bitLt(8, 8, has_fp16_weights=False).requires_grad_(False)
    with pytest.raises(UsageError, match=r"weight is an Int8Params of bitsandbytes.*load_in_4bit=True"):
        tw.shard(nn.Sequential(nn.Linear(8, 8), layer), plan_of("zero3"))
