"""Every command of the documentation is parsed; short ones run here, long ones run in `make test-all`."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import typer
from tests.support.cluster import missing
from tests.support.paths import ROOT
from tests.support.small import environment
from typer.testing import CliRunner

from thinwire.cli.main import app

PAGES = ["README.md", "CONTRIBUTING.md"]
PAGES += sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md") if "generated" not in page.parts)

ELSEWHERE = {
    r"\$ sudo apt-get ": "changes the system",
    r"\$ make ": "works on the checkout; that the target exists is tested",
    r"\$ (python -m )?pip ": "changes the environment; tests/tools/test_packaging.py does it in one of its own",
    r"\$ (sbatch|kubectl|sky) ": "needs SLURM, Kubernetes or a cloud",
    r" recipes/(pretrain|launch)/": "needs GPUs and text; tests/documentation/test_recipes.py starts small ones",
    r"\$ source ": "is for the reader's shell",
    r"\$ \S*python -m pytest": "is what runs this",
    r"\$ srun ": "needs SLURM",
    r"\$ (\w+=1 )?torchrun --nnodes": "needs several machines",
    r" (python|torchrun) (--nproc-per-node 2 )?train\.py": "the reader's script, or the README's, which has a test",
    r"my-plan\.toml|runs/7b|~/models|/my/text": "has files of the reader's",
    r"tutorial\.md: .* --profile profile\.json": "has a profile of the reader's cluster",
    r"--device cuda|benchmarks\.gpu run --results docs/": "needs a GPU",
    r"build/lease/|gpu-records": "runs on a machine that is lent, with what `make gpu-lease` packs",
    r"deepspeed\d": "needs `make bench-peers`",
    r"examples/torchtitan": "needs torchtitan; tests/integrations/test_torchtitan.py runs it",
    r"build/frameworks/": "needs an environment that `make test-frameworks` makes",
    r"serve-weights|10\.0\.0\.1:29520": "runs until it is stopped; tests/cli/test_weights.py runs it",
    r"launchers/ray_train": "needs Ray; `make check-launchers` runs it",
}
"""Commands that are parsed and not run: what they match, as ``page: $ command``, and why."""

SHORT = {
    r"trace_steps=10:13": "--set train.steps=4 --set train.validation_samples=8 --set train.trace_steps=2:3",
    r"\$ \S*thinwire train .*--resume": "--set train.steps=6 --set train.validation_samples=8",
    r"thinwire(\.cli\.main)? train ": "--set train.steps=4 --set train.validation_samples=8 --set checkpoint.every=2",
    r"bench step": "--rounds 1 --steps 1 --bandwidth none --clip none",
    r"thinwire topology ": "--device cpu",
    r"bench planner (?!--again)": "--rounds 1 --budget 5s --models llama-1m --bandwidth none --json brief.json",
    r"benchmarks/memory_cap": "--steps 1 --hidden 128",
    r"benchmarks/publish_weights": "--warm-up 1 --rounds 1 --steps 2 --pauses 3 --batch 2",
    r"examples/grpo\.py(?! --picture)": "--steps 2",
    r"benchmarks/hooks": "--depth 4 --rounds 2",
    r"benchmarks/intercept_overhead": "--rounds 2 --pairs 4",
    r"benchmarks/fit_engines": "--rounds 1",
    r"benchmarks\.gpu run": "--part environment",
    r"bench codecs (?!--read)": "--sizes 1MiB --rounds 2 --peers none",
    r"bench delta": "--values 100000 --steps 2 --rounds 1",
    r"thinwire profile ": "--budget 10s",
}
"""What makes a command brief: options that take the place of those before them. The first that matches counts."""

BEFORE = {
    "docs/planner.md": "thinwire train recipes/quickstart.toml --out runs/quickstart",
    "docs/parallel.md": "thinwire train recipes/quickstart.toml --out runs/quickstart",
    "docs/quickstart.md": "thinwire train recipes/quickstart.toml --out runs/quickstart",
}
"""Commands to run before those of a page."""

REFUSED = r"llama-3-405b --cluster a800-80g:4x8|llama-30b --cluster a100-80g:1x8(?!.*--offload)"
"""What a page shows as refused."""

QUICK = re.compile(
    r"\$ \S*thinwire (doctor|convert |memory |sim (?!.*(\.toml|jitter))|.*--help)|\$ python examples/what_if\.py"
)
"""Commands of a second or two, which need nothing from the ones before them."""


class Command(NamedTuple):
    """A line of a page that begins with ``$``."""

    page: str
    line: str

    def __str__(self) -> str:
        return f"{self.page}: {self.line}"

    @property
    def why_not(self) -> str | None:
        """Why it is not run here, if it is not."""
        return next((why for pattern, why in ELSEWHERE.items() if re.search(pattern, str(self))), None)

    @property
    def is_quick(self) -> bool:
        return self.why_not is None and QUICK.match(self.line) is not None

    @property
    def needs_lab(self) -> bool:
        return re.search(r"thinwire (lab|bench (planner|step)) |memory_cap", self.line) is not None

    @property
    def words(self) -> list[str]:
        return shlex.split(self.line.removeprefix("$ "), comments=True)


def commands(page: str) -> list[Command]:
    blocks = re.findall(r"^```console\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    lines = re.sub(r"\\\n\s*", "", "".join(blocks)).splitlines()
    return [Command(page, line) for line in lines if line.startswith("$ ")]


COMMANDS = [command for page in PAGES for command in commands(page)]


def calls(words: list[str]) -> list[list[str]]:
    """The arguments of every thinwire in a command: the lab, for example, starts another one."""
    names = typer.main.get_command(app).commands  # a plan may be called thinwire, too
    starts = [i for i, word in enumerate(words[:-1]) if re.fullmatch(r"(.*/)?thinwire|thinwire\.cli\.main", word)]
    return [words[start + 1 :] for start in starts if not start or words[start + 1] in names]


def check_call(words: list[str]) -> None:
    command = typer.main.get_command(app)
    context = command.make_context("thinwire", words, resilient_parsing=False)
    while isinstance(command, typer.core.TyperGroup):
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(name, rest, parent=context)


@pytest.mark.parametrize("command", [c for c in COMMANDS if calls(c.words) and "--help" not in c.line], ids=str)
def test_the_command_line_takes_it(command: Command) -> None:
    for words in calls(command.words):
        check_call(words)


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_files_and_targets_of_a_command_exist(command: Command) -> None:
    for word in command.words:
        if word.startswith(("recipes/", "examples/", "benchmarks/", "tests/")):
            assert (ROOT / word).exists(), word
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in re.findall(r"(?:\$|&&) make ([a-z-]+)", command.line):
        assert target in targets, target


def test_every_exception_is_needed() -> None:
    for pattern in [*ELSEWHERE, *SHORT]:
        assert any(re.search(pattern, str(command)) for command in COMMANDS), pattern


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that looks like the checkout, where commands may write."""
    for name in ("README.md", "recipes", "examples", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("generated"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.is_quick], ids=str)
def test_quick_ones_run(command: Command, workshop: Path) -> None:
    words = command.words
    if words[0] == "python":
        subprocess.run([sys.executable, *words[1:]], check=True, timeout=120, capture_output=True)
    else:
        outcome = CliRunner().invoke(app, words[1:])
        assert outcome.exit_code == 0, outcome.output


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("page", [page for page in PAGES if any(c.why_not is None for c in commands(page))])
def test_the_commands_of_a_page_run_one_after_the_other(page: str, workshop: Path) -> None:
    before = [Command(page, f"$ {BEFORE[page]}")] if page in BEFORE else []
    skipped = []
    for command in [*before, *commands(page)]:
        if command.why_not is not None or command.is_quick:
            continue
        if command.needs_lab and missing() is not None:
            skipped.append(command.line)
        else:
            run(command)
    if skipped:
        pytest.skip(f"{missing()}; left out: {'; '.join(skipped)}")


def run(command: Command) -> None:
    """Run a line as a shell does, made brief."""
    line = command.line.replace(".venv/bin/", "").partition(" #")[0]
    options = next((options for pattern, options in SHORT.items() if re.search(pattern, line)), "")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", f"{line.removeprefix('$ ')} {options}"],
        env=environment(PATH=path),
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == bool(re.search(REFUSED, line)), f"{line}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
