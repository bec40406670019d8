"""Models on the meta device load their values shard by shard, with the same result as a whole load and less memory."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.families.tiny import FAMILIES, LENGTH, VOCABULARY, random_model
from tests.support.training.drafted import build
from torch.distributed.tensor import DTensor

import thinwire as tw
from thinwire.collectives.group import control
from thinwire.errors import DataError
from thinwire.sharding.api import runtime
from thinwire.sharding.memory.initial import parameters_on_meta
from thinwire.spec.recipe import ModelRecipe
from thinwire.testing import RankError, run_ranks
from thinwire.train.models.build import draft
from thinwire.train.models.common import cross_entropy

pytestmark = pytest.mark.ranks

CPU = torch.device("cpu")
OURS: dict[str, Any] = {"layers": 4, "hidden": 32, "heads": 4, "ffn": 48}
RECIPES: dict[str, dict[str, Any]] = {
    "llama": {**OURS, "kind": "llama", "kv_heads": 2},
    "tied": {**OURS, "kind": "llama", "tied_embedding": True},
    "gpt": {**OURS, "kind": "gpt"},
    "learned": {**OURS, "kind": "gpt", "positions": "learned"},
}


def started(recipe: dict[str, Any], plan: tw.Plan) -> list[torch.nn.Module]:
    """This rank's parts of a model that starts on the meta device."""
    made = draft(ModelRecipe(**recipe), vocab=VOCABULARY - 1, seq=LENGTH, seed=3)
    return list(tw.parallelize(made.model, plan, loss=cross_entropy, values=made.values, device=CPU).chunks)


def same_as_whole(recipe: dict[str, Any], toml: list[str]) -> int:
    """Compare under each plan with the model that one process builds; parameters and masters compared."""
    whole = build(ModelRecipe(**recipe), vocab=VOCABULARY - 1, seq=LENGTH, seed=3)
    expected = {name: parameter.detach() for name, parameter in whole.named_parameters()}
    count = 0
    for text in toml:
        plan = tw.Plan.from_toml(text)
        for chunk in started(recipe, plan):
            assert not any(parameter.is_meta for parameter in chunk.parameters())
            for owned in runtime(chunk).sharded.fragments:
                name, offset = owned.fragment.slot.name, owned.fragment.offset
                cut = runtime(chunk).sharded.slices[name]
                mine = expected[name] if cut is None else expected[name].chunk(cut.ways, cut.dim)[cut.index]
                wanted = mine.reshape(-1)[offset : offset + owned.fragment.length]
                assert torch.equal(owned.value.detach().reshape(-1), wanted), (plan.describe(), name)
                count += 1
            with tw.full_parameters(chunk):
                for name, parameter in chunk.named_parameters():
                    value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
                    assert torch.equal(value, expected[name].to(value.dtype)), (plan.describe(), name)
                    count += 1
    return count


def data_plans(**changes: Any) -> list[str]:
    names = ("zero3", "zero1-node", "hpz", "amsp-13b", "ddp")
    return [
        tw.Plan.preset(name, nodes=2, local=2, **{"compute_dtype": "float32", **changes}).to_toml() for name in names
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", RECIPES)
def test_random_values_under_any_plan_and_grid(kind: str) -> None:
    grid = {"llama": (1, 2, 2), "tied": (2, 2, 1), "gpt": (2, 1, 2), "learned": (1, 4, 1)}[kind]
    dp, tp, pp = grid
    plans = [
        tw.Plan.preset("zero1", nodes=1, local=dp, tp=tp, pp=pp, micro_batches=4, compute_dtype="bfloat16").to_toml(),
        *data_plans(granularity="module")[:1],
        *data_plans(compute_dtype="bfloat16")[1:2],
    ]
    assert all(count > 20 for count in run_ranks(4, same_as_whole, RECIPES[kind], plans))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_weights_in_files_under_any_plan(family: str, tmp_path: Path) -> None:
    random_model(family).save_pretrained(tmp_path, max_shard_size="40KB")
    recipe = {"kind": "huggingface", "path": str(tmp_path)}
    plans = data_plans(compute_dtype="bfloat16")
    assert all(count > 20 for count in run_ranks(4, same_as_whole, recipe, plans[:2] + plans[4:]))
    recipe = {"kind": "huggingface", "config": FAMILIES[family]}
    plans = data_plans(granularity="module")
    assert all(count > 20 for count in run_ranks(4, same_as_whole, recipe, plans[:1] + plans[3:4]))


def start_from(directories: list[str], name: str) -> None:
    recipe = {"kind": "huggingface", "path": directories[control().rank]}
    started(recipe, tw.Plan.preset(name, nodes=1, local=2, compute_dtype="float32"))


def test_files_that_do_not_fit_or_differ_are_reported_on_every_rank(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("good", "other", "short")]
    for seed, path in enumerate(paths):
        random_model("llama", seed).save_pretrained(path)
    good, other, short = map(str, paths)
    table = re.sub('"num_hidden_layers": 2', '"num_hidden_layers": 3', (paths[2] / "config.json").read_text())
    (paths[2] / "config.json").write_text(table)
    for directories, messages in [
        ([good, other], ["rank 1 and rank 0 would start from different values"] * 2),
        ([short, short], ["does not fit LlamaForCausalLM: 9 missing"] * 2),
        (
            [good, short],
            ["rank 1 cannot shard its model, while rank 0 can: .*9 missing", "short does not fit .*9 missing"],
        ),
    ]:
        with pytest.raises(RankError) as caught:
            run_ranks(2, start_from, directories, "zero3")
        for text, message in zip(caught.value.tracebacks, messages, strict=True):
            assert text is not None
            assert re.search(message, text)


class Unreadable:
    """Initial values, the last of which one rank's disk loses."""

    def open(self) -> str:
        return "ones"

    def read(self, name: str, region: tuple[slice, ...]) -> torch.Tensor:
        if control().rank == 1 and name == "2.bias":
            raise DataError("the disk is gone")
        return torch.ones([part.stop - part.start for part in region])


def start_unreadable() -> None:
    with parameters_on_meta():
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    plan = tw.Plan.preset("ddp", nodes=1, local=2, compute_dtype="float32")
    tw.shard(model, plan, values=Unreadable(), device="cpu")


def test_a_file_that_one_rank_cannot_read_is_reported_on_every_rank() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, start_unreadable)
    first, second = caught.value.tracebacks
    assert "MismatchError: rank 1 cannot read its initial values: the disk is gone" in str(first)
    assert "DataError: the disk is gone" in str(second)


def start_without_values(how: str) -> None:
    with parameters_on_meta():
        model = torch.nn.Linear(8, 8)
    plan = tw.Plan.preset("zero3", nodes=1, local=1, compute_dtype="float32")
    match how:
        case "no values":
            tw.shard(model, plan)
        case "no device":
            tw.shard(model, plan, values=Unreadable())
        case "real":
            tw.shard(torch.nn.Linear(8, 8), plan, values=Unreadable(), device="cpu")
        case "both":
            model.register_parameter("other", torch.nn.Parameter(torch.ones(3)))
            tw.shard(model, plan, values=Unreadable(), device="cpu")
        case "buffers":
            tw.shard(torch.nn.BatchNorm1d(8, device="meta"), plan, values=Unreadable(), device="cpu")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no values", "on the meta device and has no values: say where they come from with values= and device="),
        ("no device", "values= without device="),
        ("real", "this one's parameters have values already"),
        ("both", "parameter weight is on the meta device and other is not|is on the meta device and .* is not"),
        ("buffers", "buffer running_mean is on the meta device"),
    ],
)
def test_models_on_the_meta_device_need_values(how: str, message: str) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(1, start_without_values, how)
    assert re.search(message, str(caught.value.tracebacks[0]))


class Peak:
    """Peak memory of this process, without mapped files, while the block runs."""

    def __enter__(self) -> Peak:
        self.start = self.most = self.now()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @staticmethod
    def now() -> int:
        return int(re.search(r"RssAnon:\s*(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))[1]) << 10  # type: ignore[index]

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.most = max(self.most, self.now())


LARGE = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "vocab_size": 8192,
    "max_position_embeddings": 64,
}


def growth_of_start(recipe: dict[str, Any]) -> tuple[int, int, int]:
    """Bytes of the whole model in fp32, of the part that this rank keeps, and of the peak while loading."""
    started({"kind": "llama", **OURS}, tw.Plan.preset("zero3", nodes=2, local=2, compute_dtype="float32"))
    plan = tw.Plan.preset("zero3", nodes=2, local=2, compute_dtype="float32")
    with Peak() as peak:
        made = draft(ModelRecipe(**recipe), vocab=99, seq=LENGTH, seed=0)
        whole = 4 * sum(parameter.numel() for parameter in made.model.parameters())
        tw.parallelize(made.model, plan, values=made.values, device=CPU)
    return whole, peak.now() - peak.start, peak.most - peak.start


@pytest.mark.slow
@pytest.mark.parametrize("source", ["file", "random", "ours"])
def test_no_rank_ever_holds_the_whole_model(source: str, tmp_path: Path) -> None:
    """Four ranks, parameters, gradients and masters sharded over all of them."""
    import transformers

    recipe: dict[str, Any] = {"kind": "huggingface", "config": LARGE}
    if source == "file":
        config = transformers.AutoConfig.for_model(**LARGE)
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
        recipe = {"kind": "huggingface", "path": str(tmp_path)}
    elif source == "ours":
        recipe = {"kind": "llama", "layers": 12, "hidden": 512, "heads": 8, "ffn": 1408, "vocab": 8192}
    for whole, kept, most in run_ranks(4, growth_of_start, recipe):
        assert whole > 170 << 20
        # A quarter of 4 + 4 bytes per parameter stays, plus the memory that the allocator does not return.
        assert most < 0.8 * whole, f"{most >> 20} MiB at most, {kept >> 20} MiB kept, {whole >> 20} MiB in all"
        assert most - kept < 0.25 * whole
