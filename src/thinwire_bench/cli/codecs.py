"""``thinwire bench codecs``: how exact and how fast each codec is, beside memcpy and other implementations."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.cli.console import command_line, wide_console
from thinwire.cli.errors import explained

if TYPE_CHECKING:
    import torch

    from thinwire_bench.codecs.run import Request
    from thinwire_bench.codecs.study import Study

_REFERENCE_LIMIT = 4 << 20
"""Bytes of a tensor that the reference backend encodes in seconds."""


def codecs(
    names: Annotated[
        str | None, typer.Option("--codecs", metavar="NAME,...", help="Which; 16 of them unless said.")
    ] = None,
    dtypes: Annotated[str, typer.Option(metavar="fp32,bf16,fp16", help="Of the tensors.")] = "fp32,bf16",
    sizes: Annotated[
        str, typer.Option(metavar="SIZE,...", help="Of the tensors. Peers are timed at the first one.")
    ] = "64MiB,512MiB",
    data: Annotated[
        str,
        typer.Option(metavar="NAME,...", help="For errors: normal, student, gradients, weights, activations; or none."),
    ] = "normal,student,gradients,weights,activations",
    values: Annotated[int, typer.Option(min=2048, help="In each synthetic data set.")] = 1 << 24,
    peers: Annotated[
        str,
        typer.Option(
            metavar="NAME,...|none",
            help="Other implementations: zfpy, eager, compile, torchao, bitsandbytes, zipnn, deepspeed-form.",
        ),
    ] = "zfpy,eager,compile,torchao,bitsandbytes,zipnn,deepspeed-form",
    device: Annotated[str, typer.Option(metavar="cpu|cuda", help="Where the tensors are.")] = "cpu",
    backend: Annotated[
        str | None, typer.Option(metavar="reference|cpp|triton", help="Of the codecs; the device's own unless said.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Of codecs and peers on CPU; memcpy always has one.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Everything is timed once a round, in random order.")] = 9,
    json_path: Annotated[Path | None, typer.Option("--json", metavar="OUT.json", help="Write every figure.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="OUT.png", help="Draw the shares of memcpy.")] = None,
    page: Annotated[
        Path | None, typer.Option(metavar="PAGE.md", help="Replace the results in a page, between its two marks.")
    ] = None,
    read: Annotated[
        Path | None, typer.Option(metavar="RUN.json", help="Show an earlier run; nothing is measured.")
    ] = None,
) -> None:
    """Measure codecs: bits, error on five data sets, and speed as a share of memcpy in the same run.

    Speeds count the bytes of the uncompressed tensor. A codec whose bytes are not the reference's, or which is not
    lossless and should be, is refused: none of its figures count, and the command ends with status 1. Goals that are
    missed are reported and are no error.

    [bold]Examples[/bold]

      thinwire bench codecs --json codecs.json --plot codecs.png

      thinwire bench codecs --codecs int8:256,int4:256,hadamard,zfp:8 --sizes 64MiB --peers none

      thinwire bench codecs --device cuda --sizes 64MiB,1GiB --json gpu.json

      thinwire bench codecs --read codecs.json --page docs/codecs.md   (renders a page from an earlier run)
    """
    with explained():
        from thinwire_bench.codecs.study import Study

        if read is not None:
            study = Study.from_plain(json.loads(read.read_text(encoding="utf-8")))
        else:
            from thinwire_bench.codecs.run import CODECS, run

            request = _request(
                _codec_names(names) if names is not None else CODECS,
                _words(dtypes),
                _words(sizes),
                _words(data, none=True),
                values,
                _words(peers, none=True),
                device,
                backend,
                threads,
                rounds,
            )
            study = run(request, lambda line: print(line, file=sys.stderr))
        _show(study)
        if json_path is not None:
            json_path.write_text(json.dumps(study.plain(), indent=1) + "\n", encoding="utf-8")
        if plot is not None:
            from thinwire_bench.codecs.picture import draw

            draw(study, plot)
        if page is not None:
            from thinwire.report import insert
            from thinwire_bench.codecs.sheets import markdown

            text = insert(page.read_text(encoding="utf-8"), markdown(study), "thinwire bench codecs --page")
            page.write_text(text, encoding="utf-8")
        _refuse(study)


def _request(
    names: Sequence[str],
    dtypes: Sequence[str],
    sizes: Sequence[str],
    data: Sequence[str],
    values: int,
    peers: Sequence[str],
    device: str,
    backend: str | None,
    threads: int,
    rounds: int,
) -> Request:
    """What the options ask for; every problem is found before anything is measured."""
    import torch

    from thinwire.codecs import BACKENDS, default_backend
    from thinwire.errors import SpecError, UsageError
    from thinwire.spec import CodecSpec
    from thinwire.units import parse_bytes
    from thinwire_bench.codecs.data import DATA_SETS
    from thinwire_bench.codecs.run import Request

    if device not in {"cpu", "cuda"}:
        raise SpecError("--device", [f"{device!r} is not a device: valid are cpu and cuda"])
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: PyTorch finds no CUDA device on this machine")
    backend = backend or default_backend(device)
    if backend not in BACKENDS:
        raise SpecError("--backend", [f"there is no backend {backend!r}; valid are {', '.join(BACKENDS)}"])
    problems = [f"there is no data set {name!r}; valid are {', '.join(DATA_SETS)}" for name in set(data) - {*DATA_SETS}]
    found = [parse_bytes(size) for size in sizes]
    problems += [
        f"{text} is not a size of at least 4 KiB and a multiple of 4 KiB"
        for text, size in zip(sizes, found, strict=True)
        if size < 4096 or size % 4096
    ]
    if backend == "reference" and max(found, default=0) > _REFERENCE_LIMIT:
        problems.append("the reference backend is slow: --sizes of at most 4MiB")
    if not names or not dtypes or not found:
        problems.append("there is nothing to measure: --codecs, --dtypes and --sizes each need a value")
    if problems:
        raise SpecError("bench codecs", problems)
    return Request(
        codecs=[str(CodecSpec(name)) for name in dict.fromkeys(names)],
        dtypes=[_dtype(name) for name in dict.fromkeys(dtypes)],
        sizes=list(dict.fromkeys(found)),
        data=list(dict.fromkeys(data)),
        values=values,
        peers=list(dict.fromkeys(peers)),
        device=torch.device(device),
        backend=backend,
        threads=threads,
        rounds=rounds,
        command=command_line(),
    )


def _dtype(name: str) -> torch.dtype:
    import torch

    from thinwire.errors import SpecError

    known = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    if name not in known:
        raise SpecError("--dtypes", [f"{name!r} is not a dtype: valid are {', '.join(known)}"])
    return known[name]


def _codec_names(text: str) -> list[str]:
    """Names between commas, though names have options after commas of their own."""
    from thinwire.spec.codec import OPTIONS

    names: list[str] = []
    for word in _words(text):
        if word in OPTIONS and names:
            names[-1] += f",{word}"
        else:
            names.append(word)
    return names


def _words(text: str, *, none: bool = False) -> list[str]:
    """Words between commas; the word "none" stands for no words where that is allowed."""
    words = [word for part in text.split(",") if (word := part.strip())]
    return [] if none and words == ["none"] else words


def _show(study: Study) -> None:
    from thinwire.report import rich_table
    from thinwire_bench.codecs.sheets import sheets

    console = wide_console()
    for sheet in sheets(study):
        console.print(rich_table(sheet), "")
    for note in study.notes:
        console.print(f"note: {note}", style="yellow")


def _refuse(study: Study) -> None:
    """End with an error where a codec did not do what the reference does."""
    from thinwire_bench.systems.messages import BenchError

    if study.refused:
        reasons = "; ".join(f"{subject}: {problem}" for subject, problem in study.refused.items())
        raise BenchError(f"{len(study.refused)} of the codecs refused, their figures do not count: {reasons}")
