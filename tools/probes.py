"""Counts what only running code tells: what a step, a save and `thinwire plan` visit, and how many keys there are.

    python tools/probes.py
    python tools/probes.py --source ../old/src --functions step

Visits are files, functions and calls of thinwire on one thread. A step is one of the preset ``zeropp`` on two ranks of
gloo, after three others: forward, backward, clipping, the optimizer's step and zero_grad. Counts are exact and do not
depend on the machine. What lanes do on threads of their own is not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import multiprocessing
import os
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parents[1]

KINDS = ("step", "save", "plan")
WARM_UP = 3
WRITTEN = ("Plan", "ClusterSpec", "ModelSpec")
"""What people write beside recipes."""

PLAN = ["--model", "llama-7b", "--cluster", "a100-40g:2x8", "--set", "cluster.links.nic.bandwidth=1gbit"]
PLAN += ["--tokens-per-step", "512k"]


@dataclass
class Visit:
    """What some code has called.

    Attributes:
        calls: Number of calls of each function of thinwire.
    """

    calls: Counter[CodeType] = field(default_factory=Counter)

    def functions(self, source: Path) -> dict[str, int]:
        """Calls by function; comprehensions belong to the function around them."""
        found: Counter[str] = Counter()
        for code, count in self.calls.items():
            if not code.co_name.startswith("<") or code.co_name == "<lambda>":
                found[f"{Path(code.co_filename).relative_to(source)}:{code.co_firstlineno}:{code.co_name}"] += count
        return dict(found)


@contextlib.contextmanager
def visiting(source: Path) -> Iterator[Visit]:
    """Count the calls of functions below a directory, on this thread."""
    visit, prefix = Visit(), f"{source}{os.sep}thinwire{os.sep}"

    def note(frame: FrameType, event: str, argument: Any) -> None:
        del argument
        if event == "call" and frame.f_code.co_filename.startswith(prefix):
            visit.calls[frame.f_code] += 1

    sys.setprofile(note)
    try:
        yield visit
    finally:
        sys.setprofile(None)


def use(source: Path) -> None:
    """Import thinwire from a directory, but its compiled module from where it is installed.

    An editable installation would find its own checkout.
    """
    sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
    sys.path.insert(0, str(source))
    native = "thinwire.codecs.cpp._native"
    for file in Path(sysconfig.get_path("platlib")).glob(f"{native.replace('.', '/')}*.so"):
        spec = importlib.util.spec_from_file_location(native, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[native] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[native])
        importlib.import_module("thinwire.codecs.cpp")  # the module itself is not looked for, so neither is its package


def trained(source: Path, rank: int, port: int, results: Any) -> None:
    """Train as one of two ranks; rank 0 reports what a step and a save have visited."""
    use(source)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    import torch
    from torch import nn

    import thinwire as tw
    from thinwire.collectives import group

    group.init("gloo")
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)) for _ in range(4)]
    model = nn.Sequential(nn.Linear(64, 64), nn.Sequential(*blocks), nn.Linear(64, 8))
    model = tw.shard(model, tw.Plan.preset("zeropp", nodes=2, local=1))
    optimizer = tw.optimizer(model, torch.optim.AdamW, lr=1e-3)

    def step() -> None:
        model(torch.randn(4, 64)).square().mean().backward()
        tw.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_UP):
        step()
    with visiting(source) as of_step:
        step()
    with tempfile.TemporaryDirectory() as directory:
        path = group.control().all_gather_bytes(f"{directory}/checkpoint".encode())[0].decode()
        tw.save(model, optimizer, path)
        with visiting(source) as of_save:
            tw.save(model, optimizer, path)
        group.control().barrier()
    if rank == 0:
        results.put({"step": of_step.functions(source), "save": of_save.functions(source)})
    group.shutdown()


def planned(source: Path, results: Any) -> None:
    """Report what ``thinwire plan`` visits."""
    use(source)
    from thinwire.cli.main import app

    with (
        visiting(source) as of_plan,
        Path(os.devnull).open("w", encoding="utf-8") as nowhere,
        contextlib.redirect_stdout(nowhere),
    ):
        app(["plan", *PLAN], standalone_mode=False)
    results.put({"plan": of_plan.functions(source)})


def surfaced(source: Path, results: Any) -> None:
    """Report the keys of files, the commands, and their options and arguments.

    A key that several tables have from one declaration counts once; one that only stands for others does not count.
    People write recipes, plans, models and clusters; commands write profiles, kernels and expectations.
    """
    use(source)
    import importlib
    import pkgutil

    import typer
    from typer import Context

    import thinwire.spec
    from thinwire.cli.main import app
    from thinwire.spec.base import Spec, nested
    from thinwire.spec.recipe import Recipe

    for module in pkgutil.walk_packages(thinwire.spec.__path__, "thinwire.spec."):
        importlib.import_module(module.name)
    specs, waiting = set[type[Spec]](), [Spec]
    while waiting:
        specs.add(spec := waiting.pop())
        waiting += spec.__subclasses__()
    keys = {
        spec: len(spec.model_fields.keys() - _inherited(spec) - {*getattr(spec, "shorthands", ())}) for spec in specs
    }
    people, roots = set[type[Spec]](), [Recipe, *(getattr(thinwire.spec, name) for name in WRITTEN)]
    while roots:
        people |= {spec := roots.pop(), *(base for base in spec.__mro__ if base in specs)}
        inside = {nested(field.annotation) for field in spec.model_fields.values()}
        roots += [spec for spec in inside if spec is not None and spec not in people]
    commands = parameters = 0
    root = typer.main.get_command(app)
    groups = [(root, Context(root))]
    while groups:
        command, context = groups.pop()
        if hasattr(command, "list_commands"):
            children = ((name, command.get_command(context, name)) for name in command.list_commands(context))
            groups += [(child, Context(child, parent=context, info_name=name)) for name, child in children if child]
        else:
            commands += 1
            parameters += len(command.params)
    written = {"keys": sum(keys.values()), "keys that people write": sum(keys[spec] for spec in people)}
    results.put(written | {"commands": commands, "parameters": parameters})


def _inherited(spec: Any) -> set[str]:
    return {key for base in spec.__mro__[1:] for key in getattr(base, "model_fields", ())}


def surface(source: Path) -> dict[str, int]:
    """Numbers of keys, commands and parameters."""
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    found: dict[str, int] = _run([context.Process(target=surfaced, args=(source.resolve(), results))], results)
    return found


def _run(processes: list[Any], results: Any) -> dict[str, Any]:
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        if process.exitcode:
            raise SystemExit(f"a process that was to be measured has failed with {process.exitcode}")
    found: dict[str, Any] = {}
    while not results.empty():
        found |= results.get()
    return found


def visits(source: Path) -> dict[str, dict[str, int]]:
    """Calls by function, by what was done."""
    source = source.resolve()
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    port = 20000 + os.getpid() % 10000
    tasks: list[tuple[Callable[..., None], tuple[Any, ...]]] = [(planned, (source, results))]
    tasks += [(trained, (source, rank, port, results)) for rank in range(2)]
    return _run([context.Process(target=task, args=arguments) for task, arguments in tasks], results)


def summary(of: dict[str, int]) -> dict[str, int]:
    """Numbers of files, functions and calls."""
    files = {function.partition(":")[0] for function in of}
    return {"files": len(files), "functions": len(of), "calls": sum(of.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=ROOT / "src", help="the directory that holds the package")
    parser.add_argument("--functions", choices=KINDS, help="print each function of this, with its calls")
    arguments = parser.parse_args()
    found = visits(arguments.source)
    if arguments.functions:
        for function, calls in sorted(found[arguments.functions].items()):
            print(f"{calls:6,} {function}")
    else:
        print(json.dumps(surface(arguments.source) | {kind: summary(found[kind]) for kind in KINDS}, indent=1))


if __name__ == "__main__":
    main()
