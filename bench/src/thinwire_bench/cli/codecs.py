"""``thinwire bench codecs``: how exact and how fast each codec is, compared with memcpy and other implementations."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.cli.terminal.console import command_line, wide_console
from thinwire.cli.terminal.errors import explained
from thinwire.cli.terminal.options import expand_options
from thinwire.errors import SpecError, UsageError
from thinwire_bench.cli.shared import JsonPath, Page, insert_into, progress, refuse, show, words

if TYPE_CHECKING:
    from thinwire_bench.codecs.bench import Request
    from thinwire_bench.codecs.study import CodecStudy

_REFERENCE_LIMIT = 4 << 20
"""Bytes of a tensor that the reference backend encodes in seconds."""


@dataclass(frozen=True)
class CodecsOptions:
    """The options of ``thinwire bench codecs``."""

    names: Annotated[
        str | None, typer.Option("--codecs", metavar="NAME,...", help="Codecs to measure; by default 16 of them.")
    ] = None
    dtypes: Annotated[str, typer.Option(metavar="fp32,bf16,fp16", help="Dtypes of the tensors.")] = "fp32,bf16"
    sizes: Annotated[
        str, typer.Option(metavar="SIZE,...", help="Sizes of the tensors. Peers are timed at the first size.")
    ] = "64MiB,512MiB"
    data: Annotated[
        str,
        typer.Option(
            metavar="NAME,...", help="Data sets for errors: normal, student, gradients, weights, activations; or none."
        ),
    ] = "normal,student,gradients,weights,activations"
    values: Annotated[int, typer.Option(min=2048, help="Values per synthetic data set.")] = 1 << 24
    peers: Annotated[
        str,
        typer.Option(
            metavar="NAME,...|none",
            help="Other implementations: zfpy, eager, compile, torchao, bitsandbytes, zipnn, deepspeed-form.",
        ),
    ] = "zfpy,eager,compile,torchao,bitsandbytes,zipnn,deepspeed-form"
    targets: Annotated[
        str,
        typer.Option(
            metavar="NAME,...|all|none",
            help="Instruction sets of this processor to force in turn at the first size, for a table of each.",
        ),
    ] = "none"
    device: Annotated[str, typer.Option(metavar="cpu|cuda", help="Device of the tensors.")] = "cpu"
    backend: Annotated[
        str | None,
        typer.Option(metavar="reference|cpp|triton", help="Backend of the codecs; by default the one of the device."),
    ] = None
    threads: Annotated[int, typer.Option(min=1, help="Threads of codecs and peers on CPU; memcpy always has one.")] = 1
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds; every codec and peer is timed once per round, in random order.")
    ] = 9
    json_path: JsonPath = None
    plot: Annotated[Path | None, typer.Option(metavar="OUT.png", help="Draw the speeds as shares of memcpy.")] = None
    page: Page = None
    read: Annotated[Path | None, typer.Option(metavar="RUN.json", help="Show an earlier run and measure nothing.")] = (
        None
    )


@expand_options
def codecs(options: CodecsOptions) -> None:
    """Measure codecs: bits, error on five data sets, and speed as a share of memcpy in the same run.

    Speeds count the bytes of the uncompressed tensor. A codec whose bytes differ from the reference's, or which loses
    information although it is lossless by name, is refused: its figures do not count, and the command exits with status
    1. Missed goals are reported but are not an error.

    [bold]Examples[/bold]

      thinwire bench codecs --json codecs.json --plot codecs.png

      thinwire bench codecs --codecs int8:256,int4:256,hadamard,zfp:8 --sizes 64MiB --peers none

      thinwire bench codecs --targets all --sizes 64MiB --data none --peers none   (every instruction set in turn)

      thinwire bench codecs --device cuda --sizes 64MiB,1GiB --json gpu.json

      thinwire bench codecs --read codecs.json --page docs/results/codecs.md   (renders a page from an earlier run)
    """
    with explained():
        from thinwire_bench.codecs.sheets import markdown, sheets

        study = _read_or_measure(options)
        show(sheets(study))
        for note in study.notes:
            wide_console().print(f"note: {note}", style="yellow")
        if options.json_path is not None:
            options.json_path.write_text(json.dumps(asdict(study), indent=1) + "\n", encoding="utf-8")
        if options.plot is not None:
            from thinwire_bench.codecs.speed_chart import draw

            draw(study, options.plot)
        insert_into(options.page, markdown(study), "thinwire bench codecs --page")
        refuse("codecs", study.refused, "figures")


def _read_or_measure(options: CodecsOptions) -> CodecStudy:
    """An earlier run, or a new one."""
    from pydantic import TypeAdapter

    from thinwire_bench.codecs.study import CodecStudy

    if options.read is not None:
        return TypeAdapter(CodecStudy).validate_json(options.read.read_bytes())
    from thinwire_bench.codecs.bench import run

    return run(_request(options), progress)


def _request(options: CodecsOptions) -> Request:
    """What the options ask for.

    Raises:
        SpecError: names every value that is not valid, before anything is measured.
        UsageError: the device is not there.
    """
    import torch

    from thinwire.codecs import BACKENDS, default_backend
    from thinwire.spec import CodecSpec
    from thinwire.units import parse_bytes
    from thinwire_bench.codecs.bench import CODECS, Request
    from thinwire_bench.codecs.data import DATA_SETS
    from thinwire_bench.codecs.targets import known_targets

    device = options.device
    if device not in {"cpu", "cuda"}:
        raise SpecError("--device", f"{device!r} is not a device: valid are cpu and cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: PyTorch finds no CUDA device on this machine")
    backend = options.backend or default_backend(device)
    if backend not in BACKENDS:
        raise SpecError("--backend", f"there is no backend {backend!r}; valid are {', '.join(BACKENDS)}")
    names = CODECS if options.names is None else _codec_names(options.names)
    dtypes, data, known = words(options.dtypes), _words_or_none(options.data), known_targets()
    sizes = {word: parse_bytes(word) for word in words(options.sizes)}
    targets = known if options.targets == "all" else _words_or_none(options.targets)
    problems = [f"there is no data set {name!r}; valid are {', '.join(DATA_SETS)}" for name in {*data} - {*DATA_SETS}]
    problems += [
        f"{word} is not a size of at least 4 KiB and a multiple of 4 KiB"
        for word, size in sizes.items()
        if size < 4096 or size % 4096
    ]
    if targets and backend != "cpp":
        problems.append(f"--targets are instruction sets of the backend cpp, and this is {backend}: leave them out")
    else:
        problems += [
            f"this processor has no instruction set {name!r}; valid are {', '.join(known)}, all and none"
            for name in targets
            if name not in known
        ]
    if backend == "reference" and max(sizes.values(), default=0) > _REFERENCE_LIMIT:
        problems.append("the reference backend is slow: --sizes of at most 4MiB")
    if not names or not dtypes or not sizes:
        problems.append("there is nothing to measure: --codecs, --dtypes and --sizes each need a value")
    if problems:
        raise SpecError("bench codecs", problems)
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    for name in dtypes:
        if name not in kinds:
            raise SpecError("--dtypes", f"{name!r} is not a dtype: valid are {', '.join(kinds)}")
    return Request(
        codecs=[str(CodecSpec(name)) for name in dict.fromkeys(names)],
        dtypes=[kinds[name] for name in dict.fromkeys(dtypes)],
        sizes=list(dict.fromkeys(sizes.values())),
        data=list(dict.fromkeys(data)),
        values=options.values,
        peers=list(dict.fromkeys(_words_or_none(options.peers))),
        targets=list(dict.fromkeys(targets)),
        device=torch.device(device),
        backend=backend,
        threads=options.threads,
        rounds=options.rounds,
        command=command_line(),
    )


def _codec_names(text: str) -> list[str]:
    """The names of codecs between commas; the options of a name come after commas as well."""
    from thinwire.spec.codec import OPTIONS

    names: list[str] = []
    for word in words(text):
        if word in OPTIONS and names:
            names[-1] += f",{word}"
        else:
            names.append(word)
    return names


def _words_or_none(text: str) -> list[str]:
    """The words between commas; the word "none" alone stands for no words."""
    split = words(text)
    return [] if split == ["none"] else split
