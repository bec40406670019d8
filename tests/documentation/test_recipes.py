"""The recipes of the repository are valid, their plans fit the clusters that they name, and their launchers start."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.paths import ROOT
from tests.support.small import environment, write_text

from thinwire.cost import NominalRates
from thinwire.plan import TrainingJob, candidate
from thinwire.spec import ClusterSpec
from thinwire.spec.factor import Factor
from thinwire.spec.plan import Plan
from thinwire.spec.recipe import Recipe
from thinwire.spec.template import PlanTemplate
from thinwire.train.environment import free_port

LAUNCH = ROOT / "recipes/launch"
STUDIES, PLANS = "study.toml", ".plan.toml"
RECIPES = sorted(path for path in (ROOT / "recipes").rglob("*.toml") if not path.name.endswith((STUDIES, PLANS)))
LARGE = [path for path in RECIPES if path.parent.name == "pretrain"]

TINY = [
    *("model.layers=2", "model.hidden=32", "model.heads=2", "model.kv_heads=1", "model.ffn=48"),
    *("data.source=text", "data.vocab=300", "plan.compute_dtype=float32"),
    *("train.steps=3", "train.seq=16", "plan.micro_batch=2", "train.global_batch=8"),
    *("train.validate_every=0", "train.validation_samples=8", "train.log_every=1", "train.tensorboard=false"),
    *("optimizer.warmup=1", "cluster.device=cpu"),
]
"""Settings that make any Llama train within a second."""


def name(path: Path) -> str:
    return str(path.relative_to(ROOT / "recipes"))


@pytest.mark.parametrize("path", RECIPES, ids=name)
def test_it_is_valid(path: Path) -> None:
    template = PlanTemplate.read(Recipe.read(path))
    template.resolve(template.mesh or Factor(local=4).data_parallel(*template.model_parallel))


@pytest.mark.parametrize("path", LARGE, ids=name)
def test_its_plan_fits_the_cluster_that_it_names(path: Path) -> None:
    (named,) = re.findall(r"^# Cluster: ([^\s,]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    cluster, recipe = ClusterSpec.named(named), Recipe.read(path)
    plan = PlanTemplate.read(recipe).resolve(Factor(local=cluster.gpus_per_node, nodes=cluster.nodes))
    train, vocab = recipe.train, recipe.data.vocab
    assert train.global_batch is not None
    assert vocab is not None
    model = recipe.model.shape(vocab=vocab, seq=train.seq)
    tokens = train.global_batch * train.seq
    job = TrainingJob(model, cluster, tokens, train.seq, rates=NominalRates(cluster, "bfloat16"))
    rated = candidate(job, plan)
    assert rated.fits
    assert rated.memory.total < 0.9 * cluster.memory  # the estimate is an estimate
    assert 19 < train.steps * tokens / model.parameters < 22  # tokens of a parameter
    assert recipe.checkpoint.every


def test_the_plan_file_is_for_its_recipe() -> None:
    """The header names the command that made it, and the recipe changes nothing in it."""
    (path,) = (ROOT / "recipes/pretrain").glob(f"*{PLANS}")
    recipe = Recipe.read(path.with_name(path.name.replace(PLANS, ".toml")))
    assert PlanTemplate.read(recipe).replaced(Plan.load(path).mesh) == ()


# -- launchers ---------------------------------------------------------------------------------------------------

SCRIPTS = sorted(path for path in LAUNCH.iterdir() if path.suffix in (".sh", ".sbatch"))


@pytest.mark.parametrize("script", SCRIPTS, ids=name)
def test_scripts_are_sound(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    shellcheck = Path(sys.executable).with_name("shellcheck")
    checked = subprocess.run([shellcheck, script], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


def test_the_kubernetes_job_is_consistent() -> None:
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    assert (service["kind"], service["spec"]["clusterIP"]) == ("Service", "None")
    assert (job["apiVersion"], job["kind"], job["spec"]["completionMode"]) == ("batch/v1", "Job", "Indexed")
    assert service["spec"]["selector"]["job-name"] == job["metadata"]["name"]
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    nodes = int(variables["NNODES"])
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == nodes
    assert int(variables["NPROC"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    # An indexed Job's first pod has the host name JOB-0, below the service that is its subdomain.
    assert variables["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert (ROOT / container["command"][0]).is_file()
    (recipe,) = container["args"]
    assert PlanTemplate.read(Recipe.read(ROOT / recipe)).mesh == Factor(local=int(variables["NPROC"]), nodes=nodes)


def test_the_slurm_script_asks_for_a_task_for_each_gpu() -> None:
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)", (LAUNCH / "slurm.sbatch").read_text(), re.MULTILINE))
    assert asked["ntasks-per-node"] == asked["gpus-per-node"]


class Place:
    """A directory with text, and how to start scripts in it.

    Args:
        path: of the directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        write_text(path / "text.txt")
        self.settings = [f"--set={word}" for word in [*TINY, f"data.paths=[{str(path / 'text.txt')!r}]"]]

    def start(self, script: Path, recipe: Path, **variables: str) -> subprocess.Popen[str]:
        tools = os.pathsep.join((str(self.path / "tools"), str(Path(sys.executable).parent), os.environ["PATH"]))
        settings = {"PATH": tools, "OUT": str(self.path / "run"), "THINWIRE_CACHE": str(self.path / "cache")}
        settings |= {"MAX_RESTARTS": "0", **variables}
        return subprocess.Popen(
            ["bash", script, recipe, "--plan=preset:zero1", *self.settings],
            cwd=self.path,
            env=environment(**settings),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finished(self, process: subprocess.Popen[str]) -> str:
        output, _ = process.communicate(timeout=280)
        assert process.returncode == 0, output
        return output

    @property
    def summary(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.path / "run/summary.json").read_text())
        return content


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("recipe", LARGE, ids=name)
def test_torchrun_trains_a_tiny_one_of_it_and_continues(place: Place, recipe: Path) -> None:
    if "preset" in recipe.read_text(encoding="utf-8").partition("[model]")[2].partition("[data]")[0]:
        place.settings += ["--set=model.vocab=300"]
    place.finished(place.start(LAUNCH / "torchrun.sh", recipe, NPROC="2"))
    assert place.summary["steps"] == 3
    place.settings += ["--set=train.steps=5"]
    place.finished(place.start(LAUNCH / "torchrun.sh", recipe, NPROC="2"))
    assert place.summary["steps"] == 5
    records = (place.path / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in records] == [1, 2, 3, 4, 5]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranked", [True, False], ids=["with NODE_RANK", "without"])
def test_torchrun_on_two_nodes(place: Place, ranked: bool) -> None:
    common = {"NNODES": "2", "NPROC": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    recipe = LARGE[0]
    nodes = [
        place.start(LAUNCH / "torchrun.sh", recipe, **common, **({"NODE_RANK": str(node)} if ranked else {}))
        for node in range(2)
    ]
    for node in nodes:
        place.finished(node)
    assert (place.summary["plan"]["mesh"]["nodes"], place.summary["steps"]) == (2, 3)


SRUN = """#!/usr/bin/env bash
# As srun does: one process for each task, with variables that say which. Options are noted.
set -euo pipefail
while [[ $1 == --* ]]; do echo "$1" >> srun-options; shift; done
tasks=()
for ((task = 0; task < SLURM_NTASKS; task++)); do
  SLURM_PROCID=$task SLURM_LOCALID=0 "$@" & tasks+=($!)
done
for task in "${tasks[@]}"; do wait "$task"; done
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_slurm_on_two_nodes(place: Place) -> None:
    """SLURM's variables are real, srun is a stand-in that starts both tasks here."""
    (place.path / "tools").mkdir()
    srun = place.path / "tools/srun"
    srun.write_text(SRUN)
    srun.chmod(0o755)
    variables = {
        "SLURM_NTASKS": "2",
        "SLURM_NNODES": "2",
        "SLURM_JOB_ID": str(free_port() - 20_000),  # the port is 20000 above
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_CPUS_PER_TASK": "1",
    }
    place.finished(place.start(LAUNCH / "slurm.sbatch", LARGE[1], **variables))
    assert (place.summary["plan"]["mesh"]["nodes"], place.summary["steps"]) == (2, 3)
    assert "--gpu-bind=none" in (place.path / "srun-options").read_text().split()
    place.settings += ["--set=train.steps=4"]
    place.finished(place.start(LAUNCH / "slurm.sbatch", LARGE[1], **variables))  # as after a requeue
    assert place.summary["steps"] == 4


TORCHRUN = """#!/usr/bin/env bash
# Trains for so many tenths of a second, and is told to save.
trap 'echo saved within "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT" s; exit 7' TERM
echo started
for ((tenths = 0; tenths < TENTHS; tenths++)); do sleep 0.1; done
if [[ -n ${COMPLETE:-} ]]; then mkdir -p "$OUT"; touch "$OUT/summary.json"; fi
exit "${STATUS:-0}"
"""


@pytest.mark.parametrize(
    ("variables", "signalled", "status", "says"),
    [
        ({"COMPLETE": "1"}, False, 0, "started\n"),
        ({"STATUS": "3"}, False, 3, "started\n"),
        ({}, False, 1, "is not complete; start the script again"),  # a signal to another node has stopped it
        ({"TENTHS": "600"}, True, 7, "saved within 110 s"),
    ],
)
def test_torchrun_ends_well_only_when_the_run_is_complete(
    place: Place, variables: dict[str, str], signalled: bool, status: int, says: str
) -> None:
    (place.path / "tools").mkdir()
    torchrun = place.path / "tools/torchrun"
    torchrun.write_text(TORCHRUN)
    torchrun.chmod(0o755)
    with place.start(LAUNCH / "torchrun.sh", Path("recipe.toml"), **{"TENTHS": "1", **variables}) as process:
        if signalled:
            assert process.stdout is not None
            assert process.stdout.readline() == "started\n"
            process.terminate()
        output, _ = process.communicate(timeout=60)
    assert process.returncode == status
    assert says in output


def test_launchers_say_how_they_are_used(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    for script in SCRIPTS:
        done = subprocess.run([bash, script], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode != 0
        assert "usage: " in done.stderr
    done = subprocess.run(
        [bash, LAUNCH / "torchrun.sh", "recipe.toml"],
        env={"PATH": os.environ["PATH"], "NNODES": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "name the node that the others meet on" in done.stderr
