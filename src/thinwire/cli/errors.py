"""From an error to what a person reads: the sentence on stderr, an exit status that is not zero."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator

import typer

from thinwire.errors import ThinwireError


@contextlib.contextmanager
def explained(*, as_json: bool = False) -> Iterator[None]:
    """Turn an error that thinwire raises on purpose into its message; any other one keeps its traceback.

    Args:
        as_json: print ``{"error": message}`` to stdout as well.

    Yields:
        Nothing.

    Raises:
        Exit: with status 1 after an error, 130 after Ctrl-C.
    """
    try:
        yield
    except ThinwireError as error:
        message = str(error).rstrip()
        if as_json:
            print(json.dumps({"error": message}))
        print(f"thinwire: {message}", file=sys.stderr)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        print("thinwire: interrupted", file=sys.stderr)
        raise typer.Exit(130) from None
