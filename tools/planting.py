"""Faults in running processes: a function's code is swapped on all ranks, and tests are called one after another.

``tools/plant.py`` uses it for faults that the stream checker sees: starting ranks anew for each would take minutes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final
from unittest import mock

from tests.edges import test_autograd as autograd
from tests.intercept import test_streams as intercept
from tests.intercept import test_works as works
from tests.sharding.islands import test_inside as islands
from tests.sharding.lanes import test_late as norms
from tests.sharding.lanes import test_streams as streams
from tests.sharding.optimizer import test_residence as residence
from tests.sharding.runtime import test_averaging as averaging
from tests.sharding.tensors import test_shares as shares
from tests.testing import test_delays as delays

from thinwire.testing import RankPool, run_ranks

__all__ = ["CASES", "first_that_fails", "swap"]

Case = tuple[Callable[..., None], tuple[Any, ...]]

_WORLD: Final = 4
_SECONDS: Final = 80.0
"""How long a call on all ranks may take; faults that make ranks wait for ever are noticed by it."""

_USUAL: Final = (streams.clipped, streams.edited)
_OTHERS: Final = tuple(ending for ending in streams.ENDINGS if ending not in _USUAL)

_STEPS: Final[list[Case]] = [
    *((streams.test_every_end_of_a_step_orders_every_access, (name, True, _USUAL)) for name in ("zero3", "zero1")),
    (streams.test_a_model_may_use_streams_of_its_own, ("zero3", "never")),
    (streams.test_a_model_may_use_streams_of_its_own, ("zero3, input gradients", "never")),
    (streams.test_a_save_in_the_background_writes_what_has_arrived, ("zeropp", Path, "never")),
    (streams.test_steps_with_a_loss_scale_order_every_access, ("zero3", False)),
    *(
        (streams.test_every_end_of_a_step_orders_every_access, (name, own, _OTHERS))
        for name, own in (("zero3", True), ("zero1", True), ("zero3", False), ("ddp", True), ("thinwire", True))
    ),
    *((streams.test_loops_order_every_access, (name, "never")) for name in ("ddp", "zero1", "zero3")),
    (streams.test_clipping_of_slices_orders_every_access, ()),
    (streams.test_presets_order_every_access, ()),
    (streams.test_reductions_under_input_gradients_order_every_access, ()),
    *((streams.test_steps_with_a_loss_scale_order_every_access, ("zeropp", fused)) for fused in (False, True)),
    (streams.test_the_end_of_encoding_orders_every_access, ()),
    *((delays.test_delayed_threads_change_no_loss, (name, "lanes")) for name in ("zero3", "ddp")),
    *(
        (residence.test_whatever_writes_gradients_waits_for_their_update, (name, where))
        for name in ("zero1", "ddp", "thinwire")
        for where in residence.RESIDENCES
    ),
    (residence.test_presets, ("zero1", "plain")),
]

_EXCHANGES: Final[list[Case]] = [
    (islands.test_exchanges_order_every_access, ("zero3", exchange)) for exchange in islands.EXCHANGES
]

_SAVED_EXCHANGES: Final[list[Case]] = [
    (islands.test_checkpoints_during_an_exchange_order_every_access, ("zero3", Path))
]

_SAVED: Final = ("zero3", "zeropp")

CASES: Final[dict[str, list[Case]]] = {
    "sharding/checkpointing/": [
        *((streams.test_a_save_in_the_background_writes_what_has_arrived, (name, Path, "never")) for name in _SAVED),
        *_SAVED_EXCHANGES,
    ],
    "sharding/grads/reducer.py": [
        (autograd.test_gradients_that_come_again_before_their_reduction_has_begun, ()),
        *_STEPS,
    ],
    "sharding/islands/": [*_EXCHANGES, *_SAVED_EXCHANGES],
    "sharding/runtime/averaging.py": [
        (averaging.test_streams_wait_for_the_average, ("zero1", {"residence": {"optimizer": "host-stream"}}))
    ],
    "sharding/tensors/": [(shares.test_a_sum_that_a_rank_joins_late_arrives, ())],
    "sharding/runtime/": [*_STEPS, *_EXCHANGES],
    "sharding/lanes/streams.py: read_later": [(norms.test_steps_equal_those_that_the_host_decides, (norms.FIRST,))],
    "sharding/lanes/": [
        (streams.test_a_drained_worker_has_nothing_left_to_do, ()),
        (streams.test_who_waits_for_the_last_hop_releases_the_memory_of_all, ()),
        (residence.test_a_dropped_model_gives_its_memory_of_the_host_back, ()),
        *_STEPS,
    ],
    "sharding/": [*_STEPS, (norms.test_steps_equal_those_that_the_host_decides, (norms.FIRST,))],
    "collectives/links/streams.py": [(works.test_a_reading_waits_for_streams_that_still_wait, ()), *_STEPS],
    "collectives/links/nccl.py": [(intercept.test_every_operation_on_streams, ())],
    "checkpoint/": [(streams.test_a_save_in_the_background_writes_what_has_arrived, ("zeropp", Path, "never"))],
    "intercept/": [
        (intercept.test_works_wait_on_streams_only, ()),
        (intercept.test_works_keep_memory_that_they_use, ()),
        (intercept.test_hooks_of_fsdp_on_side_streams, ()),
        (intercept.test_every_operation_on_streams, ()),
        (intercept.test_ddp_and_fsdp_on_streams, ("never",)),
    ],
}
"""Tests and their arguments, by the beginning of the file's name and the function's; ``Path`` stands for an empty
directory."""


def swap(file: str, function: str, text: str) -> None:
    """Give a function of the package the code that it has in another text of its file.

    Args:
        file: The file, relative to the package.
        function: Qualified name of a function of the module or of a class.
        text: Text of the whole file.
    """
    module = importlib.import_module(f"thinwire.{file.removesuffix('.py').replace('/', '.')}")
    assert module.__file__ is not None
    code = _code_of(compile(text, module.__file__, "exec"), function)
    assert code is not None, f"{file} has no {function}"
    found = [each for each in _functions(module) if each.__code__.co_qualname == function]
    assert found, f"{module.__name__} holds no {function}"
    for each in found:
        each.__code__ = code


def _code_of(code: CodeType, function: str) -> CodeType | None:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_qualname == function:
                return constant
            if function.startswith(f"{constant.co_qualname}.") and (found := _code_of(constant, function)):
                return found
    return None


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """Functions and methods that a module defines, below their decorators."""
    owners = [module, *(each for each in vars(module).values() if inspect.isclass(each))]
    for owner in owners:
        if owner is module or owner.__module__ == module.__name__:
            for value in vars(owner).values():
                yield from _below(value)


def _below(value: Any) -> Iterator[FunctionType]:
    if isinstance(value, property):
        for each in (value.fget, value.fset, value.fdel):
            yield from _below(each)
    elif isinstance(value, staticmethod | classmethod):
        yield from _below(value.__func__)
    elif isinstance(value, functools.cached_property):
        yield from _below(value.func)
    elif hasattr(value, "__wrapped__"):
        yield from _below(value.__wrapped__)
    elif isinstance(value, FunctionType):
        yield value


@contextlib.contextmanager
def _planted(file: str, function: str, text: str, original: str) -> Iterator[None]:
    """The fault, in this process and on all ranks."""
    swap(file, function, text)
    run_ranks(_WORLD, swap, file, function, text)
    try:
        yield
    finally:
        swap(file, function, original)
        run_ranks(_WORLD, swap, file, function, original)


def first_that_fails(file: str, function: str, text: str, original: str, before: str = "") -> str:
    """Plant a fault, and call tests until one fails.

    Args:
        file: The file, relative to the package.
        function: Qualified name of the function that holds the fault.
        text: The file with the fault.
        original: The file as it is.
        before: What an earlier call returned; its test comes first.

    Returns:
        The test, with its arguments and why it failed; empty if none does.

    Raises:
        RuntimeError: The test does not finish without the fault either: the machine is too busy to tell.
    """
    cases = next(cases for start, cases in CASES.items() if f"{file}: {function}".startswith(start))
    run = RankPool.run

    def run_briefly(pool: RankPool, *args: Any, timeout: float = _SECONDS, **options: Any) -> list[Any]:
        return run(pool, *args, timeout=min(timeout, _SECONDS), **options)

    with mock.patch.object(RankPool, "run", run_briefly):
        with _planted(file, function, text, original):
            for case in sorted(cases, key=lambda case: not before.startswith(_named(*case))):
                if (error := _error_of(*case)) is not None:
                    break
            else:
                return ""
        if "did not finish" in str(error) and (otherwise := _error_of(*case)) is not None:
            raise RuntimeError(f"{_named(*case)} fails without a fault: {_said(otherwise)}")
        return f"{_named(*case)}: {_said(error)}"


def _error_of(test: Callable[..., None], arguments: tuple[Any, ...]) -> BaseException | None:
    with tempfile.TemporaryDirectory() as directory:
        try:
            test(*(Path(directory) if each is Path else each for each in arguments))
        except BaseException as error:
            return error
    return None


def _named(test: Callable[..., None], arguments: tuple[Any, ...]) -> str:
    words = ", ".join(str(each) for each in arguments if isinstance(each, str | bool))
    return f"{test.__name__}({words})"


def _said(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = next((line for line in lines if ": race:" in line or "freed in use" in line or "arrival" in line), None)
    return (told or (lines[-1] if lines else type(error).__name__))[:90]
