"""The command line of the GPU check; start it in the checkout.

python -m benchmarks.gpu run --results docs/results/gpu
python -m benchmarks.gpu run --results docs/results/gpu --minutes 8.5
python -m benchmarks.gpu run --results docs/results/gpu --part codecs --part step --again
python -m benchmarks.gpu render docs/results/gpu --page docs/gpu.md
python -m benchmarks.gpu run --device cpu --results runs/gpu-rehearsal
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from benchmarks.gpu.outcome import CUT, PASSED, SKIPPED, read_cards
from benchmarks.gpu.parts import PARTS, part_named
from benchmarks.gpu.runner import Request, perform, run
from benchmarks.gpu.scale import scale_of

from thinwire.errors import ThinwireError, UsageError
from thinwire.units import parse_bytes


def main(arguments: list[str] | None = None) -> int:
    """Run parts, or render their page.

    Returns:
        The exit status: 0 if every part that ran has passed.
    """
    options = _parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except ThinwireError as error:
        print(f"gpu check: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    names = [part.name for part in PARTS]

    running = commands.add_parser("run", help="run all parts, or those that --part names, most valuable first")
    running.add_argument("--part", action="append", choices=names, dest="parts", help="may be repeated")
    running.add_argument("--minutes", type=float, help="end by then; what is left runs the next time")
    running.set_defaults(command=_run)

    one = commands.add_parser("part", help="run one part in this process, as `run` does")
    one.add_argument("name", choices=names)
    one.add_argument("--deadline", type=float, help="seconds since 1970 by which it should have ended")
    one.add_argument("--tried", action="append", default=[], help="a case to leave out; may be repeated")
    one.set_defaults(command=_part)

    ranks = commands.add_parser("ranks", help="what torchrun starts on every rank, for several cards or nodes")
    ranks.set_defaults(command=_ranks)

    for command in (running, one):
        command.add_argument("--again", action="store_true", help="run cases again that have missed a goal")
        command.add_argument("--memory", type=parse_bytes, help="as if the card had no more, for example 24GiB")
    for command in (running, one, ranks):
        command.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu rehearses with tiny sizes")
        command.add_argument("--results", type=Path, required=True, help="directory of one file for each card and part")

    rendering = commands.add_parser("render", help="write the results into the page")
    rendering.add_argument("results", type=Path)
    rendering.add_argument("--page", type=Path, required=True)
    rendering.set_defaults(command=_render)
    return parser


def _run(options: argparse.Namespace) -> int:
    _need_device(options.device)
    parts = [part_named(name) for name in options.parts] if options.parts else list(PARTS)
    deadline = None if options.minutes is None else time.time() + 60 * options.minutes
    request = Request(options.device, options.results, options.again, deadline, options.memory)
    return int(any(record.status not in {PASSED, SKIPPED, CUT} for record in run(parts, request)))


def _part(options: argparse.Namespace) -> int:
    _need_device(options.device)
    request = Request(options.device, options.results, options.again, options.deadline, options.memory)
    return perform(options.name, request, options.tried)


def _ranks(options: argparse.Namespace) -> int:
    from benchmarks.gpu.cluster import on_this_job

    _need_device(options.device)
    return int(not on_this_job(scale_of(options.device), options.results))


def _render(options: argparse.Namespace) -> int:
    from benchmarks.gpu.page import update

    update(options.page, read_cards([part.name for part in PARTS], options.results))
    return 0


def _need_device(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            "--device cuda: PyTorch finds no CUDA device on this machine; rehearse with --device cpu, or check the "
            "driver (nvidia-smi) and that torch was built for CUDA (torch.version.cuda)"
        )


if __name__ == "__main__":
    sys.exit(main())
