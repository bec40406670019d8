"""The command line of the GPU check; start it in the checkout.

python -m benchmarks.gpu run --results docs/results/gpu
python -m benchmarks.gpu run --results docs/results/gpu --part codecs --part step
python -m benchmarks.gpu render docs/results/gpu --page docs/gpu.md
python -m benchmarks.gpu run --device cpu --results runs/gpu-rehearsal
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from benchmarks.gpu.cluster import on_this_job
from benchmarks.gpu.outcome import DONE, SKIPPED, read_all
from benchmarks.gpu.page import update
from benchmarks.gpu.parts import PARTS, part_named
from benchmarks.gpu.runner import perform, run
from benchmarks.gpu.scale import scale_of

from thinwire.errors import ThinwireError, UsageError


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

    running = commands.add_parser("run", help="run all parts, or those that --part names")
    running.add_argument("--part", action="append", choices=names, dest="parts", help="may be repeated")
    running.add_argument("--again", action="store_true", help="run parts again that have a result")
    running.set_defaults(command=_run)

    one = commands.add_parser("part", help="run one part in this process, as `run` does")
    one.add_argument("name", choices=names)
    one.set_defaults(command=_part)

    ranks = commands.add_parser("ranks", help="what torchrun starts on every rank, for several cards or nodes")
    ranks.set_defaults(command=_ranks)

    for command in (running, one, ranks):
        command.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu rehearses with tiny sizes")
        command.add_argument("--results", type=Path, required=True, help="directory of one JSON file for each part")

    rendering = commands.add_parser("render", help="write the results into the page")
    rendering.add_argument("results", type=Path)
    rendering.add_argument("--page", type=Path, required=True)
    rendering.set_defaults(command=_render)
    return parser


def _run(options: argparse.Namespace) -> int:
    _need_device(options.device)
    parts = [part_named(name) for name in options.parts] if options.parts else list(PARTS)
    records = run(parts, options.device, options.results, again=options.again)
    return int(any(record.status not in {DONE, SKIPPED} for record in records))


def _part(options: argparse.Namespace) -> int:
    _need_device(options.device)
    perform(options.name, options.device, options.results)
    return 0


def _ranks(options: argparse.Namespace) -> int:
    _need_device(options.device)
    return int(not on_this_job(scale_of(options.device), options.results))


def _render(options: argparse.Namespace) -> int:
    update(options.page, read_all(tuple(part.name for part in PARTS), options.results))
    return 0


def _need_device(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            "--device cuda: PyTorch finds no CUDA device on this machine; rehearse with --device cpu, or check the "
            "driver (nvidia-smi) and that torch was built for CUDA (torch.version.cuda)"
        )


if __name__ == "__main__":
    sys.exit(main())
