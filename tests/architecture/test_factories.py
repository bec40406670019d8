"""Tensors that the library makes have the device and the dtype that it says. Programs change torch's defaults, as
``torch.set_default_device("cuda")`` and ``torch.set_default_dtype(torch.bfloat16)`` do."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from tests.support.paths import ROOT
from torch.utils._device import _device_constructors

PACKAGE = ROOT / "src/thinwire"

LAYERS = {"train/models/common.py", "train/models/llama.py"}
"""Their parameters and buffers follow the defaults, as those of torch's own layers do."""

MADE = {function.__name__ for function in _device_constructors()}
FLOATS = {"empty", "empty_strided", "eye", "linspace", "logspace", "ones", "rand", "randn", "zeros"}
"""Their dtype is the default where none is given; that of the others follows the values."""


def unstated(source: str) -> Iterator[str]:
    """Calls of torch's factories without a device or a dtype, by line."""
    for call in ast.walk(ast.parse(source)):
        if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("torch."):
            name = ast.unparse(call.func).removeprefix("torch.")
            stated = {keyword.arg for keyword in call.keywords}
            needed = ({"device"} if name in MADE else set()) | ({"dtype"} if name in FLOATS else set())
            if None not in stated and (missing := needed - stated):
                yield f"line {call.lineno} without {' and '.join(sorted(missing))}: {ast.unparse(call)[:80]}"


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ("torch.empty(3)", ["device and dtype"]),
        ("torch.zeros(3, device=device)", ["dtype"]),
        ("f(torch.tensor([1]))", ["device"]),
        ("torch.ones(3, **options)", []),
        ("torch.ones(3, dtype=kind, device='cpu').sum()", []),
        ("torch.zeros_like(tensor)", []),
    ],
)
def test_what_is_unstated_is_found(source: str, missing: list[str]) -> None:
    assert [line.partition(" without ")[2].partition(":")[0] for line in unstated(source)] == missing


def test_every_tensor_has_a_device_and_a_dtype() -> None:
    files = {file.relative_to(PACKAGE).as_posix(): file for file in PACKAGE.rglob("*.py")}
    assert files.keys() >= LAYERS
    found = {name: list(unstated(file.read_text())) for name, file in files.items() if name not in LAYERS}
    assert {name: lines for name, lines in found.items() if lines} == {}
