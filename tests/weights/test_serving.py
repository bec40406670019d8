"""A server of weights gives away parts, and nothing else."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from thinwire.errors import UsageError
from thinwire.weights.parts import Name
from thinwire.weights.serving import weights_server

PART = str(Name("000001-00000000", 1, 0, "anchor", 0, 1))


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    store = tmp_path / "store"
    store.mkdir()
    (store / PART).write_bytes(bytes(range(256)) * 9000)
    (store / "secret").write_text("secret")
    (tmp_path / PART).write_text("outside")
    server = weights_server(store, "127.0.0.1", 0, None)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def get(url: str, method: str = "GET") -> bytes:
    with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=10) as answer:
        content: bytes = answer.read()
        return content


def test_parts_and_their_index_are_served(url: str) -> None:
    assert get(f"{url}/").decode() == f'<a href="{PART}">{PART}</a>'
    assert get(f"{url}/{PART}") == bytes(range(256)) * 9000
    assert get(f"{url}/{PART}", "HEAD") == b""


@pytest.mark.parametrize(
    "path", ["secret", f"../{PART}", f"%2e%2e/{PART}", f"{PART}?x", PART.replace("-00001.", "-00002.")]
)
def test_nothing_else_is(url: str, path: str) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(f"{url}/{path}")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_nothing_is_taken(url: str, method: str) -> None:
    with pytest.raises(urllib.error.HTTPError, match="501"):
        get(f"{url}/{PART}", method)
    assert get(f"{url}/{PART}") == bytes(range(256)) * 9000


def test_a_taken_port_is_said(url: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="choose another --host or --port"):
        weights_server(tmp_path, "127.0.0.1", int(url.rpartition(":")[2]), None)
