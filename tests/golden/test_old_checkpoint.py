"""Checkpoints of thinwire 0.1.0 load, and today's have the same form.

Three ranks of 0.1.0 wrote ``checkpoint-0.1.0``: four vectors of different types, cut unevenly, some ranks without any
element of a vector.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.support.alone import Alone
from torch.distributed.checkpoint import HuggingFaceStorageReader

from thinwire.checkpoint.storage import Chunk, ShardedVector
from thinwire.checkpoint.store import open_checkpoint, read, verify, write

OLD = Path(__file__).with_name("checkpoint-0.1.0")
VALUES = {"step": 7, "loss": 2.5, "names": ["a", "b"]}


def contents() -> dict[str, torch.Tensor]:
    return {
        "weights": torch.arange(30.0) / 8 - 1,
        "moments": (torch.arange(30.0) / 4).bfloat16(),
        "bits": torch.arange(16, dtype=torch.uint8) * 17,
        "steps": torch.arange(5) ** 3,
    }


def header(file: Path) -> dict[str, object]:
    raw = file.read_bytes()
    described: dict[str, object] = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    return described


def test_a_checkpoint_of_0_1_loads_under_other_cuts() -> None:
    verify(OLD)
    assert verify(OLD, checksums=False).values == VALUES
    truth = contents()
    cuts = {"weights": (0, 5, 30), "moments": (0, 29, 30), "bits": (0, 16), "steps": (0, 1, 2, 5)}
    loaded = {key: torch.zeros_like(vector) for key, vector in truth.items()}
    vectors = {
        key: ShardedVector(
            len(vector), tuple(Chunk(a, vector[a:b]) for a, b in zip(cuts[key], cuts[key][1:], strict=False))
        )
        for key, vector in loaded.items()
    }
    read(open_checkpoint(OLD), vectors, control=Alone())
    assert all(torch.equal(loaded[key], truth[key]) for key in truth)


@pytest.mark.parametrize("file", sorted(path.name for path in OLD.glob("*.safetensors")))
def test_what_is_written_today_has_the_same_form(tmp_path: Path, file: str) -> None:
    manifest = verify(OLD)
    number = [entry.name for entry in manifest.files].index(file)
    spans = {key: span for key, (_, span) in manifest.contents()[number].items()}
    truth = contents()
    vectors = {
        key: ShardedVector(s.length, (Chunk(0, truth[key][s.offset :][: s.length]),)) for key, s in spans.items()
    }
    write(tmp_path / "c", vectors, VALUES, control=Alone())
    (written,) = (tmp_path / "c").glob("*.safetensors")
    assert written.name == "shard-00001-model-00001-of-00001.safetensors"
    then, now = header(OLD / file), header(written)
    for described in (then, now):
        metadata = described["__metadata__"]
        assert isinstance(metadata, dict)
        metadata["DCP_SHARDING_INFO"] = json.loads(metadata["DCP_SHARDING_INFO"])
        for entry in metadata["DCP_SHARDING_INFO"].values():
            entry["saved_offsets"] = [0]  # the vector that is written now begins where the old file's span began
    assert then == now
    old, new = (OLD / file).read_bytes(), written.read_bytes()
    num_bytes = sum(span.length * truth[key].itemsize for key, span in spans.items())
    assert old[-num_bytes:] == new[-num_bytes:]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # there is one process
def test_distributed_checkpoint_loads_todays_files(tmp_path: Path) -> None:
    truth = {key: vector for key, vector in contents().items() if key != "steps"}
    vectors = {
        key: ShardedVector(len(vector), (Chunk(0, vector[:9]), Chunk(9, vector[9:]))) for key, vector in truth.items()
    }
    write(tmp_path / "c", vectors, VALUES, control=Alone())
    assert len(list((tmp_path / "c").glob("*.safetensors"))) == 2
    loaded = {key: torch.zeros_like(vector) for key, vector in truth.items()}
    dcp.load(loaded, storage_reader=HuggingFaceStorageReader(str(tmp_path / "c")), no_dist=True)
    assert all(torch.equal(loaded[key], truth[key]) for key in truth)
