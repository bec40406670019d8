"""Input cannot run code: the source uses no pickle, no eval, and no code from model directories."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from tests.support.paths import ROOT

SOURCES = (ROOT / "src", ROOT / "bench" / "src")

MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "yaml", "joblib", "code"}
"""Modules that make code of data."""

BETWEEN_PROCESSES = {
    "thinwire/testing/ranks.py",
    "thinwire/train/processes/ranks.py",
    "thinwire_bench/systems/controller.py",
    "thinwire_bench/systems/protocol.py",
    "thinwire_bench/systems/rank.py",
    "thinwire_bench/systems/server.py",
}
"""Files whose processes are parents and children, and talk through pipes and sockets that only this user can reach."""

NAMES_OF_MODULES = {
    "thinwire/__init__.py",
    "thinwire/cli/terminal/lazy.py",
    "thinwire/codecs/reference/__init__.py",
    "thinwire/codecs/registry.py",
    "thinwire/codecs/triton/__init__.py",
    "thinwire_bench/codecs/peers.py",
    "thinwire_bench/peers/deepspeed_zero.py",
    "thinwire_bench/systems/rank.py",
    "thinwire_bench/systems/server.py",
}
"""Files that import modules by name; the names are constants of ours, or a benchmark's, never those of a recipe."""


def dotted(node: ast.expr) -> str:
    """The name that a call is made by, as far as it is one."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def imports(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (name.name for name in node.names)
    if isinstance(node, ast.ImportFrom) and node.module:
        yield node.module


def misuse(call: ast.Call, path: str) -> str | None:
    """Why a call is forbidden where it stands, if it is."""
    name = dotted(call.func)
    last = name.rpartition(".")[2]
    keywords = {word.arg: word.value for word in call.keywords}

    def is_constant(key: str, value: object) -> bool:
        argument = keywords.get(key)
        return isinstance(argument, ast.Constant) and argument.value is value

    if name in {"eval", "exec", "compile", "__import__", "os.system", "os.popen"}:
        return f"{name}()"
    if name in {"torch.save", "torch.jit.load", "torch.package.PackageImporter"}:
        return f"{name}() pickles"
    if name == "torch.load" and not is_constant("weights_only", True):
        return "torch.load() without weights_only=True"
    if last in {"load", "memmap"} and "allow_pickle" in keywords and not is_constant("allow_pickle", False):
        return f"{name}() with allow_pickle"
    if "shell" in keywords and not is_constant("shell", False):
        return f"{name}() with a shell"
    if "trust_remote_code" in keywords and not is_constant("trust_remote_code", False):
        return f"{name}() runs a model's own code"
    if last.endswith(("gather_object", "object_list")):
        return f"{name}() sends pickles"
    if last == "import_module" and path not in NAMES_OF_MODULES:
        return f"{name}() of a name"
    return None


def forbidden(source: str, path: str) -> list[str]:
    """Forbidden calls and imports of a file, with their lines."""
    problems = []
    for node in ast.walk(ast.parse(source)):
        for module in imports(node):
            if module.partition(".")[0] in MODULES:
                problems.append(f"{path}:{node.lineno}: imports {module}")  # type: ignore[attr-defined]
            if module == "multiprocessing.connection" and path not in BETWEEN_PROCESSES:
                problems.append(f"{path}:{node.lineno}: imports {module}")  # type: ignore[attr-defined]
        if isinstance(node, ast.Call) and (why := misuse(node, path)) is not None:
            problems.append(f"{path}:{node.lineno}: {why}")
    return problems


def test_nothing_that_is_read_can_run_code() -> None:
    files = {
        str(path.relative_to(source)): path.read_text() for source in SOURCES for path in sorted(source.rglob("*.py"))
    }
    assert len(files) > 100
    assert files.keys() >= BETWEEN_PROCESSES | NAMES_OF_MODULES
    assert [line for path, source in files.items() for line in forbidden(source, path)] == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import yaml",
        "from multiprocessing.connection import Client",
        "eval(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=flag)",
        "np.load(path, allow_pickle=True)",
        "subprocess.run(text, shell=True)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
        "dist.broadcast_object_list(objects)",
        "dist.all_gather_object(everyone, mine)",
        "importlib.import_module(recipe.name)",
    ],
)
def test_the_search_finds_what_it_looks_for(line: str) -> None:
    assert len(forbidden(line, "train/loop.py")) == 1


@pytest.mark.parametrize("line", ["torch.load(path, weights_only=True)", "re.compile(text)", "np.load(path)"])
def test_the_search_lets_others_pass(line: str) -> None:
    assert forbidden(line, "train/loop.py") == []


def test_every_threat_names_tests_that_exist_or_says_that_it_has_none() -> None:
    page = (ROOT / "docs/security.md").read_text()
    table = [line for line in page.partition("## Who may attack")[2].splitlines() if line.startswith("| ")]
    folders = (ROOT / "tests", ROOT / "bench" / "tests")
    written = "\n".join(path.read_text() for folder in folders for path in folder.rglob("test_*.py"))
    there = set(re.findall(r"^def (test_\w+)\(", written, re.MULTILINE))
    header, *lines = table
    assert header == "| attack | without keys | with keys | test |"
    assert len(lines) > 9
    tests = [line.rsplit("|", 2)[1].strip() for line in lines]
    for line, named in zip(lines, tests, strict=True):
        names = set(re.findall(r"`(test_\w+)`", named))
        assert names <= there, line
        assert names or named == "none", line
    assert tests.count("none") <= 2
