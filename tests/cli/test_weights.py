"""Weights on the command line: a server, and followers that keep a model."""

from __future__ import annotations

import contextlib
import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.support.weights import write_version
from typer.testing import CliRunner, Result

from thinwire.cli.main import app
from thinwire.errors import UsageError
from thinwire.integrations.sglang import load_from_disk
from thinwire.weights.parts import Piece

PIECES = [Piece("a", (64,), "bfloat16", 0, 64)]


def values(version: int) -> dict[str, torch.Tensor]:
    return {"bfloat16": torch.full((64,), float(version)).bfloat16()}


def publish(store: Path, version: int) -> None:
    write_version(store, version, PIECES, values)


def holds(model: Path, version: int) -> bool:
    return load_file(model / "model.safetensors")["a"].equal(values(version)["bfloat16"])


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@contextlib.contextmanager
def running(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A command that runs until it is stopped."""
    command = [sys.executable, "-m", "thinwire.cli.main", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.communicate(timeout=30)


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


class Engine(http.server.BaseHTTPRequestHandler):
    """What SGLang 0.5.23 answers at /update_weights_from_disk. It refuses the first request."""

    requests: list[dict[str, str]]

    def do_POST(self) -> None:
        self.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        loads = self.path == "/update_weights_from_disk" and len(self.requests) > 1
        answer = json.dumps({"success": loads, "message": "busy", "num_paused_requests": 0}).encode()
        self.send_response(HTTPStatus.OK if loads else HTTPStatus.BAD_REQUEST)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.mark.slow
def test_a_follower_over_tls_lets_an_engine_load_every_version(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    store, model, keys = tmp_path / "store", tmp_path / "model", tmp_path / "keys"
    store.mkdir()
    (store / "secret").write_text("not a part")
    publish(store, 1)
    assert invoke("keys", keys).exit_code == 0
    engine = type("Refusing", (Engine,), {"requests": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), engine) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with running("serve-weights", store, "--port", 0, "--keys", keys) as serving:
            url = line(serving).split()[-1]
            stranger = invoke("follow", url, "--out", tmp_path / "stranger", "--once")
            assert stranger.exit_code == 1
            assert "cannot be followed" in stranger.stderr
            sglang = f"http://127.0.0.1:{server.server_port}"
            with running("follow", url, "--keys", keys, "--out", model, "--sglang", sglang, "--json") as follower:
                nbytes = next(store.glob("*anchor*")).stat().st_size
                said = {"run": "000001-00000000", "version": 1, "step": 1, "bytes": nbytes}
                assert json.loads(line(follower)) == said
                publish(store, 2)
                assert json.loads(line(follower))["version"] == 2
                assert holds(model, 2)
                publish(store, 3)
                assert json.loads(line(follower))["version"] == 3
        server.shutdown()
    told = [request["weight_version"] for request in engine.requests]
    assert told[0] == "000001-00000000.1"
    assert told[-1] in ("000001-00000000.2", "000001-00000000.3")
    assert {request["model_path"] for request in engine.requests} == {str(model)}


def test_once(tmp_path: Path) -> None:
    store, model = tmp_path / "store", tmp_path / "model"
    store.mkdir()
    assert "no complete version yet" in invoke("follow", store, "--out", model, "--once").stderr
    publish(store, 1)
    first = invoke("follow", store, "--out", model, "--once")
    assert first.output.startswith("version 1, of step 1: ")
    assert holds(model, 1)
    assert invoke("follow", store, "--out", model, "--once").output == "version 1, of step 1: 0 B\n"


def test_a_server_without_a_scheme_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot be reached: unknown url type.*give its address, as http://"):
        load_from_disk("nonsense", tmp_path, "1")
