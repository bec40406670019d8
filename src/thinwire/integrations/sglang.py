"""SGLang: a running server loads the weights that a subscriber keeps in a directory.

Written against SGLang 0.5.23. An engine in this process takes them without a directory:
``subscriber.load_by(lambda weights: engine.update_weights_from_tensor(list(weights)))``.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Final

from thinwire.errors import UsageError

_LONGEST: Final = 600.0
"""Seconds that a server may take to read a model."""


def load_from_disk(url: str, directory: str | Path, version: str) -> None:
    """Let a server load the model in a directory, which it reaches under the same path.

    Args:
        url: The server, as ``"http://localhost:30000"``.
        directory: Directory of the model.
        version: What the server then calls the weights in its answers, as ``weight_version``.

    Raises:
        UsageError: It is not there, or has not loaded them.
    """
    said = json.dumps({"model_path": str(Path(directory).absolute()), "weight_version": version}).encode()
    where = f"{url.rstrip('/')}/update_weights_from_disk"
    try:
        request = urllib.request.Request(where, said, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=_LONGEST) as answer:
            answer.read()
    except urllib.error.HTTPError as error:
        raise UsageError(f"{where} has not loaded version {version}: {_reason(error)}") from error
    except (OSError, ValueError, HTTPException) as error:
        raise UsageError(
            f"sglang = {url!r} cannot be reached: {error}; give its address, as http://localhost:30000"
        ) from error


def _reason(error: urllib.error.HTTPError) -> str:
    text = error.read(4096).decode(errors="replace")
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return f"{error.code} {error.reason}"
