"""A run: gates, errors, then speeds, bench by bench."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from thinwire.checkpoint.manifest import dtype_name
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
from thinwire_bench.codecs.speeds import CodecSpeed, TimedCall, copy_job, interleave, is_noisy, speeds
from thinwire_bench.codecs.study import CodecStudy
from thinwire_bench.codecs.targets import check_targets, forced, native_target, target_jobs
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
    bench, threads = _Run(request, report), torch.get_num_threads()
    torch.set_num_threads(request.threads)
    try:
        return bench.study()
    finally:
        torch.set_num_threads(threads)


class _Run:
    """A run under way: what is to be measured, and the gates and notes so far."""

    def __init__(self, request: Request, report: Callable[[str], None]) -> None:
        self.request, self.report = request, report
        self.codecs = [get(name, backend=request.backend) for name in request.codecs]
        self.sets = data_sets(request.data, request.values, report)
        self.gates: list[CodecGate] = []
        self.notes: list[str] = []

    def study(self) -> CodecStudy:
        request, device = self.request, self.request.device
        peers, statuses = choose(request.peers, device)
        accuracies: list[Accuracy] = []
        for dtype in request.dtypes:
            self.report(f"{dtype_name(dtype)}: comparing with the reference, measuring errors")
            able = self._able(dtype)
            self.gates += [_gate(codec, dtype, None, check_sample(codec, dtype, device)) for codec in able]
            sound = self._sound(able, dtype)
            for data, values in self.sets.items():
                x = values.to(device, dtype)
                accuracies += [codec_accuracy(codec, data, x) for codec in sound]
                accuracies += [accuracy_of(peer, data, x) for peer in peers if dtype in peer.dtypes]
        measured: list[CodecSpeed] = []
        for size in request.sizes:
            timed = [peer for peer in peers if peer.timed and size == request.sizes[0]]
            for dtype in request.dtypes:
                self.report(f"{dtype_name(dtype)}, {format_bytes(size)}: timing {request.rounds} rounds")
                measured += self._bench([peer for peer in timed if dtype in peer.dtypes], size, dtype)
        by_target = [speed for dtype in request.dtypes if request.targets for speed in self._bench_targets(dtype)]
        red = {(gate.codec, gate.dtype) for gate in self.gates if gate.problem is not None}
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
            gates=self.gates,
            goals=goals([*measured, *by_target], accuracies, on_cpu=device.type == "cpu"),
            notes=self.notes,
            environment=environment,
            command=request.command,
            target_speeds=by_target,
        )

    def _able(self, dtype: torch.dtype) -> list[Codec]:
        """Codecs that encode a dtype."""
        return [codec for codec in self.codecs if dtype_name(dtype) in encodable_dtypes(codec.spec)]

    def _sound(self, codecs: Sequence[Codec], dtype: torch.dtype) -> list[Codec]:
        """Those that no gate has refused so far."""
        red = {gate.codec for gate in self.gates if gate.dtype == dtype_name(dtype) and gate.problem is not None}
        return [codec for codec in codecs if str(codec.spec) not in red]

    def _bench(self, peers: Sequence[CodecPeer], size: int, dtype: torch.dtype) -> list[CodecSpeed]:
        """Every sound codec and these peers on one tensor; buffers live no longer than this call."""
        buffers = Buffers.make(size, dtype, self.request.device)
        x = buffers.x
        jobs = [copy_job(x, buffers.out)]
        bits: dict[str, float] = {}
        for codec in self._sound(self._able(dtype), dtype):
            wire = codec.encode(x, seed=SEED if codec.spec.needs_seed else None)
            problem = check_timed(codec, x, codec.decode(wire, x.numel(), dtype, out=buffers.out))
            self.gates.append(_gate(codec, dtype, size, problem))
            if problem is None:
                name = str(codec.spec)
                made, bits[name] = codec_jobs(codec, buffers, fused=name in FUSED_CODECS)
                jobs += made
        for peer in peers:
            made, bits[peer.name] = jobs_of(peer, x)
            jobs += made
        return self._timed(jobs, f"{dtype_name(dtype)}, {format_bytes(size)}", dtype, size, bits)

    def _bench_targets(self, dtype: torch.dtype) -> list[CodecSpeed]:
        """Every codec with every instruction set that the request names, at its first size, all in turns."""
        size, targets = self.request.sizes[0], self.request.targets
        where = f"{dtype_name(dtype)}, {format_bytes(size)}, {', '.join(targets)}"
        self.report(f"{where}: comparing with the reference, timing {self.request.rounds} rounds")
        able = self._able(dtype)
        self.gates += check_targets(able, targets, dtype)
        buffers = Buffers.make(size, dtype, self.request.device)
        jobs, bits = target_jobs(self._sound(able, dtype), targets, buffers)
        with forced(native_target()):
            return self._timed([copy_job(buffers.x, buffers.out), *jobs], where, dtype, size, bits)

    def _timed(
        self, jobs: Sequence[TimedCall], where: str, dtype: torch.dtype, size: int, bits: Mapping[str, float]
    ) -> list[CodecSpeed]:
        """Speeds of calls, the first of them memcpy."""
        seconds = interleave(jobs, rounds=self.request.rounds, device=self.request.device)
        if is_noisy(seconds[0]):
            self.notes.append(
                f"{where}: the machine was busy or unsteady: the middle half of memcpy's rounds lies more than a tenth "
                "of the median apart"
            )
        return speeds(jobs, seconds, dtype=dtype_name(dtype), size=size, wire_bits=bits)


def _gate(codec: Codec, dtype: torch.dtype, size: int | None, problem: str | None) -> CodecGate:
    return CodecGate(str(codec.spec), dtype_name(dtype), size, problem)
