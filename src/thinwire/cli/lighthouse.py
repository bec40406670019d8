"""``thinwire lighthouse``: says which elastic islands are there, for as long as they train."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Annotated, Final

import typer

from thinwire.cli.terminal.errors import explained
from thinwire.cli.terminal.options import expand_options
from thinwire.errors import UsageError

_DAY: Final = 86400.0


@dataclass(frozen=True)
class LighthouseOptions:
    """The options of ``thinwire lighthouse``; each field's help says what it is."""

    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen at.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0: a free one.")] = 29510
    wait: Annotated[
        float, typer.Option(min=0.0, max=_DAY, metavar="SECONDS", help="Longest wait for islands that are late.")
    ] = 5.0
    silence: Annotated[
        float,
        typer.Option(min=1.0, max=_DAY, metavar="SECONDS", help="An island is gone after so long without a sign."),
    ] = 3.0


@expand_options
def lighthouse(options: LighthouseOptions) -> None:
    """Tell elastic islands which of them are there, until Ctrl-C or SIGTERM.

    It is torchft's lighthouse: it keeps no state that training needs, and islands wait while it is started anew.
    Anybody who reaches its port can take part, so let it listen at an address that only your islands reach.

    [bold]Example[/bold]

      thinwire lighthouse --host 10.0.0.1 --wait 5
    """
    with explained():
        _serve(options)


def _serve(options: LighthouseOptions) -> None:
    from thinwire.sharding.islands.lighthouse import serve

    # Before threads start, so that all of them leave these signals to this one.
    signals = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        server = serve(options.host, options.port, wait=options.wait, silence=options.silence)
    except (RuntimeError, OSError) as error:
        raise UsageError(
            f"thinwire lighthouse cannot listen at {options.host}:{options.port}: {str(error).splitlines()[0]}; choose "
            "another --host or --port"
        ) from error
    typer.echo(f"lighthouse at {options.host}:{server.address().rpartition(':')[2]}")
    signal.sigwait(signals)
    server.shutdown()
