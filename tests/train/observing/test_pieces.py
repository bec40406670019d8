"""The parts of a model that a profile times: as many blocks as fit into memory."""

from __future__ import annotations

import pytest
import torch

from thinwire.errors import UsageError
from thinwire.profile import ModelPiece
from thinwire.spec import Factor, ModelSpec
from thinwire.train.environment import HOSTS_ON_CORES, LAB_HOSTS, num_cores, shares_cores
from thinwire.train.measuring.pieces import pieces
from thinwire.train.measuring.room import measure_room, rank_memory

GIB = 1 << 30


def found(model: ModelSpec, memory: int, seq: int = 2048) -> dict[str, ModelPiece]:
    made = pieces(model, Factor(local=2, nodes=2), seq=seq, micro_batch=1, dtype="bfloat16", memory=memory)
    return {piece.part: piece for piece in made}


def test_large_models_are_timed_with_fewer_blocks_where_memory_is_short() -> None:
    model = ModelSpec.preset("llama-7b")
    blocks = [found(model, size * GIB)["whole"].repeats for size in (80, 24, 16)]
    assert blocks == sorted(blocks, reverse=True)
    assert (blocks[0], blocks[-1] < 4) == (4, True)
    with pytest.raises(UsageError, match=r"a block of llama-7b with .* needs 1?\d\.\d+ GiB .* a rank has 5\.859 GiB"):
        found(model, 6000 << 20)
    assert found(model.with_(layers=2), 80 * GIB)["block"].repeats == 2


def test_parts_hold_what_is_timed_and_nothing_else() -> None:
    model = ModelSpec(layers=3, hidden=64, heads=4, ffn=128, vocab=1000, seq=32)
    parts = found(model, GIB, seq=32)
    numels = {}
    for part in ("block", "head", "embedding"):
        parameters, call = parts[part].make(torch.device("cpu"))
        call().sum().backward()
        numels[part] = sum(parameter.numel() for parameter in parameters)
    assert numels["embedding"] == 64 * 1000
    assert numels["head"] == 64 * 1000 + 64
    assert numels["block"] == 3 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64)
    parameters, loss = parts["plain"].make(torch.device("cpu"))
    loss().backward()
    assert sum(parameter.numel() for parameter in parameters) == sum(numels.values()), "the parts are the whole model"


def test_ranks_share_the_memory_of_their_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.delenv(LAB_HOSTS, raising=False)
    whole = rank_memory(cpu)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert rank_memory(cpu) == whole // 2 == measure_room(cpu).limit
    monkeypatch.setenv(LAB_HOSTS, "3")
    assert rank_memory(cpu) == whole // 6


def test_ranks_share_cores_where_they_are_more(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cores = torch.device("cpu"), num_cores()
    monkeypatch.setenv(LAB_HOSTS, "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(cores))
    for hosts, shared in (("1", False), ("2", True)):
        monkeypatch.setenv(HOSTS_ON_CORES, hosts)
        assert shares_cores(cpu) == shared
    assert not shares_cores(torch.device("cuda"))
