"""Fixtures and hooks of all tests."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any

import pytest
from tests.support.paths import ROOT

# torch asks the name server for the name of 127.0.0.1 each time a rank connects to its job's store. Where a question is
# lost on the way now and then, the five seconds until the next would be a good part of the suite's time.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")

# Each of the many processes that tests start would compile thinwire anew, and each worker of pytest all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Know ``timeout`` of pyproject.toml where pytest-timeout is not installed, as on a machine lent for its GPU."""
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "see pytest-timeout")


@pytest.fixture(autouse=True)
def no_job_is_left() -> Iterator[None]:
    """Leave the job of one rank that ``tw.shard`` joins by itself: the next test in the process may need another."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        from thinwire.collectives import group

        group.shutdown()


def queue(node_id: str) -> str:
    """The tests that one worker of ``pytest -n`` takes as a whole, in their order.

    Tests marked ``ranks`` are one queue: they keep two cores busy, two at a time take as long as one after the other,
    and their deadlines would have to be longer. Those of ``tests/weights`` wait for stores and receivers most of the
    time, those of ``tests/end_to_end`` for processes that start, and go beside it. The lab's are one, as they measure
    links. The others go file by file.
    """
    file = node_id.partition("::")[0]
    room = PurePath(file).parent.name
    if room not in ("weights", "end_to_end") and is_on_ranks(ROOT / file):
        return "ranks"
    return "lab" if room == "lab" else file


@functools.cache
def is_on_ranks(path: Path) -> bool:
    """Whether all tests of a file are marked ``ranks``: it says so in ``pytestmark``.

    The process that deals out the tests knows their names only, so it reads the file.
    """
    text = path.read_text(encoding="utf-8")
    return re.search(r"^pytestmark = .*pytest\.mark\.ranks\b", text, re.MULTILINE) is not None


def repeated(cases: Sequence[pytest.Function]) -> Iterator[pytest.Function]:
    """Cases of a test whose parameters have values that other cases have as well, each one somewhere.

    Cases on the processor's own instruction set are no repetitions: these kernels are what users run.
    """
    values = {case: {(name, id(value)) for name, value in case.callspec.params.items()} for case in cases}
    left = [case for case in cases if not is_on_own_target(case)]
    missing = set().union(*values.values()).difference(*(values[case] for case in cases if case not in left))
    while missing:
        best = max(left, key=lambda case: len(values[case] & missing))
        left.remove(best)
        missing -= values[best]
    return iter(left)


def is_on_own_target(case: pytest.Function) -> bool:
    """Whether a case is about native codecs on the processor's own instruction set."""
    if "target" not in case.callspec.params:
        return False
    from thinwire.codecs.cpp import _native

    return bool(case.callspec.params["target"] == _native.target())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave products of parameters to `make test-all`, and start long tests early, so that workers end together: ranks,
    then the lab, then the rest."""
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        for case in repeated(cases):
            case.add_marker(pytest.mark.slow)
    order = {"ranks": 0, "lab": 1}
    items.sort(key=lambda item: order.get(queue(item.nodeid), 2))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Workers take queue after queue."""
    from xdist.scheduler import LoadScopeScheduling

    class Queues(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return queue(nodeid)

    config.option.loadscopereorder = False  # by the number of tests, which says little about their time
    return Queues(config, log)
