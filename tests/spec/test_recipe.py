"""Recipes: valid files, refusals, and the plans that result."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.support.paths import ROOT

from thinwire.errors import SpecError, UsageError
from thinwire.parallel import Grid
from thinwire.spec.factor import Factor
from thinwire.spec.models.model import ModelSpec
from thinwire.spec.plan import Plan
from thinwire.spec.recipe import ModelRecipe, Recipe
from thinwire.spec.template import PlanTemplate
from thinwire.train.environment import Started, device_kind, rank_device, resolve_mesh, started
from thinwire.train.observing.measure import share_across

BASE = """
[model]
layers = 2
hidden = 32
heads = 2
[train]
steps = 5
"""
QUICKSTART = ROOT / "recipes" / "quickstart.toml"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "recipe.toml"
    file.write_text(BASE)
    return file


def test_defaults_and_overrides(path: Path) -> None:
    recipe = Recipe.read(path, ["train.steps=9", "optimizer.lr=1e-3", "data.max_bytes=1MiB"])
    assert (recipe.train.steps, recipe.optimizer.lr, recipe.data.max_bytes) == (9, 1e-3, 2**20)
    assert recipe.plan == {"preset": "zero1-node"}


def test_recipes_survive_toml(path: Path) -> None:
    for recipe in (Recipe.read(path), Recipe.read(QUICKSTART)):
        assert Recipe.from_toml(recipe.to_toml()) == recipe


def test_a_recipe_that_names_no_plan_can_be_written_without_its_defaults() -> None:
    table = {"model": {"layers": 1, "hidden": 8, "heads": 2}, "train": {"steps": 3}}
    recipe = Recipe.parse(table)
    assert recipe.to_file(full=False) == table
    assert Recipe.parse(recipe.to_file(full=False)) == recipe


@pytest.mark.parametrize(("text", "steps"), [("2:4", (2, 4)), ("3", (3, 3)), ("[1, 5]", (1, 5))])
def test_traced_steps_are_a_range(path: Path, text: str, steps: tuple[int, int]) -> None:
    recipe = Recipe.read(path, [f"train.trace_steps={text}"])
    assert recipe.train.trace_steps == steps
    assert Recipe.from_toml(recipe.to_toml()) == recipe


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("3:9", '"3:9" ends after the last step, train.steps = 5'),
        ("4:2", '"4:2" should go from a step of at least 1'),
        ("0:2", '"0:2" should go from a step of at least 1'),
        ("3:", "is no range of steps"),
        ("a:b", "is no range of steps"),
        ("true", "is no range of steps"),
    ],
)
def test_other_traced_steps_are_refused(path: Path, text: str, why: str) -> None:
    with pytest.raises(SpecError, match=re.escape(why)):
        Recipe.read(path, [f"train.trace_steps={text}"])


def test_too_many_traced_steps_are_refused(path: Path) -> None:
    with pytest.raises(SpecError, match="at most 20 can be traced"):
        Recipe.read(path, ["train.steps=100", "train.trace_steps=10:30"])


def test_every_problem_at_once_with_suggestions(path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        Recipe.read(path, ["train.stepz=9", "train.seq=0", "optimizer.lr=fast", "model.heads=3", "colour=red"])
    text = str(caught.value)
    for expected in ("train.stepz", "did you mean steps?", "train.seq", "optimizer.lr", "model.heads", "colour"):
        assert expected in text
    assert len(caught.value.problems) == 5


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("data.paths=/a.txt", """= '/a.txt' should be a list, for example ["/a.txt"]"""),
        ("optimizer.betas=0.9", "= 0.9 should be a list, for example [0.9, 0.95]"),
        ("checkpoint.timeout=0", "should be greater than 0"),
        ("train.trackers=2026-01-01", "should be a list"),
        ("optimizer.betas=[0.9, 1.0]", "should be less than 1"),
        ("optimizer.weight_decay=inf", "finite number"),
        ("cluster.timeout=0", "should be greater than or equal to 1"),
    ],
)
def test_values_that_no_run_can_have_are_refused(path: Path, setting: str, why: str) -> None:
    with pytest.raises(SpecError, match=re.escape(setting.partition("=")[0]) + ".*" + re.escape(why)):
        Recipe.read(path, [setting])


def test_a_missing_recipe_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"absent\.toml"):
        Recipe.read(tmp_path / "absent.toml")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"kind": "huggingface"}, "either path or config"),
        ({"kind": "huggingface", "path": "a", "config": "b"}, "path and config"),
        ({"kind": "huggingface", "path": "a", "layers": 3}, "layers has no effect"),
        ({"layers": 1, "hidden": 8, "heads": 2, "path": "a"}, "for kind"),
        ({"layers": 1, "hidden": 8}, "heads"),
        ({"layers": 1, "hidden": 6, "heads": 2}, "odd head width 3"),
        ({"kind": "gpt", "layers": 1, "hidden": 8, "heads": 4, "kv_heads": 2}, "no grouped queries"),
        ({"preset": "gpt-18b", "kv_heads": 2}, "no grouped queries"),
        ({"preset": "llama-9b"}, "llama-9b"),
    ],
)
def test_impossible_models(model: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        ModelRecipe(**model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("model.positions=learned",), 'kind = "gpt"'),
        (("model.expert_ffn=9",), "no experts"),
        (("model.preset=gpt-18b", "model.positions=learned", "model.rope_theta=9.0"), "rotate nothing"),
        (("data.token_type=uint16",), 'source = "tokens"'),
        (("data.source=text", 'data.paths=["a"]', "data.text_key=body"), "no keys"),
        (("data.source=tokens", 'data.paths=["a"]', "data.max_bytes=9"), "no text"),
    ],
)
def test_keys_without_effect_are_refused(path: Path, settings: tuple[str, ...], message: str) -> None:
    key, _, _ = settings[-1].partition("=")
    with pytest.raises(SpecError, match=rf"{re.escape(key)} = .* has no effect: .*{message}.*; leave it out"):
        Recipe.read(path, settings)
    assert Recipe.read(path, settings[:-1])


def test_keys_without_effect_on_a_hugging_face_model_are_refused(path: Path) -> None:
    text = '[model]\nkind = "huggingface"\nconfig = "config.json"\nnorm_eps = 1e-6\n[train]\nsteps = 5'
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SpecError, match=r"model\.norm_eps = 1e-06 has no effect: .* config\.json says"):
        Recipe.read(path)
    written = Recipe.load(path).to_toml()
    path.write_text(written.replace("norm_eps = 1e-06", "norm_eps = 1e-05"), encoding="utf-8")
    assert Recipe.read(path), "a run writes every key, with its default"


def test_presets_of_models() -> None:
    shape = ModelRecipe(preset="gpt-neox-20b", layers=2).shape(vocab=4096, seq=128)
    assert (shape.kind, shape.layers, shape.hidden, shape.vocab, shape.seq) == ("gpt", 2, 6144, 4096, 128)


@pytest.mark.parametrize("preset", ModelSpec.preset_names())
def test_the_recipe_that_a_run_writes_is_of_the_same_model(preset: str) -> None:
    recipe = Recipe.parse({"model": {"preset": preset}, "train": {"steps": 3}})
    sizes, again = {"vocab": 300, "seq": 16}, Recipe.from_toml(recipe.to_toml()).model
    assert again.shape(**sizes) == recipe.model.shape(**sizes) == ModelSpec.preset(preset, **sizes)
    assert again.family == ModelSpec.preset(preset).kind


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("source = 'text'", "paths is empty"),
        ("paths = ['a']", "ignores it"),
        ("validation_share = 1.0", "between 0 and 1"),
        ("source = 'csv'", "stdlib"),
    ],
)
def test_impossible_data(path: Path, data: str, message: str) -> None:
    path.write_text(f"{BASE}[data]\n{data}\n", encoding="utf-8")
    with pytest.raises(SpecError, match=message):
        Recipe.read(path)


def test_paths_in_a_file_are_relative_to_it_and_on_the_command_line_to_the_working_directory(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    path.write_text(
        f"plan = 'plans/mine.toml'\n{BASE}[data]\nsource = 'text'\npaths = ['a', '/b/*.txt']\n", encoding="utf-8"
    )
    recipe = Recipe.read(path, ["data.tokenizer=tok.json", 'data.validation_paths=["v"]'])
    assert recipe.data.paths == (str(tmp_path / "a"), "/b/*.txt")
    assert recipe.data.tokenizer == str(work / "tok.json")
    assert recipe.data.validation_paths == (str(work / "v"),)
    assert recipe.plan == {"file": str(tmp_path / "plans/mine.toml")}
    assert Recipe.read(path, plan="other.toml").plan == {"file": str(work / "other.toml")}


MESH = Factor(local=2, nodes=2)


def test_plans_by_preset_table_and_file(path: Path, tmp_path: Path) -> None:
    assert PlanTemplate.read(Recipe.read(path)).resolve(MESH) == Plan.preset("zero1-node", nodes=2, local=2)
    recipe = Recipe.read(path, ["plan.bucket_bytes=1MiB", "plan.overlap.sync=false"], plan="preset:zero3")
    plan = PlanTemplate.read(recipe).resolve(MESH)
    assert plan == Plan.preset("zero3", nodes=2, local=2, bucket_bytes=2**20, overlap={"sync": False})
    file = tmp_path / "plan.toml"
    plan.save(file)
    assert PlanTemplate.read(Recipe.read(path, plan=str(file))).resolve(MESH) == plan
    assert PlanTemplate.read(Recipe.read(path, plan=str(file))).mesh == MESH
    free = ["plan.params=1x1", "plan.grads=1x1", "plan.optimizer=2x2"]
    assert PlanTemplate.read(Recipe.read(path, free)).resolve(MESH).optimizer == MESH
    path.write_text("[plan]\nprefetch = 2\n" + BASE, encoding="utf-8")
    assert PlanTemplate.read(Recipe.read(path, free)).resolve(MESH).optimizer == MESH


def test_unknown_plan_keys_and_presets_are_refused(path: Path) -> None:
    with pytest.raises(SpecError, match=r"bucket_byte .*did you mean tuning.bucket_bytes"):
        PlanTemplate.read(Recipe.read(path, ["plan.bucket_byte=1"])).resolve(MESH)
    with pytest.raises(SpecError, match=r"no preset 'zero9'.*valid are ddp"):
        PlanTemplate.read(Recipe.read(path, plan="preset:zero9")).resolve(MESH)
    with pytest.raises(SpecError, match="exclude each other"):
        PlanTemplate.read(Recipe.read(path, ["plan.file=x.toml"], plan="preset:ddp")).resolve(MESH)


def test_a_plan_for_another_mesh_says_how_to_start_it(path: Path, tmp_path: Path) -> None:
    Plan.preset("zero1", nodes=3, local=2).save(tmp_path / "plan.toml")
    recipe = Recipe.read(path, plan=str(tmp_path / "plan.toml"))
    with pytest.raises(SpecError, match=r"--nodes 3 --nproc 2"):
        PlanTemplate.read(recipe).resolve(MESH)


def test_the_recipes_batch_wins_and_a_global_batch_fits_any_world(path: Path) -> None:
    recipe = Recipe.read(path, ["plan.micro_batch=3", "plan.recompute=true"])
    plan = PlanTemplate.read(recipe).resolve(MESH)
    assert (plan.micro_batch, plan.micro_batches, plan.recompute) == (3, 1, True)
    recipe = Recipe.read(path, ["plan.micro_batch=4", "train.global_batch=24"])
    plans = [PlanTemplate.read(recipe).resolve(Factor(local=ranks)) for ranks in (1, 2, 4, 12, 24)]
    batches = [(plan.micro_batch, plan.micro_batches) for plan in plans]
    assert batches == [(4, 6), (4, 3), (3, 2), (2, 1), (1, 1)]
    with pytest.raises(SpecError, match=r"global_batch = 24 should be a multiple of the 5 ranks"):
        PlanTemplate.read(recipe).resolve(Factor(local=5))
    with pytest.raises(SpecError, match="leave one out"):
        Recipe.read(path, ["plan.micro_batches=2", "train.global_batch=24"])


def test_plan_file_values_that_the_recipe_replaces_are_reported(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    Plan.preset("zero1", nodes=2, local=2, micro_batch=4, micro_batches=2).save(file)
    recipe = Recipe.read(path, ["plan.micro_batch=8"], plan=str(file))
    assert PlanTemplate.read(recipe).resolve(MESH).micro_batches == 2
    assert PlanTemplate.read(recipe).replaced(MESH) == ("the recipe's micro_batch = 8 replaces the plan file's 4",)
    assert PlanTemplate.read(Recipe.read(path, plan=str(file))).replaced(MESH) == ()
    assert PlanTemplate.read(Recipe.read(path, ["plan.micro_batch=8"])).replaced(MESH) == ()


def test_auto_dtype(path: Path) -> None:
    recipe = Recipe.read(path, ["plan.compute_dtype=auto"])
    assert PlanTemplate.read(recipe).resolve(MESH, auto_dtype="float32").compute_dtype == "float32"


def torchrun(world: int, local: int) -> Started:
    return Started(by="torchrun", rank=0, world=world, local_rank=0, local_world=local)


@pytest.mark.parametrize(
    ("settings", "ranks", "num_gpus", "mesh"),
    [
        ([], None, 0, "1x1"),
        ([], None, 4, "4x1"),
        (["cluster.without_gpu=2x2"], None, 0, "2x2"),
        (["cluster.without_gpu=2x2"], None, 8, "8x1"),
        (["cluster.nodes=2", "cluster.nproc=3"], None, 8, "3x2"),
        ([], torchrun(4, 2), 8, "2x2"),
        (["cluster.nodes=2"], torchrun(4, 4), 0, "2x2"),
        (["cluster.nproc=1"], torchrun(4, 4), 0, "1x4"),
        (["cluster.without_gpu=2x2"], torchrun(3, 3), 0, "3x1"),
        (["plan.mesh=2x2"], None, 0, "2x2"),
        (["plan.mesh=2x2"], torchrun(4, 4), 0, "2x2"),
    ],
)
def test_the_mesh(path: Path, settings: list[str], ranks: Started | None, num_gpus: int, mesh: str) -> None:
    assert str(resolve_mesh(PlanTemplate.read(Recipe.read(path, settings)), ranks, num_gpus)) == mesh


@pytest.mark.parametrize(
    ("settings", "ranks", "mesh"),
    [
        (["plan.tp=2", "plan.pp=2", "cluster.nproc=4"], None, "1x1"),
        (["plan.tp=2", "plan.pp=2", "cluster.nproc=4", "cluster.nodes=2"], None, "2x1"),
        (["plan.tp=2", "plan.pp=2", "cluster.nproc=4", "cluster.nodes=4"], None, "2x2"),
        (["plan.pp=4", "cluster.nproc=4", "cluster.nodes=2"], None, "2x1"),  # two stages a node
        (["plan.tp=2", "plan.pp=2"], torchrun(8, 4), "2x1"),
        (["plan.tp=2", "plan.pp=2"], torchrun(8, 8), "2x1"),
        (["plan.mesh=2x1", "plan.tp=2", "plan.pp=2"], None, "2x1"),
        (["plan.mesh=2x1", "plan.tp=2", "plan.pp=2"], torchrun(8, 8), "2x1"),
    ],
)
def test_the_mesh_is_what_stages_and_tensor_parallel_ranks_leave(
    path: Path, settings: list[str], ranks: Started | None, mesh: str
) -> None:
    assert str(resolve_mesh(PlanTemplate.read(Recipe.read(path, settings)), ranks, 0)) == mesh


@pytest.mark.parametrize(
    ("nodes", "nproc", "tp", "pp", "remedy"),
    [
        (1, 4, 3, 2, "--nodes 1 --nproc 6"),
        (2, 3, 2, 1, "--nodes 2 --nproc 4"),
        (3, 4, 1, 2, "--nodes 2 --nproc 4"),
        (2, 4, 3, 4, "--nodes 2 --nproc 6"),
    ],
)
def test_a_grid_that_does_not_fit_comes_with_one_that_does(
    nodes: int, nproc: int, tp: int, pp: int, remedy: str
) -> None:
    with pytest.raises(SpecError, match=f"tp = {tp}, pp = {pp} do not fit nodes = {nodes}.* {remedy} would do"):
        Factor(local=nproc, nodes=nodes).data_parallel(tp, pp)
    _, nodes_then, _, nproc_then = remedy.split()
    Factor(local=int(nproc_then), nodes=int(nodes_then)).data_parallel(tp, pp)


def test_a_pipeline_gets_enough_micro_batches(path: Path) -> None:
    settings = ["plan.pp=4", "plan.micro_batch=8", "train.global_batch=32"]
    plan = PlanTemplate.read(Recipe.read(path, settings)).resolve(Factor(local=2))
    assert (plan.micro_batch, plan.micro_batches) == (4, 4)
    interleaved = [*settings[:2], "plan.schedule=interleaved", "train.global_batch=12"]
    plan = PlanTemplate.read(Recipe.read(path, interleaved)).resolve(Factor(local=1))
    assert (plan.micro_batch, plan.micro_batches) == (3, 4)
    with pytest.raises(SpecError, match=r"global_batch = 4 gives each data-parallel rank 2 .* a multiple of 8"):
        PlanTemplate.read(Recipe.read(path, [*settings[:2], "train.global_batch=4"])).resolve(Factor(local=2))
    with pytest.raises(SpecError, match=r"micro_batches = 3 leaves stages .* idle; set it to 4"):
        PlanTemplate.read(Recipe.read(path, ["plan.pp=4", "plan.micro_batches=3"])).resolve(Factor(local=2))


def test_only_sequence_parallelism_cuts_sequences(path: Path) -> None:
    odd = ["plan.tp=2", "train.seq=15"]
    plan = PlanTemplate.read(Recipe.read(path, [*odd, "plan.sequence_parallel=false"])).resolve(Factor())
    assert not plan.sequence_parallel
    assert "tp 2; whole sequences on each tp rank" in plan.describe()
    with pytest.raises(SpecError, match=r"seq = 15 .* plan.tp = 2, .* unless plan.sequence_parallel = false"):
        PlanTemplate.read(Recipe.read(path, odd)).resolve(Factor())


def test_a_plan_file_for_a_grid_says_how_to_start_it(path: Path, tmp_path: Path) -> None:
    Plan.preset("zero1", nodes=1, local=2, tp=2, pp=3, micro_batches=3).save(tmp_path / "plan.toml")
    recipe = Recipe.read(path, plan=str(tmp_path / "plan.toml"))
    with pytest.raises(SpecError, match=r"4 data-parallel ranks .* --nodes 3 --nproc 4"):
        PlanTemplate.read(recipe).resolve(MESH)


@pytest.mark.parametrize(
    ("grid", "chunks", "node_ranks", "share"),
    [
        (Grid(2, 2, 2, rank=0), 1, 4, 1.0),
        (Grid(2, 2, 2, rank=0), 1, 8, 0.0),
        (Grid(4, 2, 1, rank=3), 1, 4, 0.5),  # of the middle stages, each has one neighbour in its node
        (Grid(4, 2, 1, rank=0), 1, 4, 0.0),
        (Grid(4, 1, 1, rank=0), 2, 2, 1 / 3),  # stages 0 and 4: to 1, to 3 on the other node, to 5
        (Grid(1, 8, 1, rank=0), 1, 4, 0.0),
    ],
)
def test_messages_between_stages_that_cross_nodes(grid: Grid, chunks: int, node_ranks: int, share: float) -> None:
    assert share_across(grid, chunks, node_ranks) == pytest.approx(share)


def test_ranks_that_do_not_form_the_mesh(path: Path) -> None:
    with pytest.raises(SpecError, match=r"4 ranks, but torchrun started 3"):
        resolve_mesh(PlanTemplate.read(Recipe.read(path, ["cluster.nodes=2", "cluster.nproc=2"])), torchrun(3, 3), 0)


def test_the_environment() -> None:
    assert started({}) is None
    place = started({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    assert place == Started(by="torchrun", rank=3, world=4, local_rank=1, local_world=2)
    with pytest.raises(UsageError, match="unset RANK"):
        started({"RANK": "3"})
    slurm = {
        "SLURM_PROCID": "5",
        "SLURM_NTASKS": "8",
        "SLURM_NNODES": "2",
        "SLURM_LOCALID": "1",
        "SLURM_JOB_NODELIST": "gpu[07-08]",
        "SLURM_JOB_ID": "41234",
    }
    assert started(slurm) == Started(by="SLURM", rank=5, world=8, local_rank=1, local_world=4)
    assert (slurm["RANK"], slurm["MASTER_ADDR"], slurm["MASTER_PORT"]) == ("5", "gpu07", "21234")
    assert started({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) is None


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"SLURM_TASKS_PER_NODE": "4,2"}, r"6 tasks on 2 nodes \(SLURM_TASKS_PER_NODE = '4,2'\).*--ntasks-per-node"),
        ({"SLURM_NTASKS": "5"}, "5 tasks on 2 nodes"),
        ({"SLURM_NTASKS": "x"}, "SLURM_PROCID is set, .*'x'.*through srun"),
        ({"SLURM_PROCID": ""}, "SLURM_PROCID is set, .*through srun"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is set, .*rank 2 of 2"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "0"}, "RANK is set, .*0 on this host"),
    ],
)
def test_an_environment_that_is_not_usable_is_named(variables: dict[str, str], message: str) -> None:
    slurm = {"SLURM_PROCID": "3", "SLURM_NTASKS": "6", "SLURM_NNODES": "2", "SLURM_TASKS_PER_NODE": "3(x2)"}
    started(dict(slurm))
    with pytest.raises(UsageError, match=message):
        started(slurm | variables)


def test_steps_of_one_job_meet_at_places_of_their_own() -> None:
    job = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_NNODES": "4", "SLURM_JOB_NODELIST": "n[1-4]"}
    job |= {"SLURM_JOB_ID": "77", "SLURM_TASKS_PER_NODE": "2(x4)"}
    places = set()
    for step, nodes in enumerate(("n[1-2]", "n[1-2]", "n[3-4]")):
        own = {"SLURM_STEP_ID": str(step), "SLURM_STEP_NODELIST": nodes, "SLURM_STEP_NUM_NODES": "2"}
        environment = job | own | {"SLURM_NTASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
        started(environment)
        assert (environment["MASTER_ADDR"], environment["LOCAL_WORLD_SIZE"]) == (f"n{nodes[2]}", "2")
        places.add((environment["MASTER_ADDR"], environment["MASTER_PORT"]))
    assert len(places) == 3


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("a", "a"), ("a,b", "a"), ("n[1,3]", "n1"), ("n[03-05,9],m", "n03"), ("rack-1-[2-3]", "rack-1-2")],
)
def test_first_hosts(nodes: str, host: str) -> None:
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": nodes}
    started(slurm)
    assert slurm["MASTER_ADDR"] == host


def test_demanding_a_gpu_that_is_not_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert device_kind(Recipe.read(path).cluster.device) == "cpu"
    with pytest.raises(UsageError, match="no CUDA device"):
        device_kind(Recipe.read(path, ["cluster.device=cuda"]).cluster.device)


def test_a_demand_for_the_cpu_holds_where_there_are_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    devices = [rank_device("auto", local_rank) for local_rank in range(4)]
    assert [device.index for device in devices] == [0, 1, 0, 1]
    assert rank_device("cpu", 0).type == "cpu"


def test_the_quickstart_shards_parameters_and_optimizer_differently() -> None:
    recipe = Recipe.read(QUICKSTART)
    template = PlanTemplate.read(recipe)
    plan = template.resolve(resolve_mesh(template, None, 0))
    assert plan.world == 4
    assert plan.mesh == MESH
    assert plan.params != plan.optimizer
    assert 5e6 < recipe.model.shape(vocab=4096, seq=128).parameters < 10e6


def test_a_hugging_face_model_from_the_command_line(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that are there are used, with their tokenizer; a configuration alone starts at random."""
    home = tmp_path / "model"
    home.mkdir()
    with pytest.raises(SpecError, match="is no directory with a config"):
        Recipe.read(path, model=str(home))
    (home / "config.json").write_text('{"model_type": "llama"}')
    recipe = Recipe.read(path, model=str(home))
    assert recipe.model.kind == "huggingface"
    assert recipe.model.config == str(home)
    assert not recipe.model.starts_from_files
    assert recipe.data.tokenizer == "bpe"
    assert Recipe.read(path, model=str(home / "config.json")).model.config == str(home / "config.json")
    (home / "model.safetensors").write_bytes(b"")
    with pytest.raises(SpecError, match='"bpe" trains a new one'):
        Recipe.read(path, model=str(home))
    assert Recipe.read(path, ["model.weights=random"], model=str(home)).data.tokenizer == "bpe"
    (home / "tokenizer.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    recipe = Recipe.read(path, model="model")
    assert recipe.model.path == recipe.data.tokenizer == str(home)
    assert recipe.model.starts_from_files
    assert Recipe.read(path, ["data.tokenizer=other.json"], model="model").data.tokenizer == str(
        tmp_path / "other.json"
    )
    (home / "model.safetensors").rename(home / "pytorch_model.bin")
    assert Recipe.read(path, model="model").model.starts_from_files, "refused later: pickles are not loaded"


def test_a_model_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    recipe = ModelRecipe.parse({"kind": "huggingface", "path": str(tmp_path / "config.json")})
    with pytest.raises(SpecError, match=r"is a file; give the directory that holds it, or set model\.config to it"):
        recipe.configuration  # noqa: B018
