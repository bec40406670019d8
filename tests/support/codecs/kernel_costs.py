"""What the Triton kernels take on GPUs that are not here, by their machine code, and the page that shows it.

``python -m tests.support.codecs.kernel_costs`` compiles all kernels of ``CASES`` and rewrites, for the installed
release of Triton, its part of ``kernel_costs.json`` and ``docs/results/gpu-kernels.md``. The numbers of the file are
also the budgets that ``tests/codecs/triton/test_budgets.py`` checks.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tests.support.codecs.gpu_code import read_code
from tests.support.codecs.gpu_compile import TARGETS, compile_only
from tests.support.paths import ROOT

from thinwire import codecs
from thinwire.spec import CodecSpec

__all__ = ["CASES", "FILE", "PAGE", "measure", "release", "rendered"]

FILE = Path(__file__).with_name("kernel_costs.json")
PAGE = ROOT / "docs" / "results" / "gpu-kernels.md"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
NUMEL = 1 << 16
"""Values of the tensor whose calls are compiled: whole tiles only."""
FLOATS = ("float32", "bfloat16")
CASES = [
    *((name, dtype) for name in ("int8:256", "int4:256") for dtype in FLOATS),
    *((name, "bfloat16") for name in ("int4:256,hadamard", "int4:2048", "int3:256", "mpc", "exp3")),
    *((name, "float32") for name in ("zfp:8", "bf16")),
]
"""Codecs and the dtypes that they encode."""
FEEDBACK = [(name, "bfloat16") for name in ("int8:256", "int4:256", "int4:256,hadamard")]
"""Those of them that are encoded with error feedback too."""


class Card(NamedTuple):
    """A GPU: its architecture, processors, clock in GHz, bandwidth in TB/s, and the lanes of a processor's pipes."""

    target: str
    processors: int
    clock: float
    bandwidth: float
    lanes: dict[str, int]


CARDS = {
    "A100": Card("sm_80", 108, 1.41, 2.04, {"issue": 128, "fma": 64, "imad": 64, "alu": 64, "lsu": 32, "xu": 16}),
    "H100": Card("sm_90", 132, 1.755, 3.35, {"issue": 128, "fma": 128, "imad": 64, "alu": 64, "lsu": 32, "xu": 16}),
    "MI300X": Card("gfx942", 304, 2.1, 5.3, {"issue": 64, "lsu": 32}),
}


def measure(target: str) -> dict[str, dict[str, Any]]:
    """Compile the encoding and decoding of each case; return what each kernel takes.

    Returns:
        By ``codec dtype operation kernel``: registers, spills, barriers, and thread instructions per value of each
        pipe.
    """
    costs: dict[str, dict[str, Any]] = {}
    key = ""

    def keep(name: str, kernel: Any, programs: int) -> None:
        code = read_code(kernel, _trips(name), _THROUGH.get(name, ""))
        threads = programs * kernel.metadata.num_warps * TARGETS[target][2]
        pipes = _pipes(target, code.path)
        costs[f"{key} {name}"] = {
            "registers": code.registers,
            "spills": code.spills,
            "barriers": code.barriers,
            "per_value": {pipe: round(count * threads / NUMEL, 2) for pipe, count in sorted(pipes.items())},
        }

    with compile_only(target, keep):
        for name, dtype in CASES:
            codec, x = codecs.get(name, backend="triton"), torch.zeros(NUMEL, dtype=getattr(torch, dtype))
            key = f"{name} {dtype} encode"
            codec.encode(x, seed=1)
            wire = codecs.get(name).encode(x, seed=1)
            key = f"{name} {dtype} decode"
            codec.decode(wire, NUMEL, x.dtype)
            if (name, dtype) in FEEDBACK:
                key = f"{name} {dtype} feedback"
                codec.encode_feedback(x, torch.zeros(NUMEL), gain=0.1, seed=1)
    return costs


_THROUGH = {"_write_rest": r"STG\.E\.U8|global_store_byte"}
"""Kernels with more than one way of writing a whole tile, and an opcode of the usual one. ``_write_rest`` of exp3 also
copies tensors that do not become shorter."""


def _trips(kernel: str) -> tuple[int, ...]:
    """How often the loops of a kernel run."""
    return (1,) if kernel == "_largest_keys" else ()


_PIPES = {
    "lsu": ("LD", "ST", "SHFL", "REDUX", "ATOM", "RED"),
    "xu": ("MUFU", "F2I", "I2F.", "POPC", "FLO", "BREV"),
    "imad": ("IMAD",),
    "fma": ("FFMA", "FMUL", "FADD", "HFMA2", "HADD2", "HMUL2"),
    "alu": (
        *("LOP3", "SHF", "SEL", "FSEL", "ISETP", "FSETP", "PRMT", "LEA", "IADD3", "VIADD", "SGXT", "IMNMX", "VIMNMX"),
        *("FMNMX", "PLOP3", "I2FP", "BMSK", "IABS"),
    ),
}
_QUARTER_RATE = ("v_mul_lo", "v_mul_hi", "v_mad_u64", "v_mad_i64", "v_rcp", "v_div_fmas", "v_div_scale", "v_sqrt")


def _pipes(target: str, path: Counter[str]) -> Counter[str]:
    """Instructions of a thread by pipe. ``issue`` counts all of them."""
    pipes: Counter[str] = Counter()
    for opcode, count in path.items():
        if target.startswith("gfx"):
            if opcode.startswith("v_"):  # scalar instructions are issued beside those of vectors
                pipes["issue"] += count * (4 if opcode.startswith(_QUARTER_RATE) else 1)
            elif not opcode.startswith("s_"):
                pipes["lsu"] += count
            continue
        pipes["issue"] += count
        for pipe, prefixes in _PIPES.items():
            if opcode.startswith(prefixes) and not opcode.startswith("LDC"):
                pipes[pipe] += count
                break
    if "imad" in pipes:
        pipes["fma"] += pipes["imad"]
    return pipes


def release() -> str:
    """The installed release of Triton without its patch level, the key of its part of the file."""
    import triton

    return ".".join(triton.__version__.split(".")[:2])


def rendered(releases: dict[str, Any]) -> str:
    """The part of the page between its marks."""
    return "\n\n".join(_rendered(key, measured) for key, measured in releases.items()) + "\n"


def _rendered(key: str, measured: dict[str, Any]) -> str:
    lines = [
        f"**Triton {key}, estimated, not measured: share of the memory's bandwidth that each codec can use**",
        "",
    ]
    lines += ["| codec | dtype | operation | bytes per value | " + " | ".join(CARDS) + " |"]
    lines += ["| --- | --- | --- | ---: |" + " ---: |" * len(CARDS)]
    for name, dtype in CASES:
        for operation in ("encode", "feedback", "decode"):
            if operation == "feedback" and (name, dtype) not in FEEDBACK:
                continue
            nbytes = _bytes_per_value(name, dtype) + (8 if operation == "feedback" else 0)
            shares = [
                _share(measured[card.target], f"{name} {dtype} {operation} ", nbytes, card) for card in CARDS.values()
            ]
            cells = [f"`{name}`", dtype, operation, f"{nbytes:.2f}", *shares]
            lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        f"**Triton {key}, machine code: registers of a thread / barriers / instructions of a thread per value**",
        "",
    ]
    lines += ["| codec | dtype | operation | kernel | " + " | ".join(TARGETS) + " |"]
    lines += ["| --- | --- | --- | --- |" + " ---: |" * len(TARGETS)]
    for key in measured["sm_90"]:
        name, dtype, operation, kernel = key.split(" ")
        cells = [f"`{name}`", dtype, operation, f"`{kernel}`"]
        for target in TARGETS:
            cost = measured[target][key]
            cells.append(f"{cost['registers']} / {cost['barriers']} / {sum_of(cost):.1f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", f"Compiled by Triton {measured['triton']}."])


def sum_of(cost: dict[str, Any]) -> float:
    """Instructions of a thread per value."""
    pipes = cost["per_value"]
    return float(pipes["issue"])


def _bytes_per_value(name: str, dtype: str) -> float:
    """Bytes of the tensor and of the message. For variable lengths, docs/results/codecs.md has the typical one."""
    spec, item = CodecSpec(name), getattr(torch, dtype).itemsize
    bits = {"mpc": 12.5, "exp3": 11.3}.get(name)
    return float(item + (spec.max_wire_bytes(NUMEL, dtype) / NUMEL if bits is None else bits / 8))


def _share(costs: dict[str, Any], prefix: str, nbytes: float, card: Card) -> str:
    """Time to move the bytes, over that or the time of the busiest pipe, whichever is longer."""
    pipes: Counter[str] = Counter()
    for key, cost in costs.items():
        if key.startswith(prefix):
            pipes.update(cost["per_value"])
    busy = max(pipes[pipe] / lanes for pipe, lanes in card.lanes.items()) / (card.processors * card.clock * 1e9)
    moving = nbytes / (card.bandwidth * 1e12)
    return f"{100 * moving / max(moving, busy):.0f}%"


def main() -> None:
    """Measure, and rewrite the file and the page."""
    import triton

    assert "TRITON_INTERPRET" not in os.environ, "unset TRITON_INTERPRET, which replaces the compiler"
    measured: dict[str, Any] = {"triton": triton.__version__}
    for target in TARGETS:
        measured[target] = measure(target)
        print(f"{target}: {len(measured[target])} kernels", flush=True)
    releases = {**json.loads(FILE.read_text(encoding="utf-8")), release(): measured}
    releases = {key: releases[key] for key in sorted(releases)}
    FILE.write_text(json.dumps(releases, indent=1) + "\n", encoding="utf-8")
    if PAGE.exists():
        head, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
        PAGE.write_text(head + BEGIN + "\n\n" + rendered(releases) + "\n" + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
