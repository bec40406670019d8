"""Parts for several cards and several nodes: one function that every rank of a job calls."""

from __future__ import annotations

import collections
import copy
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from benchmarks.gpu.case import Case, Report
from benchmarks.gpu.outcome import CaseRecord, Check, Outcome, Record, read, write
from benchmarks.gpu.scale import Scale, card_name
from benchmarks.gpu.step import interleaved, launches
from benchmarks.gpu.systems import FSDP2, Step, fsdp2_step, llama, thinwire_step, tokens
from benchmarks.gpu.training import TOLERANCE, exact_plan, global_batches, relative_error, small_llama, train

import thinwire as tw
from thinwire.agreement import Typed
from thinwire.collectives import group
from thinwire.report.sheet import Sheet
from thinwire.sharding.api import runtime
from thinwire.spec import Plan
from thinwire.units import format_bytes

__all__ = ["LOSS_BOUND", "cases", "on_this_job", "work"]

LOSS_BOUND: Final = 0.02
"""Largest relative difference of a loss under codecs to that of the fp32 reference."""

_CASE: Final = "one job"
_TIMED: Final = ("zero3", "zeropp", "thinwire", "hsdp")


def cases(scale: Scale, stack: ExitStack) -> list[Case]:
    """All cards of this machine as the ranks of one job; several nodes are started by torchrun alone."""
    del stack
    return [Case(_CASE, partial(_several_cards, scale), 240)]


def _several_cards(scale: Scale, report: Report) -> Outcome:
    cards = torch.cuda.device_count() if scale.device == "cuda" else scale.ranks
    report(f"{cards} ranks")
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={cards}"]
        command += ["-m", "benchmarks.gpu", "ranks", "--device", scale.device, "--results", directory]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        record = read("cards", Path(directory), card_name(scale.device))
    if record is None:
        raise RuntimeError(f"torchrun ended with status {done.returncode}: {(done.stdout + done.stderr)[-3000:]}")
    return record.cases[_CASE].outcome


def on_this_job(scale: Scale, results: Path) -> bool:
    """What every rank under torchrun does; rank 0 writes ``cards.json``, or ``nodes.json`` for several nodes.

    Args:
        scale: Sizes.
        results: Directory for the record.

    Returns:
        Whether every check is met, on rank 0; True on the others.
    """
    if scale.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    group.init("cpu:gloo,cuda:nccl" if scale.device == "cuda" else "gloo")
    try:
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        nodes = int(os.environ["WORLD_SIZE"]) // local
        first = group.control().rank == 0
        started = time.monotonic()
        outcome = work(scale, nodes, local, (lambda line: print(line, flush=True)) if first else lambda line: None)
        if first:
            record = Record("nodes" if nodes > 1 else "cards", scale.device, card_name(scale.device))
            write(record.having(_CASE, CaseRecord.of(outcome, time.monotonic() - started)), results)
        return outcome.met or not first
    finally:
        group.shutdown()


def work(scale: Scale, nodes: int, local: int, report: Report) -> Outcome:
    """Parity, losses under codecs, bytes, and times, on every rank of a job.

    Args:
        scale: Sizes.
        nodes: Number of nodes.
        local: Ranks of a node.
        report: Called with a line of text whenever something begins.
    """
    parity, parity_checks = _parity(scale, nodes, local, report)
    codecs, codec_checks = _encoded(scale, nodes, local, report)
    times, byte_checks, data = _times(scale, nodes, local, report)
    return Outcome((parity, codecs, times), (*parity_checks, *codec_checks, *byte_checks), data=data)


def _reference(world: int, device: str, steps: int) -> tuple[list[torch.Tensor], list[float]]:
    """Plain PyTorch in fp32 on the batches of all ranks: parameters on CPU, and the mean loss of every step."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model = small_llama().to(device)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-1)
    losses = []
    for step in global_batches(world, steps):
        parts = step.flatten(0, 1).to(device)
        total = 0.0
        for ids in parts:
            loss = model(ids[:, :-1], labels=ids[:, 1:]).loss / len(parts)
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        optim.zero_grad()
        losses.append(total)
    return [parameter.detach().cpu() for parameter in model.parameters()], losses


def _worst(value: float) -> float:
    """The largest value over all ranks."""
    return max(group.control().all_gather_typed(value, Typed[float](float)))


def _parity(scale: Scale, nodes: int, local: int, report: Report) -> tuple[Sheet, list[Check]]:
    wanted, _ = _reference(nodes * local, scale.device, 3)
    rows, checks = [], []
    for preset in Plan.preset_names(islands=False) if scale.is_whole else ("zero3",):
        report(f"parity of {preset}")
        error = _worst(relative_error(train(exact_plan(preset, nodes, local), scale.device)[0], wanted))
        rows.append([preset, f"{error:.1e}"])
        met = error <= TOLERANCE
        checks.append(Check(f"{preset}: parameters against PyTorch", f"{error:.1e}", f"at most {TOLERANCE:.0e}", met))
    title = f"{nodes}x{local} ranks: largest relative difference of parameters to plain PyTorch in fp32, any rank"
    return Sheet(title, ("preset", "difference"), 1, rows), checks


def _encoded(scale: Scale, nodes: int, local: int, report: Report) -> tuple[Sheet, list[Check]]:
    _, wanted = _reference(nodes * local, scale.device, scale.steps)
    rows, checks = [], []
    for preset in ("zeropp", "thinwire") if scale.is_whole else ("zeropp",):
        report(f"losses of {preset}")
        toml = Plan.preset(preset, nodes=nodes, local=local, compute_dtype="float32").to_toml()
        ours = group.control().all_reduce_mean(train(toml, scale.device, scale.steps)[1])
        worst = max(abs(a - b) / b for a, b in zip(ours, wanted, strict=True))
        rows.append([preset, f"{ours[-1]:.4f}", f"{wanted[-1]:.4f}", f"{worst:.1e}"])
        bound = f"at most {LOSS_BOUND:.0e}"
        checks.append(Check(f"{preset}: losses against fp32", f"{worst:.1e}", bound, worst <= LOSS_BOUND))
    columns = ("preset", "last loss", "fp32", "largest relative difference")
    return Sheet(f"codecs in training, {scale.steps} steps", columns, 1, rows), checks


def _times(scale: Scale, nodes: int, local: int, report: Report) -> tuple[Sheet, list[Check], dict[str, Any]]:
    """Step times in turns with FSDP2, and bytes against those of the program."""
    report("building the model")
    whole = llama(scale.model, scale.device)
    ids = tokens(scale.model, scale.batch, scale.device, seed=group.control().rank)
    systems: dict[str, Step] = {FSDP2: fsdp2_step(copy.deepcopy(whole), ids)}
    models = {}
    for preset in _TIMED:
        plan = Plan.preset(preset, nodes=nodes, local=local)
        systems[preset], models[preset] = thinwire_step(copy.deepcopy(whole), ids, plan)
    for step in systems.values():
        step()
    checks, sent = [], {}
    for preset, model in models.items():
        runtime(model).lanes.drain()
        tw.traffic(model)
        systems[preset]()
        runtime(model).lanes.drain()
        sent[preset] = _by_scope(tw.traffic(model).values())
        wanted = _by_scope(runtime(model).schedule.programs.program(1).traffic().values())
        checks.append(_bytes_check(preset, sent[preset], wanted))
    seconds = interleaved(systems, scale, report)
    counts = {name: launches(step, scale.device) for name, step in systems.items()}
    rows = []
    for name, taken in seconds.items():
        ratios = sorted(ours / theirs for ours, theirs in zip(taken, seconds[FSDP2], strict=True))
        middle, own = ratios[len(ratios) // 2], sent.get(name)
        traffic = ["", ""] if own is None else [format_bytes(own["inside"]), format_bytes(own["across"])]
        spread = f"{middle:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        rows.append([name, f"{1e3 * sorted(taken)[len(taken) // 2]:.2f}", spread, f"{counts[name]:.0f}", *traffic])
    columns = ("system", "ms per step", "times FSDP2 (range)", "launches", "sent inside", "sent across")
    sheet = Sheet("steps in turns with FSDP2; figures of rank 0", columns, 1, rows)
    return sheet, checks, {"seconds": seconds, "launches": counts, "sent": sent}


def _by_scope(lanes: Iterable[Mapping[Any, int]]) -> dict[str, int]:
    """Bytes of all lanes, inside the node and across nodes."""
    total: collections.Counter[str] = collections.Counter()
    for lane in lanes:
        total.update({str(scope): amount for scope, amount in lane.items()})
    return dict(total)


def _bytes_check(preset: str, sent: dict[str, int], wanted: dict[str, int]) -> Check:
    text = [f"{amounts['inside']} inside, {amounts['across']} across" for amounts in (sent, wanted)]
    return Check(f"{preset}: bytes that rank 0 sends", text[0], text[1], sent == wanted)
