"""Compiles the kernels of codecs in many processes, into Triton's cache, before other programs need them.

``TRITON_CACHE_DIR`` names the cache, from which each kernel is then loaded. ``python -m benchmarks.gpu.compile``
compiles those of codecs that are named, or of the most usual ones. Without a CUDA device it rehearses: it compiles for
``sm_90`` and runs nothing.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch

from thinwire import codecs
from thinwire.codecs.triton.warmup import warm_up
from thinwire.spec import CodecSpec
from thinwire.spec.codec import encodable_dtypes

__all__ = ["compile_all"]

USUAL = ("none", "bf16", "int8:256", "int4:256", "int4:256,hadamard", "int8:2048", "int4:2048", "mpc", "exp3", "zfp:8")


def compile_all(
    names: Sequence[str], dtypes: Sequence[str], processes: int, report: Callable[[str], object]
) -> dict[str, float]:
    """Compile what each codec launches for tensors of each dtype that it takes, one pair of both a task.

    A task that fails is reported and leaves the others alone.

    Args:
        names: Codecs.
        dtypes: Dtypes of tensors.
        processes: Number of processes.
        report: Receives a line for each task.

    Returns:
        Seconds of each task that succeeded, by ``codec dtype``.
    """
    tasks = [(name, dtype) for name in names for dtype in dtypes if dtype in encodable_dtypes(CodecSpec(name))]
    seconds: dict[str, float] = {}
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        pending = {pool.submit(_compile, *task): " ".join(task) for task in tasks}
        for done in as_completed(pending):
            key, error = pending[done], done.exception()
            if error is not None:
                report(f"{key}: {type(error).__name__}: {error}")
                continue
            seconds[key] = done.result()
            report(f"{key}: {seconds[key]:.1f} s")
    return seconds


def _compile(name: str, dtype: str) -> float:
    started = time.perf_counter()
    codec, dtypes = codecs.get(name, backend="triton"), [getattr(torch, dtype)]
    if torch.cuda.is_available():
        warm_up([codec], dtypes, "cuda", messages=(2, 4), gain=1.0)
        torch.cuda.synchronize()
    else:
        from tests.support.codecs.gpu_compile import compile_only

        with compile_only("sm_90", lambda name, kernel, programs: None):
            warm_up([codec], dtypes, "cpu", messages=(2, 4), gain=1.0)
    return time.perf_counter() - started


def main() -> None:
    """Compile what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.compile", description=__doc__)
    parser.add_argument("codecs", nargs="*", default=USUAL)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    started = time.perf_counter()
    done = compile_all(args.codecs, args.dtypes, args.processes, lambda line: print(line, flush=True))
    print(f"{len(done)} tasks in {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
