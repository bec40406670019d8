"""The modules that become units, and the parameters that each unit owns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from thinwire.errors import UsageError
from thinwire.sharding.modules.discover import LARGE_LEAF, UnitModules, discover, ignore


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)
        self.act = nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.act(self.up(self.norm(x)))


class Model(nn.Module):
    """Small leaves (norm), large ones (embedding, head), and a parameter on the root."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(200, 8)
        self.position = nn.Parameter(torch.zeros(8))
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 200, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def owners(units: list[UnitModules]) -> dict[str, list[str]]:
    return {unit.name: [name for name, _ in unit.parameters] for unit in units}


def find(model: nn.Module, selection: Any = None, granularity: str = "block") -> dict[str, list[str]]:
    """Parameter names by unit, after the checks that hold for every model."""
    units = discover(model, selection, granularity)
    by_name = dict(model.named_modules())
    assert all(by_name[unit.name] is unit.module for unit in units)
    named = [pair for unit in units for pair in unit.parameters]
    assert sorted(name for name, _ in named) == sorted(name for name, _ in model.named_parameters())
    assert all(model.get_parameter(name) is parameter for name, parameter in named)
    return owners(units)


def of_block(name: str) -> list[str]:
    return [f"{name}.{part}" for part in ("norm.weight", "norm.bias", "up.weight", "up.bias")]


def test_blocks_large_leaves_and_the_rest() -> None:
    assert find(Model()) == {
        "": ["position", "norm.weight", "norm.bias"],
        "embedding": ["embedding.weight"],
        "blocks.0": of_block("blocks.0"),
        "blocks.1": of_block("blocks.1"),
        "head": ["head.weight"],
    }


def test_a_leaf_is_large_from_one_hundredth_on() -> None:
    model = nn.Module()
    model.big, model.small = nn.Linear(LARGE_LEAF, LARGE_LEAF - 1, bias=False), nn.Linear(10, 10, bias=False)
    assert set(find(model)) == {"big", "small"}
    model.big = nn.Linear(LARGE_LEAF, LARGE_LEAF, bias=False)
    assert find(model) == {"": ["small.weight"], "big": ["big.weight"]}


def test_the_root_alone() -> None:
    assert find(nn.Linear(2, 3)) == {"": ["weight", "bias"]}


def test_a_sequence_is_a_list_of_blocks_those_without_parameters_left_out() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert find(model) == {"0": ["0.weight", "0.bias"], "2": [f"2.{i}.{p}" for i in (0, 1) for p in ("weight", "bias")]}


def test_containers_that_are_never_called_are_looked_into() -> None:
    model = nn.Module()
    model.pairs = nn.ModuleList(nn.ModuleList([Block(), nn.ModuleDict({"x": Block()})]) for _ in range(2))
    model.weights = nn.ParameterList(torch.zeros(50, 50) for _ in range(2))
    model.named = nn.ParameterDict({"a": torch.zeros(9)})
    model.mixed = nn.ModuleList([nn.ParameterList([torch.zeros(3)])])
    assert find(model) == {
        "": ["weights.0", "weights.1", "named.a", "mixed.0.0"],
        **{name: of_block(name) for i in (0, 1) for name in (f"pairs.{i}.0", f"pairs.{i}.1.x")},
    }
    assert find(model, granularity="module")[""] == ["weights.0", "weights.1", "named.a", "mixed.0.0"]


def test_the_projection_of_an_attention_belongs_to_it() -> None:
    model = nn.Module()
    model.attention = nn.MultiheadAttention(8, 2)
    assert set(find(model)) == {""}
    assert set(find(model, granularity="module")) == {"attention"}
    with pytest.raises(UsageError, match=r"'attention.out_proj' is a NonDynamically.* never called"):
        discover(model, ["attention.out_proj"], "block")


def test_tied_parameters_belong_to_the_nearest_common_ancestor() -> None:
    model = Model(3)
    model.head.weight = model.embedding.weight
    model.blocks[2].up.weight = model.blocks[0].up.weight
    model.blocks[1].up.weight = model.blocks[1].norm.weight  # inside a block: stays there
    units = find(model)
    assert units[""] == ["position", "embedding.weight", "blocks.0.up.weight", "norm.weight", "norm.bias"]
    assert "embedding" not in units
    assert "head" not in units
    assert units["blocks.1"] == ["blocks.1.norm.weight", "blocks.1.norm.bias", "blocks.1.up.bias"]


def test_a_module_registered_twice_is_one_unit_or_belongs_to_the_common_ancestor() -> None:
    model = Model(3)
    model.blocks[2] = model.blocks[0]
    assert set(find(model)) == {"", "embedding", "blocks.0", "blocks.1", "head"}
    model.blocks[1].norm = model.blocks[0].norm
    assert find(model)[""] == ["position", "blocks.0.norm.weight", "blocks.0.norm.bias", "norm.weight", "norm.bias"]


def test_single_modules() -> None:
    units = discover(Model(), None, "module")
    assert owners(units) == {
        "": ["position"],
        "embedding": ["embedding.weight"],
        **{
            f"blocks.{i}.{m}": [f"blocks.{i}.{m}.{p}" for p in ("weight", "bias")]
            for i in (0, 1)
            for m in ("norm", "up")
        },
        "norm": ["norm.weight", "norm.bias"],
        "head": ["head.weight"],
    }
    blocks = {unit.name: (unit.block, unit.list_element) for unit in units}
    assert blocks["blocks.0.norm"] == blocks["blocks.0.up"] == (blocks["blocks.0.up"][0], "blocks.0")
    assert blocks["blocks.1.norm"][1] == "blocks.1"
    assert len({number for number, _ in blocks.values()}) == 6


# -- chosen ----------------------------------------------------------------------------------------------------


def test_chosen_units_replace_the_default_ones() -> None:
    model = Model()
    expected = {"blocks.1", "norm"}
    for selection in (["blocks.1", "norm"], [model.norm, model.blocks[1]], ("norm", model.blocks[1], "norm")):
        units = find(model, selection)
        assert set(units) == {"", *expected}
        assert units["norm"] == ["norm.weight", "norm.bias"]
    assert set(find(model, [])) == {""}


def test_a_predicate_sees_names_and_modules() -> None:
    model = Model()
    seen = []

    def choose(name: str, module: nn.Module) -> bool:
        seen.append((name, module))
        return isinstance(module, Block) and name.endswith("1")

    assert set(find(model, choose)) == {"", "blocks.1"}
    assert ("blocks.0.up", model.blocks[0].up) in seen


def test_chosen_units_may_lie_in_each_other() -> None:
    units = find(Model(), ["blocks.0.up", "blocks.0", "blocks.1"])
    assert units["blocks.0.up"] == ["blocks.0.up.weight", "blocks.0.up.bias"]
    assert units["blocks.0"] == ["blocks.0.norm.weight", "blocks.0.norm.bias"]
    assert list(units) == ["", "blocks.0", "blocks.0.up", "blocks.1"]  # in the order of registration


def test_the_root_may_be_chosen() -> None:
    assert set(find(Model(), [""])) == {""}
    model = Model()
    assert set(find(model, [model, "head"])) == {"", "head"}


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("block.0", r"'block.0' is not a module of the model; give modules or names"),
        (nn.Linear(1, 1), r"Linear\(.*\) is not a module of the model"),
        (nn.Linear, r"Linear'> is not a module of the model; .* isinstance\(module, Block\)"),
        ("blocks", r"'blocks' is a ModuleList, which is never called.*give the modules inside it"),
    ],
)
def test_invalid_choices_of_units_are_refused(wanted: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        discover(Model(), wanted if wanted is nn.Linear else [wanted], "block")
    if isinstance(wanted, str) and wanted == "blocks":
        with pytest.raises(UsageError, match=message):
            discover(Model(), lambda name, _: name == wanted, "block")


def test_a_module_excepted_from_the_cut_stays_whole() -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(8, 2)
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise NotImplementedError

    class MixtureBlock(Mixture):
        def __init__(self) -> None:
            super().__init__()
            self.mixture = Mixture()

    model = nn.ModuleDict({"blocks": nn.ModuleList([MixtureBlock()]), "aside": Mixture()})
    exceptions = {"blocks.0.mixture": "block", "aside": "block", "blocks.0.experts": "block"}
    units = owners(discover(model, None, "module", exceptions.get))
    # A module list is never called, so its elements remain units of their own.
    assert list(units) == [
        "blocks.0.router", "blocks.0.experts.0", "blocks.0.experts.1", "blocks.0.mixture", "aside",
    ]  # fmt: skip
    assert len(units["blocks.0.mixture"]) == len(units["aside"]) == 6
    assert "blocks.0.mixture" not in owners(discover(model, None, "block", exceptions.get))


@pytest.mark.parametrize("wanted", [nn.Linear(1, 1), "head.weight", [nn.Parameter(torch.ones(1))], torch.ones(1)])
def test_only_parameters_are_ignored(wanted: Any) -> None:
    with pytest.raises(UsageError, match=rf"not {type(wanted).__name__}: call tw\.ignore\(\*module\.parameters\(\)\)"):
        ignore(wanted)
