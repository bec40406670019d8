"""The engine of vLLM's weight transfer, called as a worker of vLLM calls it.

By the double of ``tests/support/frameworks/vllm.py``, as vLLM does not install on a machine without a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.support.frameworks.vllm import Model, Worker, install
from tests.support.weights import write_version

from thinwire.errors import UsageError
from thinwire.weights.parts import Piece

PIECES = [Piece(f"{name}.weight", (2, 4), "float32", 0, 8) for name in "qk"]


def values(version: int) -> dict[str, torch.Tensor]:
    return {"float32": torch.arange(16.0) + version}


def publish(store: Path, version: int) -> None:
    write_version(store, version, PIECES, values)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    install(monkeypatch)
    worker = Worker()
    worker.start()
    yield worker
    worker.engine.shutdown()


def holds(worker: Worker, version: int) -> bool:
    assert isinstance(worker.model, Model)
    return worker.model.fused.detach().equal(values(version)["float32"].view(4, 4))


def follow(worker: Worker, store: Path) -> None:
    worker.engine.init_transfer_engine(worker.engine.parse_init_info({"store": str(store)}))


def test_workers_load_the_version_that_they_are_told(worker: Worker, tmp_path: Path) -> None:
    follow(worker, tmp_path)
    for version in (1, 2, 3):
        publish(tmp_path, version)
    worker.update(version=2)
    assert holds(worker, 2)
    worker.update(version=3)
    worker.update(version=3)
    assert holds(worker, 3)


def test_models_get_experts_as_files_of_transformers_have_them(worker: Worker, tmp_path: Path) -> None:
    config = pytest.importorskip("transformers").Qwen3MoeConfig(num_hidden_layers=1)
    name, given = "model.layers.0.mlp.experts", dict[str, list[float]]()
    pieces = [Piece(f"{name}.gate_up_proj", (2, 4, 1), "float32", 0, 8), Piece("q", (8,), "float32", 0, 8)]
    write_version(tmp_path, 1, pieces, values)
    follow(worker, tmp_path)
    worker.engine.model_config.hf_config = config
    worker.model.load_weights = lambda weights: given.update({key: value.flatten().tolist() for key, value in weights})
    worker.update(version=1)
    assert given == {
        f"{name}.0.gate_proj.weight": [1.0, 2.0],
        f"{name}.0.up_proj.weight": [3.0, 4.0],
        f"{name}.1.gate_proj.weight": [5.0, 6.0],
        f"{name}.1.up_proj.weight": [7.0, 8.0],
        "q": [9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 16.0],
    }


def test_versions_are_read_ahead(worker: Worker, tmp_path: Path) -> None:
    publish(tmp_path, 1)
    follow(worker, tmp_path)
    deadline = time.monotonic() + 30
    while not worker.engine._subscriber._fetched:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (anchor,) = tmp_path.glob("*anchor*")
    anchor.write_bytes(b"")
    worker.update(version=1)
    assert holds(worker, 1)


def test_a_version_that_does_not_come_leaves_the_model(worker: Worker, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="follows no store"):
        worker.update(version=1)
    publish(tmp_path, 1)
    follow(worker, tmp_path)
    worker.update(version=1)
    with pytest.raises(UsageError, match=r"version = 7 has not come within 0.3 s, and 1 is held"):
        worker.update(version=7, timeout=0.3)
    assert holds(worker, 1)
    assert not worker.model.reloading
