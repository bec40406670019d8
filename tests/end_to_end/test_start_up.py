"""What a run does when it starts: the command reads recipe and plan once; only ranks and their server have torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.support.families.tiny import FAMILIES
from tests.support.small import thinwire, write_text

import thinwire as tw

pytestmark = pytest.mark.ranks

RECIPE = """
[model]
kind = "huggingface"
config = "config.json"
[data]
source = "text"
paths = ["text.txt"]
vocab = 300
validation_paths = ["text.txt"]
[train]
steps = 2
seq = 16
micro_batch = 1
micro_batches = 1
tensorboard = false
validation_samples = 2
[cluster]
device = "cpu"
timeout = "60s"
"""

# Python imports this module in every process of the run, and hears of every file that it opens.
SITE = """
import atexit, os, sys
_opened = os.open(os.path.join({log!r}, str(os.getpid())), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
def _note(event, arguments):
    if event == "open" and isinstance(arguments[0], str) and arguments[0].endswith((".toml", "config.json")):
        reads = not (arguments[2] & (os.O_WRONLY | os.O_RDWR))
        os.write(_opened, ((os.environ.get("RANK", "command") + " " + arguments[0] + "\\n") if reads else "").encode())
def _tell():
    if "train" in sys.orig_argv:
        with open({modules!r}, "w") as file:
            file.write("\\n".join(sys.modules))
atexit.register(_tell)
sys.addaudithook(_note)
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a run that is complete."""
    pytest.importorskip("transformers")
    directory = tmp_path_factory.mktemp("start")
    site, log = directory / "site", directory / "log"
    site.mkdir()
    log.mkdir()
    (site / "sitecustomize.py").write_text(SITE.format(log=str(log), modules=str(directory / "modules")))
    write_text(directory / "text.txt", lines=400)
    (directory / "recipe.toml").write_text(RECIPE)
    (directory / "config.json").write_text(json.dumps(FAMILIES["llama"] | {"vocab_size": 300}))
    tw.Plan.preset("zero1", nodes=1, local=2, compute_dtype="float32").save(directory / "plan.toml")
    words = ("train", "recipe.toml", "--plan", "plan.toml", "--out", "run")
    thinwire(*words, cwd=directory, PYTHONPATH=str(site), THINWIRE_CACHE=str(directory / "cache"))
    return directory


@pytest.fixture(scope="module")
def opened(directory: Path) -> Counter[tuple[str, str]]:
    """How often a process ("command" or a rank's number) has opened a file, by its path below the directory."""
    lines = [line for file in (directory / "log").iterdir() for line in file.read_text().splitlines()]
    pairs = [line.split(" ", 1) for line in lines]
    return Counter(
        (process, str(Path(path).relative_to(directory)))
        for process, path in ((process, os.path.join(directory, path)) for process, path in pairs)  # noqa: PTH118
        if Path(path).is_relative_to(directory)
    )


@pytest.mark.slow
def test_the_command_reads_recipe_and_plan_file_once(opened: Counter[tuple[str, str]]) -> None:
    assert opened["command", "recipe.toml"] == 1
    assert opened["command", "plan.toml"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_reads_the_model_once(opened: Counter[tuple[str, str]], rank: str) -> None:
    read = {path: count for (process, path), count in opened.items() if process == rank}
    assert read == {"config.json": 1}


def test_the_command_that_waits_for_its_ranks_has_not_imported_torch(directory: Path) -> None:
    modules = set((directory / "modules").read_text().splitlines())
    assert "thinwire.train.processes.launch" in modules
    assert not modules & {"torch", "transformers", "triton"}


IMPORTS = """
import os
import torch

asked = []
for module, name in ((torch.cuda, "is_available"), (torch.cuda, "device_count"), (torch.cuda, "init")):
    setattr(module, name, lambda *_, name=name: asked.append(name) or 0)
import thinwire.train.processes.imported
threads = len(os.listdir("/proc/self/task"))
print(asked, threads)
"""


@pytest.mark.slow
def test_what_ranks_are_forked_from_has_neither_threads_nor_asked_for_gpus() -> None:
    """Neither threads nor CUDA survive a fork."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", IMPORTS], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "[] 1\n"
