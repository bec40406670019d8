"""``thinwire follow`` and ``thinwire serve-weights``: a trainer's weights, version by version, on other hosts."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.cli.terminal.errors import explained, writing
from thinwire.cli.terminal.options import expand_options
from thinwire.errors import UsageError
from thinwire.units import format_bytes

if TYPE_CHECKING:
    from thinwire.weights import Subscriber

Keys = Annotated[Path | None, typer.Option(metavar="DIR", help="Keys of thinwire keys, the same on both sides.")]


@dataclass(frozen=True)
class FollowOptions:
    """The options of ``thinwire follow``."""

    store: Annotated[str, typer.Argument(metavar="STORE", help="Where the trainer publishes: a directory or a URL.")]
    out: Annotated[Path, typer.Option(metavar="DIR", help="Directory of the model.")]
    keys: Keys = None
    sglang: Annotated[
        str | None, typer.Option(metavar="URL", help="An SGLang server that is to load every version.")
    ] = None
    once: Annotated[bool, typer.Option("--once", help="Take the newest version, and leave.")] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print every version as a line of JSON.")] = False


@expand_options
def follow(options: FollowOptions) -> None:
    """Keep the newest weights that a trainer publishes in DIR/model.safetensors, until Ctrl-C.

    The file is replaced as a whole, and this command may be killed and started again at any time. With the model's
    config.json and tokenizer beside it, DIR is a model for transformers, vLLM and SGLang.

    [bold]Examples[/bold]

      thinwire follow s3://bucket/run-7 --out model

      thinwire follow https://10.0.0.1:29520 --keys keys --out /models/policy --sglang http://localhost:30000
    """
    with explained(as_json=options.as_json):
        from thinwire.weights import Subscriber

        with writing("--out", options.out):
            subscriber = Subscriber(options.store, options.out, keys=options.keys)
        with contextlib.closing(subscriber):
            (_once if options.once else _forever)(subscriber, options)


def _once(subscriber: Subscriber, options: FollowOptions) -> None:
    try:
        subscriber.update()
    except OSError as error:
        raise UsageError(f"STORE = {options.store} cannot be followed: {error}") from error
    if subscriber.version is None:
        raise UsageError(f"{options.store} has no complete version yet: leave out --once to wait for one")
    _say(subscriber, subscriber.nbytes, as_json=options.as_json)
    _tell(subscriber, options)


def _forever(subscriber: Subscriber, options: FollowOptions) -> None:
    told = subscriber.version is None
    while True:
        before = subscriber.nbytes
        if subscriber.follow(5.0) is not None:
            _say(subscriber, subscriber.nbytes - before, as_json=options.as_json)
            told = False
        told = told or _tell(subscriber, options)


def _say(subscriber: Subscriber, nbytes: int, *, as_json: bool) -> None:
    said = {"run": subscriber.run, "version": subscriber.version, "step": subscriber.step, "bytes": nbytes}
    words = f"version {subscriber.version}, of step {subscriber.step}: {format_bytes(nbytes)}"
    print(json.dumps(said) if as_json else words, flush=True)


def _tell(subscriber: Subscriber, options: FollowOptions) -> bool:
    """Let the engine load the version; returns whether it has. If not, it is told again."""
    if options.sglang is None:
        return True
    from thinwire.integrations.sglang import load_from_disk

    try:
        load_from_disk(options.sglang, options.out, f"{subscriber.run}.{subscriber.version}")
    except UsageError as error:
        if options.once:
            raise
        typer.echo(f"thinwire: {error}", err=True)
        return False
    return True


def serve_weights(
    store: Annotated[Path, typer.Argument(metavar="DIR", help="Directory to which the trainer publishes.")],
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0: a free one.")] = 29520,
    keys: Keys = None,
) -> None:
    """Serve published weights over HTTP for thinwire follow and tw.Subscriber, until Ctrl-C or SIGTERM.

    It serves the parts of versions and no other file, and writes nothing. Without --keys, anybody who reaches the port
    can read the weights; with them, over TLS, only who has the keys.

    [bold]Examples[/bold]

      thinwire keys keys

      thinwire serve-weights /scratch/run-7 --host 10.0.0.1 --keys keys
    """
    with explained():
        from thinwire.collectives.gateway.keys import Keys as OfDirectory
        from thinwire.weights.serving import weights_server

        # Before threads start, so that all of them leave these signals to this one.
        signals = {signal.SIGINT, signal.SIGTERM}
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        server = weights_server(store, host, port, None if keys is None else OfDirectory.read(keys))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        missing = "" if store.is_dir() else ", which is not there yet,"
        typer.echo(f"{store}{missing} at http{'' if keys is None else 's'}://{host}:{server.server_port}")
        signal.sigwait(signals)
        server.shutdown()
