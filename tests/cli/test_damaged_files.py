"""Every file that a command reads, damaged by a generator: the command answers, or says one sentence."""

from __future__ import annotations

import copy
import json
import math
import random
import re
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.reports import write_run
from typer.testing import CliRunner

from thinwire.cli.main import app

GOLDEN = Path(__file__).parents[1] / "golden"
EXAMPLES = Path(__file__).parents[2] / "examples" / "convert"

MODEL = 'kind = "llama"\nlayers = 4\nhidden = 256\nheads = 4\nkv_heads = 2\nffn = 704\nvocab = 4096\nseq = 128\n'
EXPERTS = (
    "layers = 4\nhidden = 256\nheads = 4\nexperts = 4\nactive_experts = 2\nexpert_ffn = 128\nvocab = 4096\nseq = 128\n"
    "shared_ffn = 64\ndense_layers = 1\nlatent = { kv_rank = 32, rotary = 16, value_dim = 64 }\n"
)
CLUSTER = """
nodes = 3
gpus_per_node = 4
memory = "40GiB"
peak_flops = { bfloat16 = 312e12 }
[failures]
mtbf = "100h"
[links.inside]
bandwidth = "100GB/s"
latency = "5us"
[links.nic]
bandwidth = "25gbit"
latency = "10us"
[links.zone]
bandwidth = "1gbit"
[[groups]]
name = "fast"
accelerator = "a100-80g"
nodes = 1
price_per_gpu_hour = 2
[[groups]]
nodes = 2
memory = "32GiB"
peak_flops = { bfloat16 = 100e12 }
zone = "b"
"""
PLAN = """
mesh = { local = 8, nodes = 2 }
optimizer = { local = 8, nodes = 2 }
micro_batch = 32
wire = { gather = "int8:256" }
"""
TOKENIZER = '{"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}}'

PLANNING = "--cluster a100-80g:2x8 --tokens-per-step 64k"
CASES = {
    "model": ("model.toml", f"plan --model FILE {PLANNING}"),
    "experts": ("experts.toml", f"plan --model FILE {PLANNING} --json"),
    "config": ("qwen3-30b-a3b.json", "plan --model FILE --cluster a100-80g:2x8 --tokens-per-step 3932160"),
    "cluster": ("cluster.toml", "plan --model DIR/model.toml --cluster FILE --tokens-per-step 66048 --explain"),
    "profile": ("profile-1gbit.json", "plan --model DIR/model.toml --profile FILE --tokens-per-step 8k"),
    "hosts": ("hosts", "plan --model DIR/model.toml --cluster a100-80g:4x8 --tokens-per-step 64k --hosts FILE"),
    "plan": ("plan.toml", "sim --model DIR/model.toml --cluster a100-80g:2x8 --plan FILE"),
    "deepspeed": ("ds_config.json", "convert FILE --nodes 2 --nproc 4 --model llama-7b --steps 9 --recipe DIR/r.toml"),
    "accelerate": ("accelerate.yaml", "convert FILE --nodes 1 --nproc 4"),
    "metrics": ("run/metrics.jsonl", "plan --compare DIR/run --profile DIR/profile-1gbit.json"),
    "tokenizer": ("run/tokenizer.json", "plan --compare DIR/run --profile DIR/profile-1gbit.json"),
    "starts": ("run/starts.jsonl", "plan --compare DIR/run --profile DIR/profile-1gbit.json"),
    "recipe": ("run/recipe.toml", "plan --compare DIR/run --profile DIR/profile-1gbit.json"),
    "reported": ("run/metrics.jsonl", "report DIR/run --json"),
    "begun": ("run/starts.jsonl", "report DIR/run --json"),
    "ended": ("run/summary.json", "report DIR/run --json"),
}

VALUES = (
    -1, 0, 0.5, 3, 10**9, 2**63, 10**30, 10**400, 1e308, -1e308, 1e-320, math.nan, math.inf, True, None, "", "x", "25",
    "-1GiB", "1e999gbit", "\0", "é" * 300, [], {}, [[[]]], {"a": 1},
)  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("files")
    for name, text in (
        ("model.toml", MODEL),
        ("experts.toml", EXPERTS),
        ("cluster.toml", CLUSTER),
        ("plan.toml", PLAN),
        ("hosts", "host-0 0\nhost-1 0\nhost-2 1\nhost-3 1\n"),
    ):
        (directory / name).write_text(text)
    for path in (*EXAMPLES.iterdir(), GOLDEN / "profile-1gbit.json", GOLDEN / "configs" / "qwen3-30b-a3b.json"):
        shutil.copy(path, directory)
    write_run(directory / "run")
    (directory / "run" / "tokenizer.json").write_text(TOKENIZER)
    return directory


def places(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield (*at, key)
        yield from places(value, (*at, key))


def as_toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))} = {as_toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(as_toml, value))}]"
    if isinstance(value, float):
        return repr(value)
    return '"none"' if value is None else json.dumps(value)


def changed(tree: Any, draw: random.Random) -> Any:
    """The tree with a value replaced, a key renamed or missing."""
    path = draw.choice(list(places(tree)))
    at = tree
    for key in path[:-1]:
        at = at[key]
    how = draw.random()
    if how < 0.7 or isinstance(at, list):
        at[path[-1]] = copy.deepcopy(draw.choice(VALUES))
    else:
        value = at.pop(path[-1])
        if how > 0.85:
            at[f"{path[-1]}s"] = value
    return tree


def restated(data: bytes, suffix: str, draw: random.Random) -> bytes:
    """The file written anew, with something changed in what it says."""
    if suffix == ".json":
        return json.dumps(changed(json.loads(data), draw)).encode()
    if suffix == ".jsonl":
        lines = data.decode().splitlines()
        number = draw.randrange(len(lines))
        lines[number] = json.dumps(changed(json.loads(lines[number]), draw))
        return "\n".join(lines).encode()
    tree = changed(tomllib.loads(data.decode()), draw)
    return "\n".join(f"{json.dumps(key)} = {as_toml(value)}" for key, value in tree.items()).encode()


def broken(data: bytes, draw: random.Random) -> bytes:
    """The file with bytes, lines or digits that are missing or others."""
    start, lines = draw.randrange(len(data)), data.split(b"\n")
    line = start % len(lines)
    number = draw.choice(list(re.finditer(rb"\d+|$", data)))
    return draw.choice(
        [
            b"",
            b"\xef\xbb\xbf" + data,
            data[:start],
            data.replace(b"\n", b"\r\n"),
            data[:start] + bytes([draw.randrange(256)]) + data[start + 1 :],
            b"\n".join(lines[:line] + lines[line + 1 :]),
            data[: number.start()] + draw.choice([b"1" * 400, b"NaN", b"-1", b"null"]) + data[number.end() :],
        ]
    )


def damaged(data: bytes, suffix: str, draw: random.Random) -> bytes:
    is_known = suffix in (".json", ".jsonl", ".toml")
    return restated(data, suffix, draw) if is_known and draw.random() < 0.7 else broken(data, draw)


def check_answer(name: str, data: bytes, files: Path, directory: Path) -> None:
    """The command of a case answers, or refuses, where its file holds these bytes."""
    file, command = CASES[name]
    shutil.copytree(files, directory)
    (directory / file).write_bytes(data)
    words = command.replace("FILE", str(directory / file)).replace("DIR", str(directory)).split()
    result = CliRunner().invoke(app, words)
    assert result.exception is None or isinstance(result.exception, SystemExit), (directory.name, result.exception)
    assert result.exit_code in (0, 1, 2), directory.name
    assert result.output.strip(), directory.name
    shutil.rmtree(directory)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 60), marks=pytest.mark.slow)], ids=["few", "many"])
def test_a_command_survives_damaged_files(name: str, seeds: range, files: Path, tmp_path: Path) -> None:
    file = files / CASES[name][0]
    for seed in seeds:
        damage = damaged(file.read_bytes(), file.suffix, random.Random(f"{name} {seed}"))
        check_answer(name, damage, files, tmp_path / str(seed))


@pytest.mark.parametrize(
    "name", [name for name, (file, _) in CASES.items() if Path(file).suffix in {".json", ".jsonl"}]
)
@pytest.mark.parametrize("text", ["[" * 10_000, '{"seconds": ' + "9" * 5_000 + "}"], ids=["brackets", "digits"])
def test_a_command_survives_json_that_python_does_not_read(name: str, text: str, files: Path, tmp_path: Path) -> None:
    check_answer(name, text.encode(), files, tmp_path / "files")
