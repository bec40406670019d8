"""A rank's side of its gateway: starts the process and asks it to forward."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Final

from thinwire.collectives.gateway.keys import Keys
from thinwire.errors import CollectiveError, UsageError

_PROGRAM: Final = Path(__file__).with_name("process.py")  # not imported: it brings asyncio


class GatewayRefusedError(UsageError):
    """The gateway of another rank does not let this one in."""


class Gateway:
    """The gateway of this rank, a process that ends with it.

    Raises:
        UsageError: The keys cannot be used.
    """

    def __init__(self, keys: Keys, job: str, world: int) -> None:
        self._lock = threading.Lock()
        # A session of its own: signals of the terminal are meant for the rank.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        answer = self._ask("start", certificate=str(keys.certificate), key=str(keys.key), job=job, world=world)
        if "error" in answer:
            self.close()
            raise UsageError(
                f"cluster.keys = {keys.directory} cannot be used ({answer['error']}); make new ones: thinwire keys DIR"
            )

    def open(self, address: str, port: int, *, inside: str, store: int = 0) -> int:
        """Listen at an address for the gateways of other ranks; returns the port. ``port`` 0 is any. ``inside`` is this
        rank's loopback address, whose ports may be asked for, and ``store`` the port of the job's store on 127.0.0.1, 0
        if another rank hosts it.

        Raises:
            OSError: It cannot listen there.
        """
        answer = self._ask("open", address=address, port=port, inside=inside, store=store)
        if "error" in answer:
            raise OSError(0, answer["error"])
        return int(answer["port"])

    def reach(self, host: str, port: int, patience: float) -> str:
        """Wait for at most ``patience`` seconds until another rank's gateway answers; returns the address by which this
        host reaches it.

        Raises:
            GatewayRefusedError: It has other keys, or belongs to another job.
            TimeoutError: It does not answer.
        """
        answer = self._ask("reach", host=host, port=port, patience=patience)
        if "refused" in answer:
            raise GatewayRefusedError(_REFUSALS[answer["refused"]])
        if "error" in answer:
            raise TimeoutError(answer["error"])
        return str(answer["address"])

    def listen(self, at: str, host: str, port: int, target: int) -> int:
        """Forward connections to the loopback address ``at`` to a port of another rank, 0 for the job's store, by the
        gateway at ``host`` and ``port``; returns the port to connect to.

        Raises:
            CollectiveError: The gateway cannot listen.
        """
        answer = self._ask("listen", at=at, host=host, port=port, target=target)
        if "error" in answer:
            raise CollectiveError(f"this rank's gateway cannot listen at {at}: {answer['error']}")
        return int(answer["port"])

    def close(self) -> None:
        """Let the process end, after its last bytes."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with contextlib.suppress(OSError):
            stdin.write(b'{"do": "end"}\n')  # children of this process may hold the pipe open
            stdin.close()
        stdout.close()
        self._process.wait()

    def _ask(self, action: str, **arguments: Any) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with self._lock:
            try:
                stdin.write(json.dumps({"do": action, **arguments}).encode() + b"\n")
                stdin.flush()
                line = stdout.readline()
            except (OSError, ValueError) as error:
                raise CollectiveError(f"this rank's gateway has ended: {error}") from error
        if not line:
            raise CollectiveError(f"this rank's gateway has ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


_REFUSALS: Final = {
    "keys": "the keys there are others, or have expired; copy one directory made by `thinwire keys` to all hosts",
    "program": "another program, or a rank without keys, answers there; give all ranks the same cluster.keys",
    "job": "a rank of another job answers there; choose another port",
    "port": "a rank answers there that is not rank 0; see whether all ranks got the same address",
}
