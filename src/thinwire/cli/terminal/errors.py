"""Turns errors into a sentence on stderr and an exit status other than zero."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import typer

from thinwire.errors import ThinwireError, UsageError
from thinwire.extras import extra_of, missing_sentence


@contextlib.contextmanager
def explained(*, as_json: bool = False) -> Iterator[None]:
    """Turn an error that thinwire raises on purpose, a missing extra, or what the system says of a file into one
    message.

    Any other error keeps its traceback.

    Args:
        as_json: Print ``{"error": message}`` to stdout as well.

    Raises:
        Exit: with status 1 after an error, 130 after Ctrl-C.
    """
    try:
        yield
    except ThinwireError as error:
        _show(str(error).rstrip(), as_json=as_json)
        raise typer.Exit(1) from error
    except ModuleNotFoundError as error:
        extra = extra_of(error.name or "")
        if extra is None:
            raise
        _show(missing_sentence("this command", (str(error.name),), extra), as_json=as_json)
        raise typer.Exit(1) from error
    except OSError as error:
        if error.filename is None:
            raise
        _show(f"{error.filename}: {error.strerror}", as_json=as_json)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        _say("thinwire: interrupted")
        raise typer.Exit(130) from None


@contextlib.contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Turn the failure to write what an option names into one sentence.

    Raises:
        UsageError: The operating system refuses.
    """
    try:
        yield
    except OSError as error:
        where = ", in a directory that exists" if isinstance(error, FileNotFoundError) else ""
        raise UsageError(f"{option} {path} cannot be written: {error.strerror}; name another path{where}") from error


def check_writable(option: str, path: Path) -> None:
    """Refuse a file that cannot be written before the work whose result it is to hold.

    Raises:
        UsageError: The operating system refuses.
    """
    is_new = not path.exists()
    with writing(option, path):
        path.open("ab").close()
        if is_new:
            path.unlink()


def _show(message: str, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"error": message}))
    _say(f"thinwire: {message}")


def _say(sentence: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it: the exit status is all that is left to say
        print(sentence, file=sys.stderr)
