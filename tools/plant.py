"""Takes each wait out of the tree, one at a time, and says which of them no test misses.

    python tools/plant.py
    python tools/plant.py --only sharding/unit.py --again
    python tools/plant.py --list

A wait that no test misses is either not needed, or a race that only a card shows. Statements that call a method of
WAITS lose the call, contexts named in VISITS do nothing, and EXTRA has faults of other kinds: memory that is dropped
too early. For each, tests run until the first fails: those of ``tools/planting.py`` in ranks that stay alive,
others on a copy of the package. The checkout is not touched. ``docs/results/planting.json`` keeps what noticed each
fault, with the content of the file: what has changed since is planted again, beginning with the test that noticed it
before. All of it takes long, and wants the machine for itself. What REASONS explains is planted with
--again only. The exit status is 1 if something else was missed.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # for tools.planting, also on the ranks
PACKAGE = ROOT / "src" / "thinwire"
RECORDS = ROOT / "docs" / "results" / "planting.json"

ROOMS: Final = ("sharding", "intercept", "collectives", "checkpoint/background.py")
WAITS: Final = {
    "wait", "wait_stream", "wait_event", "synchronize", "record", "join", "join_unit", "join_spread",
    "_join_departures", "drain",
}  # fmt: skip
VISITS: Final = {"visit"}
_IDLE: Final = '__import__("contextlib").nullcontext(False)'

EXTRA: Final = (
    ("sharding/lanes/streams.py", "_StreamTicket.__init__", "_after = body, tuple(", "_after = nothing, tuple("),
    ("sharding/lanes/streams.py", "_StreamTicket.__init__", "= body, tuple(after)", "= body, ()"),
    ("intercept/queued.py", "QueuedWork.wait", "        if current == self._caller:\n", "        if True:\n"),
    ("intercept/queued.py", "StreamQueue.perform", "            self._flying.append((event, used))\n", ""),
)
"""Further faults: file, function, text that occurs once, what takes its place."""

CONNECTIONS: Final = (
    "collectives/links/test_gloo.py", "collectives/links/test_nccl.py", "collectives/links/test_rendezvous.py",
    "end_to_end/test_start_up.py", "collectives/test_collectives.py", "collectives/job/test_rollcall.py",
    "end_to_end/test_faults.py",
)  # fmt: skip
INTERCEPT: Final = (
    "intercept/test_intercept.py", "intercept/test_exchange.py", "intercept/test_stock.py", "intercept/test_streams.py",
)  # fmt: skip

TESTS: Final = (
    ("sharding/islands/lighthouse.py", ("sharding/islands/test_faults.py",)),
    ("sharding/lanes/lanes.py: _ThreadTicket", ("sharding/lanes/test_lanes.py", "testing/test_delays.py")),
    ("sharding/", None),
    ("intercept/queued.py", None),
    ("intercept/works.py", ("intercept/test_works.py", "intercept/test_streams.py")),
    ("intercept/", INTERCEPT),
    ("collectives/gateway/", ("collectives/gateway/test_gateway.py",)),
    ("collectives/job/rollcall.py", ("collectives/job/test_rollcall.py", "end_to_end/test_faults.py")),
    ("collectives/links/nccl.py", None),
    ("collectives/links/streams.py", None),
    ("collectives/", CONNECTIONS),
    (
        "checkpoint/",
        ("sharding/checkpointing/test_saving.py", "checkpoint/test_store.py", "sharding/lanes/test_streams.py"),
    ),
)
"""Tests that should notice, by the beginning of the fault's name; the first that fits counts. None stands for those of
``tools/planting.py``."""

_ABOUT_WAITS: Final = (
    "not planted and not launch and not times and not timed and not missing_waits and not every_way_of_sharding"
)
"""Tests that count launches, take times or plant faults themselves have nothing to say of others, and neither has one
that takes longer than the limit without a fault."""

_TEST_SECONDS: Final = 100
_SECONDS: Final = 600

_READ_WAITS: Final = "whoever reads a parameter waits (Passes.read); waiting here is earlier, not safer"
_MEASURED: Final = "a measurement counts what is done; nothing reads memory after it"

REASONS: Final[dict[str, str]] = {
    "sharding/checkpointing/saving.py: wait_for_writer: writer.join() -> writer": (
        "only the words of an error depend on it: whether a checkpoint has been written yet"
    ),
    "sharding/grads/reducer.py: Reducer.abort: self.join() -> self": (
        "whoever writes gradients next waits (Reducer.begin), and reductions keep the memory that they read"
    ),
    "sharding/grads/reducer.py: Reducer.rescale_lost: self.join() -> self": (
        "the norm of all gradients has been read before, and a load brings tensors of its own"
    ),
    "sharding/grads/reducer.py: Reducer.forget_lost: self.join() -> self": (
        "a reduction takes its residuals when it is submitted: it keeps them, and puts nothing back"
    ),
    "sharding/grads/reducer.py: Reducer._send_home: self._join_departures(LEAVING) -> self": (
        "it bounds the memory of the device; whoever needs the gradients waits"
    ),
    "sharding/grads/reducer.py: Reducer._perform: reduction.wait() -> reduction": (
        "it limits what is under way at once; whoever reads gradients waits for them"
    ),
    "sharding/hooks/module_hooks.py: "
    '_InputGradientOf.end: self._home.visit() -> __import__("contextlib").nullcontext(False)': (
        "nothing is freed before backward reaches the unit's input, in a hook that visits"
    ),
    "sharding/islands/lighthouse.py: Lighthouse._asking_anew: repeating.join() -> repeating": (
        "a thread ends; no memory is shared"
    ),
    "sharding/lanes/lanes.py: Lanes.drain: worker.drain() -> worker": _MEASURED,
    "sharding/runtime/runtime.py: Runtime.drain: self.lanes.drain() -> self.lanes": _MEASURED,
    "sharding/optimizer/share_update.py: ShareUpdate._as_needed: self.reducer.join() -> self.reducer": (
        "the norm of all gradients has been measured, and measuring waits for them"
    ),
    "sharding/runtime/runtime.py: Runtime.reach_pause: self.join() -> self": (
        "what units grow is memory of its own, and whoever reads parameters or gradients under way waits for them"
    ),
    "sharding/runtime/runtime.py: Runtime.zero_grad: self.reducer.join() -> self.reducer": (
        "it marks gradients as empty; whoever writes them next waits (Reducer.begin)"
    ),
    "sharding/runtime/runtime.py: Runtime.finish_step: self.spreads.join() -> self.spreads": (
        "where an exchange writes masters, the update has not begun to spread"
    ),
    "sharding/runtime/share_values.py: Masters.flush: spreads.join() -> spreads": (
        "a write has waited (Masters.before_write), and nothing is spread between it and the flush"
    ),
    "sharding/step/param_broadcast.py: "
    "Spreads.start_batch: self.units[index].join_spread() -> self.units[index]": _READ_WAITS,
    "sharding/params/param_group.py: Unit.need: self.join_spread() -> self": (
        "gathers wait for spreads, and whoever computes with a parameter that is not ready waits for it"
    ),
    "sharding/step/param_broadcast.py: "
    "Spreads.send_home: self._leaving.popleft().join_spread() -> self._leaving.popleft()": (
        "it bounds the memory of the device; whoever needs the unit waits"
    ),
    "sharding/step/passes.py: Passes.note_plain: unit.join_spread() -> unit": _READ_WAITS,
    "sharding/step/passes.py: Passes.pre_forward: unit.join_spread() -> unit": _READ_WAITS,
    "sharding/step/passes.py: Passes._evaluate: unit.join_spread() -> unit": _READ_WAITS,
    "sharding/step/step_check.py: StepCheck._norms_of_units: self._reducer.join() -> self._reducer": (
        "the loop waits for each reduction; waiting for all of them at once takes fewer calls"
    ),
    "collectives/links/streams.py: CudaStreams.synchronize: torch.cuda.synchronize(self._device) -> torch.cuda": (
        "only a card runs it; the GPU check takes its times by it"
    ),
    "intercept/queued.py: StreamQueue.perform: work.wait() -> work": (
        "torch waits for what it has not asked to run asynchronously; here, the time is counted"
    ),
}
"""Why a plant that no test misses is no fault, by its name."""


@dataclass(frozen=True)
class Plant:
    """One fault.

    Attributes:
        file: The file, relative to the package.
        line: Its line in the checkout.
        where: Qualified name of the outermost function that holds it.
        what: The statement, and what becomes of it.
        text: The whole file with the fault.
        original: The file as it is.
    """

    file: str
    line: int
    where: str
    what: str
    text: str
    original: str

    @property
    def name(self) -> str:
        """Stable while the file changes elsewhere."""
        return f"{self.file}: {self.where}: {self.what}"


def plants() -> Iterator[Plant]:
    """Every fault of the tree, file by file."""
    for room in ROOMS:
        path = PACKAGE / room
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            yield from _of_file(file.relative_to(PACKAGE).as_posix(), file.read_text(encoding="utf-8"))


def _of_file(file: str, source: str) -> Iterator[Plant]:
    for function, name in _functions(ast.parse(source), ""):
        for node in ast.walk(function):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _method(node.value) in WAITS:
                assert isinstance(node.value.func, ast.Attribute)
                yield _replaced(file, source, name, node.value, ast.unparse(node.value.func.value))
            elif isinstance(node, ast.withitem) and _method(node.context_expr) in VISITS:
                yield _replaced(file, source, name, node.context_expr, _IDLE)
    for path, name, old, new in EXTRA:
        if path == file:
            assert source.count(old) == 1, f"{file} no longer has what EXTRA names:\n{old}"
            line = source[: source.index(old)].count("\n") + 1
            shown = f"{' '.join(old.split())} -> {' '.join(new.split()) or 'nothing'}"
            yield Plant(file, line, name, shown, source.replace(old, new), source)


def _functions(owner: ast.AST, prefix: str) -> Iterator[tuple[ast.AST, str]]:
    """Functions and methods with their qualified names; functions inside them belong to them."""
    for node in ast.iter_child_nodes(owner):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node, prefix + node.name
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")


def _method(node: ast.AST) -> str | None:
    return node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None


def _replaced(file: str, source: str, function: str, node: ast.expr, new: str) -> Plant:
    lines = source.splitlines(keepends=True)
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    starts = [sum(map(len, lines[: line - 1])) for line in (node.lineno, node.end_lineno)]
    begin, end = starts[0] + node.col_offset, starts[1] + node.end_col_offset
    text = source[:begin] + new + source[end:]
    return Plant(file, node.lineno, function, f"{ast.unparse(node)} -> {new}", text, source)


def check(plant: Plant, before: str = "") -> str:
    """The test that notices a fault; empty if none does.

    Args:
        plant: The fault.
        before: The result of an earlier run, whose test comes first.
    """
    tests = next(tests for start, tests in TESTS if plant.name.startswith(start))
    if tests is not None:
        first = before.removeprefix("tests/").split(" ")[0]
        return check_copy(plant, (first, *tests) if first.startswith(tests) else tests)
    from tools.planting import first_that_fails

    return first_that_fails(plant.file, plant.where, plant.text, plant.original, before)


_OVERLAY: Final = """import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
sys.path.insert(0, {path!r})
"""


def check_copy(plant: Plant, tests: Sequence[str]) -> str:
    """Plant a fault into a copy of the package, and run tests until one fails; which one, or nothing."""
    from thinwire.codecs.cpp import _native

    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory)
        shutil.copytree(PACKAGE, copy / "thinwire", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        (copy / "thinwire" / "codecs" / "cpp" / Path(_native.__file__).name).symlink_to(_native.__file__)
        (copy / "thinwire" / plant.file).write_text(plant.text, encoding="utf-8")
        (copy / "sitecustomize.py").write_text(_OVERLAY.format(path=directory), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not gpu"]
        command += ["-k", _ABOUT_WAITS, "--timeout", str(_TEST_SECONDS), *(f"tests/{test}" for test in tests)]
        environment = {**os.environ, "PYTHONPATH": directory, "PYTHONDONTWRITEBYTECODE": "1"}
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise SystemExit(f"{plant.name}: its tests take longer than {_SECONDS} s: name fewer in TESTS") from None
    if process.returncode == 0:
        return ""
    found = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return found[0] if found else f"status {process.returncode}: {output.strip().splitlines()[-1][:100]}"


def main() -> int:
    """Plant what has no result yet, and print what became of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="FILE[:LINE]", help="for example sharding/unit.py:136")
    parser.add_argument("--again", action="store_true", help="also what has a result or a reason")
    parser.add_argument("--list", action="store_true", help="name the faults, and plant none")
    options = parser.parse_args()
    file, _, line = options.only.partition(":")
    faults = list(plants())
    chosen = [each for each in faults if each.file.startswith(file) and line in ("", str(each.line))]
    if options.list:
        for each in chosen:
            print(f"{each.file}:{each.line}: {each.what}")
        return 0
    records = json.loads(RECORDS.read_text(encoding="utf-8")) if RECORDS.exists() else {}
    records = {each.name: records[each.name] for each in faults if each.name in records}
    missed = 0
    table = Table("place", "fault", "noticed by", box=None)
    for each in chosen:
        content = hashlib.sha256(each.text.encode()).hexdigest()[:16]
        before = records.get(each.name, {"content": "", "noticed": ""})
        reason = REASONS.get(each.name)
        is_known = before["content"] == content and before["noticed"]
        if options.again or not (is_known or reason):
            began = time.monotonic()
            before = records[each.name] = {"content": content, "noticed": check(each, before["noticed"])}
            seconds = time.monotonic() - began
            print(f"{each.file}:{each.line}: {before['noticed'] or 'MISSED'} ({seconds:.0f} s)", flush=True)
            RECORDS.write_text(json.dumps(records, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        found = before["noticed"]
        missed += not found and reason is None
        noticed = found or (f"no fault: {reason}" if reason else "MISSED")
        table.add_row(f"{each.file}:{each.line}", each.what, noticed)
    console = Console(width=200)
    console.print(table)
    console.print(f"{len(chosen)} faults, {missed} missed")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
