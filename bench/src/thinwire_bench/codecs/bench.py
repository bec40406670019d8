"""A run: gates, errors, then speeds, bench by bench."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from thinwire.codecs import Codec, get
from thinwire.spec import CodecSpec
from thinwire.spec.codec import FAMILIES, encodable_dtypes
from thinwire.units import format_bytes
from thinwire_bench.codecs.accuracy import Accuracy, blocking, codec_accuracy
from thinwire_bench.codecs.data import data_sets
from thinwire_bench.codecs.goals import goals
from thinwire_bench.codecs.jobs import FUSED_CODECS, Buffers, codec_jobs
from thinwire_bench.codecs.peers import CodecPeer, accuracy_of, choose, jobs_of
from thinwire_bench.codecs.soundness import SEED, CodecGate, check_sample, check_timed
from thinwire_bench.codecs.speeds import COPY, CodecSpeed, copy_job, interleave, is_noisy, speeds
from thinwire_bench.codecs.study import CodecStudy
from thinwire_bench.codecs.targets import check_targets, native_target, target_speeds
from thinwire_bench.environment import describe, installed

_CHOSEN: Final = (
    "int8:256", "int8:2048", "int4:256", "int4:2048", "int4:256,hadamard", "int4:256,stochastic", "int8:tensor",
    "int4:tensor", "int3:256", "bf16", "fp16", "zfp:8", "zfp:16", "zfp:24",
)  # fmt: skip

CODECS: Final = _CHOSEN + tuple(
    family.examples[0]
    for name, family in FAMILIES.items()
    if name not in {"none", *(CodecSpec(text).family for text in _CHOSEN)}
)
"""Codecs that are measured by default: the chosen ones, and one of every other family."""


@dataclass(frozen=True)
class Request:
    """What to measure.

    Attributes:
        codecs: Names of codecs.
        dtypes: Dtypes of the tensors.
        sizes: Sizes of the tensors in bytes; peers are timed at the first size.
        data: Names of data sets.
        values: Values of each synthetic data set.
        peers: Groups of peers.
        targets: Instruction sets to force one after another, at the first size; for the backend ``cpp`` alone.
        device: ``cpu`` or ``cuda``.
        backend: Backend of the codecs.
        threads: Threads of torch, which the codecs use as well.
        rounds: Rounds that count.
        command: The command line that the user typed.
    """

    codecs: Sequence[str]
    dtypes: Sequence[torch.dtype]
    sizes: Sequence[int]
    data: Sequence[str]
    values: int
    peers: Sequence[str]
    targets: Sequence[str]
    device: torch.device
    backend: str
    threads: int
    rounds: int
    command: str


def run(request: Request, report: Callable[[str], None] = lambda line: None) -> CodecStudy:
    device = request.device
    codecs = [get(name, backend=request.backend) for name in request.codecs]
    sets = data_sets(request.data, request.values, report)
    threads = torch.get_num_threads()
    torch.set_num_threads(request.threads)
    try:
        peers, statuses = choose(request.peers, device)
        gates: list[CodecGate] = []
        accuracies: list[Accuracy] = []
        for dtype in request.dtypes:
            report(f"{_name(dtype)}: comparing with the reference, measuring errors")
            sound = [codec for codec in codecs if _takes(codec, dtype) and _passes(codec, dtype, device, gates)]
            accuracies += _accuracies(sound, [peer for peer in peers if dtype in peer.dtypes], sets, dtype, device)
        measured: list[CodecSpeed] = []
        notes: list[str] = []
        for size in request.sizes:
            timed = [peer for peer in peers if peer.timed and size == request.sizes[0]]
            for dtype in request.dtypes:
                report(f"{_name(dtype)}, {format_bytes(size)}: timing {request.rounds} rounds")
                able = [peer for peer in timed if dtype in peer.dtypes]
                measured += _bench([c for c in codecs if _takes(c, dtype)], able, size, dtype, request, gates, notes)
        by_target = _bench_targets(codecs, request, gates, notes, report) if request.targets else []
    finally:
        torch.set_num_threads(threads)
    red = {(gate.codec, gate.dtype) for gate in gates if gate.problem is not None}
    measured = [speed for speed in measured if (speed.subject, speed.dtype) not in red]
    by_target = [speed for speed in by_target if (speed.subject, speed.dtype) not in red]
    accuracies = [each for each in accuracies if (each.subject, each.dtype) not in red]
    environment = describe()
    environment["versions"] |= installed(("triton", "zfpy", "torchao", "bitsandbytes", "zipnn"))
    if torch.version.cuda:
        environment["versions"]["cuda"] = torch.version.cuda
    if request.backend == "cpp":
        environment["target"] = native_target()
    return CodecStudy(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else environment["cpu"],
        backend=request.backend,
        threads=request.threads,
        rounds=request.rounds,
        codecs=tuple(request.codecs),
        speeds=measured,
        accuracies=accuracies,
        blockings=blocking(accuracies),
        peers=statuses,
        gates=gates,
        goals=goals([*measured, *by_target], accuracies, on_cpu=device.type == "cpu"),
        notes=notes,
        environment=environment,
        command=request.command,
        target_speeds=by_target,
    )


def _passes(codec: Codec, dtype: torch.dtype, device: torch.device, gates: list[CodecGate]) -> bool:
    problem = check_sample(codec, dtype, device)
    gates.append(CodecGate(str(codec.spec), _name(dtype), None, problem))
    return problem is None


def _accuracies(
    codecs: Sequence[Codec],
    peers: Sequence[CodecPeer],
    sets: Mapping[str, Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> list[Accuracy]:
    accuracies = []
    for data, values in sets.items():
        x = values.to(device, dtype)
        accuracies += [codec_accuracy(codec, data, x) for codec in codecs]
        accuracies += [accuracy_of(peer, data, x) for peer in peers]
    return accuracies


def _bench(
    codecs: Sequence[Codec],
    peers: Sequence[CodecPeer],
    size: int,
    dtype: torch.dtype,
    request: Request,
    gates: list[CodecGate],
    notes: list[str],
) -> list[CodecSpeed]:
    """Every codec that has passed and every peer on one tensor; buffers live no longer than this call."""
    buffers = Buffers.make(size, dtype, request.device)
    red = {gate.codec for gate in gates if gate.dtype == _name(dtype) and gate.problem is not None}
    jobs = [copy_job(buffers.x, buffers.out)]
    bits: dict[str, float] = {}
    for codec in codecs:
        name = str(codec.spec)
        if name in red:
            continue
        problem = _check_buffers(codec, buffers)
        gates.append(CodecGate(name, _name(dtype), size, problem))
        if problem is None:
            made, bits[name] = codec_jobs(codec, buffers, fused=name in FUSED_CODECS)
            jobs += made
    for peer in peers:
        made, bits[peer.name] = jobs_of(peer, buffers.x)
        jobs += made
    seconds = interleave(jobs, rounds=request.rounds, device=request.device)
    if is_noisy(seconds[[job.subject for job in jobs].index(COPY)]):
        notes.append(_unsteady(f"{_name(dtype)}, {format_bytes(size)}"))
    return speeds(jobs, seconds, dtype=_name(dtype), size=size, wire_bits=bits)


def _bench_targets(
    codecs: Sequence[Codec],
    request: Request,
    gates: list[CodecGate],
    notes: list[str],
    report: Callable[[str], None],
) -> list[CodecSpeed]:
    """Every codec with every instruction set that the request names, at its first size."""
    size, targets = request.sizes[0], request.targets
    measured: list[CodecSpeed] = []
    for dtype in request.dtypes:
        where = f"{_name(dtype)}, {format_bytes(size)}, {', '.join(targets)}"
        report(f"{where}: comparing with the reference, timing {request.rounds} rounds")
        able = [codec for codec in codecs if _takes(codec, dtype)]
        gates += check_targets(able, targets, dtype)
        red = {gate.codec for gate in gates if gate.dtype == _name(dtype) and gate.problem is not None}
        sound = [codec for codec in able if str(codec.spec) not in red]
        timed, is_unsteady = target_speeds(sound, targets, dtype=dtype, size=size, rounds=request.rounds)
        measured += timed
        if is_unsteady:
            notes.append(_unsteady(where))
    return measured


def _unsteady(where: str) -> str:
    return (
        f"{where}: the machine was busy or unsteady: the middle half of memcpy's rounds lies more than a tenth of the "
        "median apart"
    )


def _check_buffers(codec: Codec, buffers: Buffers) -> str | None:
    x = buffers.x
    wire = codec.encode(x, seed=SEED if codec.spec.needs_seed else None)
    return check_timed(codec, x, codec.decode(wire, x.numel(), x.dtype, out=buffers.out))


def _takes(codec: Codec, dtype: torch.dtype) -> bool:
    return _name(dtype) in encodable_dtypes(codec.spec)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
