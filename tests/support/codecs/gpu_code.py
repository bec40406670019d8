"""Reads machine code: registers, spills, barriers, and the instructions on the longest path through a kernel.

NVIDIA's code is read from the output of ``nvdisasm`` and ``cuobjdump``, which Triton's wheel contains; AMD's is the
assembly that Triton keeps.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

__all__ = ["Code", "read_code"]


@dataclass(frozen=True)
class Code:
    """What one kernel takes.

    Attributes:
        registers: Vector registers of a thread.
        spills: Bytes of a thread's local memory (NVIDIA), or spilled registers of both kinds (AMD).
        barriers: Instructions that wait for all warps of a program.
        path: Instructions of each opcode that a thread executes for a whole tile: on the path that moves the most
            bytes and, among those, has the fewest instructions. Loops count as often as they run.
    """

    registers: int
    spills: int
    barriers: int
    path: Counter[str]


def read_code(kernel: Any, trips: tuple[int, ...] = (), through: str = "") -> Code:
    """Read a kernel that Triton compiled.

    Args:
        kernel: What Triton's compiler returned.
        trips: How often each loop runs, in the order of the loops' first instructions.
        through: Pattern of an opcode; the path is one with as many of these as possible.

    Raises:
        ValueError: The code has another number of loops.
    """
    if "cubin" in kernel.asm:
        return _nvidia(kernel.asm["cubin"], trips, through)
    return _amd(kernel.asm["amdgcn"], trips, through)


def _nvidia(cubin: bytes, trips: tuple[int, ...], through: str) -> Code:
    import triton.backends.nvidia

    tools = Path(triton.backends.nvidia.__file__).parent / "bin"
    with TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        usage = _output(tools / "cuobjdump", "--dump-resource-usage", file)
        text = _output(tools / "nvdisasm", "-c", file)
    spilled = int(_group(r" STACK:(\d+)", usage)) + int(_group(r" LOCAL:(\d+)", usage))
    lines: list[_Line] = []
    for line in text.splitlines():
        if label := re.match(r"(\.L_x_\w+):", line):
            lines.append(_Line(label=label[1]))
        elif code := re.match(r"\s+/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?([\w.]+)([^;]*);", line):
            guarded, opcode, operands = code.groups()
            target = re.search(r"`\((\.L_x_\w+)\)", operands)
            jumps = target[1] if target and opcode.startswith(("BRA", "BRX")) else ""
            ends = opcode.startswith(("EXIT", "RET", "BRA")) and not guarded and opcode != "BRA.DIV"
            # A warp that does not diverge passes the branch to the code for divergence.
            lines.append(_Line(opcode=opcode, jumps="" if opcode == "BRA.DIV" else jumps, ends=ends))
    path = _path(lines, trips, through)
    barriers = sum(line.opcode.startswith("BAR.SYNC") for line in lines)
    return Code(int(_group(r" REG:(\d+)", usage)), spilled, barriers, path)


def _amd(text: str, trips: tuple[int, ...], through: str) -> Code:
    lines: list[_Line] = []
    for line in text[: text.index(".Lfunc_end")].splitlines():
        if label := re.match(r"(\.LBB\w+):", line):
            lines.append(_Line(label=label[1]))
        elif code := re.match(r"\t([vs]_\w+|ds_\w+|global_\w+|buffer_\w+)(?:\s+(\S+))?", line):
            opcode = code[1]
            jumps = code[2] if opcode.startswith(("s_branch", "s_cbranch")) else ""
            lines.append(_Line(opcode=opcode, jumps=jumps, ends=opcode in ("s_branch", "s_endpgm")))
    spilled = int(_group(r"\.vgpr_spill_count: (\d+)", text)) + int(_group(r"\.sgpr_spill_count: (\d+)", text))
    barriers = sum(line.opcode == "s_barrier" for line in lines)
    return Code(int(_group(r"\.vgpr_count: +(\d+)", text)), spilled, barriers, _path(lines, trips, through))


@dataclass(frozen=True)
class _Line:
    """A label, or an instruction: where it may jump to, and whether the next one may follow."""

    label: str = ""
    opcode: str = ""
    jumps: str = ""
    ends: bool = False


def _path(lines: list[_Line], trips: tuple[int, ...], through: str) -> Counter[str]:
    labels = {line.label: at for at, line in enumerate(lines) if line.label}
    follows = [[] if line.ends or at + 1 == len(lines) else [at + 1] for at, line in enumerate(lines)]
    for at, line in enumerate(lines):
        if line.jumps:
            follows[at].append(labels[line.jumps])
    order, loops = _walk(follows)
    if len(loops) != len(trips):
        raise ValueError(f"the code has {len(loops)} loops, and {len(trips)} numbers of trips were given")
    weights = [1 if line.opcode else 0 for line in lines]
    for (_, body), count in zip(sorted(loops.items()), trips, strict=True):
        for at in body:
            weights[at] *= count
    # Tiles at the end of a tensor take other ways: they leave early, or access the same bytes by narrower instructions.
    # Paths are compared by the opcodes they should have, then by bytes, then by instructions.
    best: dict[int, tuple[int, int, int]] = {}
    choice: dict[int, int | None] = {}
    for at in order:
        ways = [to for to in follows[at] if to in best]  # a jump back to the start of a loop is no way out
        choice[at] = max(ways, key=lambda to: best[to], default=None)
        wanted, nbytes, instructions = max((best[to] for to in ways), default=(0, 0, 0))
        opcode, weight = lines[at].opcode, weights[at]
        wanted += weight if through and re.search(through, opcode) else 0
        best[at] = wanted, nbytes + weight * _num_bytes(opcode), instructions - weight
    path: Counter[str] = Counter()
    step: int | None = 0
    while step is not None:
        path[lines[step].opcode] += weights[step]
        step = choice[step]
    del path[""]
    return path


def _walk(follows: list[list[int]]) -> tuple[list[int], dict[int, set[int]]]:
    """All reachable lines, each after those that follow it, and the lines of each loop by the loop's first line."""
    order: list[int] = []
    open_lines: dict[int, int] = {0: 0}  # lines whose followers are being visited, and how many of them were
    done: set[int] = set()
    tails: dict[int, list[int]] = {}
    while open_lines:
        at, visited = next(reversed(open_lines.items()))
        if visited == len(follows[at]):
            del open_lines[at]
            done.add(at)
            order.append(at)
            continue
        open_lines[at] = visited + 1
        to = follows[at][visited]
        if to in open_lines:
            tails.setdefault(to, []).append(at)
        elif to not in done:
            open_lines[to] = 0
    comes_from: dict[int, list[int]] = {}
    for at in order:
        for to in follows[at]:
            comes_from.setdefault(to, []).append(at)
    loops: dict[int, set[int]] = {}
    for head, ends in tails.items():
        body, left = {head}, list(ends)
        while left:
            at = left.pop()
            if at not in body:
                body.add(at)
                left += comes_from.get(at, [])
        loops[head] = body
    return order, loops


def _num_bytes(opcode: str) -> int:
    """Bytes of global memory that an instruction accesses."""
    if not opcode.startswith(("LDG", "STG", "RED", "ATOM", "global_", "buffer_")):
        return 0
    sizes = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
    sizes |= {"ubyte": 1, "sbyte": 1, "byte": 1, "ushort": 2, "short": 2, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}
    return next((sizes[part] for part in re.split(r"[._]", opcode) if part in sizes), 4)


def _group(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match is not None, pattern
    return match[1]


def _output(*command: object) -> str:
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout
