"""Nothing wrong is ever applied by a subscriber."""

from __future__ import annotations

import contextlib
import functools
import http.server
import random
import shutil
import struct
import threading
import time
import zlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tests.support.ranks import on_ranks
from tests.support.weights import differences
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import thinwire as tw
from thinwire.errors import UsageError, WireError
from thinwire.sharding.memory.local import Slice
from thinwire.weights.parts import Name, Piece, complete, decode, encode, take

RUN = "000001-00000000"
PIECES = (Piece("a", (4, 4), "bfloat16", 0, 16), Piece("n", (), "int64", 0, 1))


def values(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"bfloat16": torch.randn(16, generator=generator).bfloat16(), "int64": torch.tensor([seed])}


def write(directory: Path, version: int, parent: int, content: bytes, run: str = RUN) -> Path:
    kind = "delta" if parent else "anchor"
    path = directory / str(Name(run, version, parent, kind, 0, 1))  # type: ignore[arg-type]
    path.write_bytes(content)
    return path


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """An anchor and two deltas."""
    write(tmp_path, 1, 0, encode(1, PIECES, None, values(1)))
    write(tmp_path, 2, 1, encode(2, PIECES, values(1), values(2)))
    write(tmp_path, 3, 2, encode(3, PIECES, values(2), values(3)))
    return tmp_path


def held(subscriber: tw.Subscriber) -> dict[str, torch.Tensor]:
    state = subscriber.state_dict()
    return {"bfloat16": state["a"].view(-1), "int64": state["n"].view(1)} if state else {}


def assert_holds(subscriber: tw.Subscriber, seed: int | None) -> None:
    assert subscriber.version == seed
    assert not differences(held(subscriber), values(seed) if seed else {})


def test_every_byte_of_a_part_counts(store: Path) -> None:
    (path,) = store.glob("*000000003.000000002*")
    content = path.read_bytes()
    rng = random.Random(0)
    for at in range(0, len(content), 3):
        damaged = bytearray(content)
        damaged[at] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        subscriber = tw.Subscriber(str(store))
        assert subscriber.update() == 2
        assert_holds(subscriber, 2)
        with pytest.raises(WireError):
            subscriber.update()
        assert_holds(subscriber, 2)
    for end in range(len(content)):
        with pytest.raises(WireError):
            decode(content[:end])


def test_a_delta_of_other_weights_is_refused(store: Path) -> None:
    subscriber = tw.Subscriber(str(store))
    subscriber.update()
    other, later = values(3), values(3)
    other["bfloat16"][2], later["bfloat16"][2] = 2.0, 2.0
    later["bfloat16"].view(torch.int16)[3] += 1  # as training does, and so short as to say nothing of the rest
    write(store, 4, 3, encode(4, PIECES, other, later))
    with pytest.raises(WireError):
        subscriber.update()
    assert_holds(subscriber, 3)
    write(store, 5, 0, encode(5, PIECES, None, values(5)))
    assert subscriber.update() == 5
    assert_holds(subscriber, 5)


def test_versions_out_of_order_wait_for_those_before(store: Path) -> None:
    (second,) = store.glob("*000000002.000000001*")
    aside = store / "aside"
    second.rename(aside)
    subscriber = tw.Subscriber(str(store))
    assert subscriber.update() == 1
    assert subscriber.update() is None
    aside.rename(second)
    assert subscriber.update() == 3
    assert_holds(subscriber, 3)


def stepped(number: int) -> dict[str, torch.Tensor]:
    """Weights after so many steps, of which each changes a few values by little."""
    bits = torch.randn(4096, generator=torch.Generator().manual_seed(0)).bfloat16().view(torch.int16)
    for step in range(number):
        bits[step::61] += 1
    return {"bfloat16": bits.view(torch.bfloat16)}


@pytest.fixture
def ladder(tmp_path: Path) -> Path:
    """An anchor, 16 deltas after it, and the deltas that fold eight of them."""
    pieces = [Piece("a", (64, 64), "bfloat16", 0, 4096)]
    write(tmp_path, 1, 0, encode(1, pieces, None, stepped(1)))
    for version in range(2, 18):
        write(tmp_path, version, version - 1, encode(version, pieces, stepped(version - 1), stepped(version)))
    for version in (9, 17):
        write(tmp_path, version, version - 8, encode(version, pieces, stepped(version - 8), stepped(version)))
    return tmp_path


def test_who_is_behind_takes_folded_deltas(ladder: Path) -> None:
    subscriber = tw.Subscriber(str(ladder))
    assert subscriber.update(upto=6) == 6
    begun = subscriber.nbytes
    assert subscriber.update() == 17
    assert subscriber.state_dict()["a"].view(-1).equal(stepped(17)["bfloat16"])
    names = [(Name.read(path.name), path.stat().st_size) for path in ladder.iterdir()]
    singles = sum(size for name, size in names if name and name.version > 6 and name.version - name.parent == 1)
    assert subscriber.nbytes - begun <= 0.7 * singles
    for path in ladder.glob("*.000000009.delta*"):
        path.write_bytes(path.read_bytes()[:-1])
    for path in ladder.glob("*.000000001.delta*"):
        path.write_bytes(path.read_bytes()[:-1])
    late = tw.Subscriber(str(ladder))
    late.update()
    assert late.version == 1  # both deltas from it are damaged


def test_where_a_folded_delta_is_damaged_single_ones_lead_on(ladder: Path) -> None:
    for path in ladder.glob("*.000000001.delta*"):
        if "000000009.000000001" in path.name:
            path.write_bytes(path.read_bytes()[:-1])
    subscriber = tw.Subscriber(str(ladder))
    assert subscriber.update() == 17
    assert subscriber.state_dict()["a"].view(-1).equal(stepped(17)["bfloat16"])


def test_a_version_that_leads_nowhere_is_left_by_an_anchor(store: Path) -> None:
    """As if its publisher had taken it for failed: later ones do not begin from it."""
    subscriber = tw.Subscriber(str(store))
    assert subscriber.update() == 3
    write(store, 4, 2, encode(4, PIECES, values(2), values(4)))
    assert subscriber.update() == 4
    assert_holds(subscriber, 4)


@pytest.mark.parametrize("reads_ahead", [False, True])
def test_a_store_that_was_emptied_is_followed_again(
    store: Path, reads_ahead: bool, caplog: pytest.LogCaptureFixture
) -> None:
    write(store, 4, 0, encode(4, PIECES, None, values(4)), run="000002-00000000")
    subscriber = tw.Subscriber(str(store))
    assert subscriber.update() == 4
    write(store, 5, 4, encode(5, PIECES, values(4), values(5)), run="000002-00000000")
    subscriber.fetch()
    assert subscriber.update(4) is None  # while anything of its run is left, that is followed
    for path in store.glob("000002-*"):
        path.unlink()
    for _ in range(2):
        if reads_ahead:
            subscriber.fetch()
        assert subscriber.update(2, fetched=reads_ahead) in (2, None)
        assert_holds(subscriber, 2)
    assert subscriber.update() == 3
    assert caplog.text.count("000002-00000000: following 000001") == 1


def test_a_run_that_is_taken_while_the_store_is_listed_is_not_given_up(store: Path) -> None:
    subscriber = tw.Subscriber(str(store))
    names = subscriber._store.names

    def late() -> list[Name]:
        """An answer of before a run began, which is taken by another thread before the answer is read."""
        answer = names()
        write(store, 4, 0, encode(4, PIECES, None, values(4)), run="000002-00000000")
        with mock.patch.object(subscriber._store, "names", names):
            assert subscriber.update() == 4
        return answer

    with mock.patch.object(subscriber._store, "names", late):
        subscriber.fetch()
    assert subscriber.update(fetched=True) is None
    assert_holds(subscriber, 4)


def test_what_was_fetched_is_not_read_again(store: Path) -> None:
    subscriber = tw.Subscriber(str(store))
    subscriber.fetch()
    assert subscriber.version is None
    names = [path.name for path in store.iterdir()]
    for name in names:
        (store / name).write_bytes(b"")
    assert subscriber.update(2, fetched=True) == 2
    assert subscriber.update() == 3
    assert_holds(subscriber, 3)
    assert not subscriber._fetched
    write(store, 4, 3, encode(4, PIECES, values(3), values(4)))
    assert subscriber.update(fetched=True) is None
    subscriber.fetch()
    assert [name.version for name in subscriber._fetched] == [4]
    assert subscriber.update(fetched=True) == 4
    assert_holds(subscriber, 4)


def test_what_was_fetched_is_kept_as_long_as_the_store_keeps_it(store: Path) -> None:
    subscriber = tw.Subscriber(str(store))
    for version in (3, 6, 9):
        subscriber.fetch()
        assert max(name.version for name in subscriber._fetched) == version
        for path in store.glob("*.weights"):
            path.unlink()
        write(store, version + 3, 0, encode(version + 3, PIECES, None, values(version + 3)))
    assert len(subscriber._fetched) == 1
    subscriber.fetch()
    assert subscriber.update(fetched=True) == 12
    assert_holds(subscriber, 12)


def test_an_interrupted_copy_leaves_no_version(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subscriber = tw.Subscriber(str(store))
    assert subscriber.update(upto=1) == 1
    write_piece = Piece.write

    def interrupted(piece: Piece, tensor: torch.Tensor, values: torch.Tensor) -> None:
        if piece.name == "n":
            raise KeyboardInterrupt
        write_piece(piece, tensor, values)

    with monkeypatch.context() as patch:
        patch.setattr(Piece, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            subscriber.update()
    assert subscriber.version is None
    assert subscriber.update() == 3
    assert_holds(subscriber, 3)


def test_incomplete_versions_are_not_there() -> None:
    parts = [Name(RUN, 1, 0, "anchor", part, 3) for part in (0, 2)]
    assert complete(parts) == {}
    assert list(complete([*parts, Name(RUN, 1, 0, "anchor", 1, 3)])) == [(RUN, 1, 0, "anchor")]
    for text in ("", "x.weights", str(parts[0]) + "x", str(Name(RUN, 1, 1, "delta", 0, 1)), f"{RUN}.1.0.anchor.0-1"):
        assert Name.read(text) is None
    assert Name.read(str(parts[0])) == parts[0]


def test_a_directory_that_is_not_there_yet_is_waited_for(tmp_path: Path, store: Path) -> None:
    subscriber = tw.Subscriber(str(tmp_path / "later"))
    assert subscriber.follow(0.0) is None
    with pytest.raises(UsageError, match="no complete version"):
        subscriber.load_into(nn.Linear(1, 1))
    threading.Timer(0.3, lambda: shutil.copytree(store, tmp_path / "later", ignore=lambda *_: {"later"})).start()
    assert subscriber.follow(10.0, interval=0.05) in (1, 2, 3)


class Slow(http.server.SimpleHTTPRequestHandler):
    """Takes its time over every answer."""

    def copyfile(self, source: Any, outputfile: Any) -> None:
        time.sleep(0.1)
        super().copyfile(source, outputfile)


def test_a_store_is_read_over_http_however_long_it_takes(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = pytest.importorskip("aiohttp.client")
    monkeypatch.setattr(client, "DEFAULT_TIMEOUT", client.ClientTimeout(total=0.05))
    handler = functools.partial(Slow, directory=str(store))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        subscriber = tw.Subscriber(f"http://127.0.0.1:{server.server_port}")
        assert subscriber.update() == 3
        assert_holds(subscriber, 3)
        server.shutdown()


def published(directory: Path, module: nn.Module) -> tw.Subscriber:
    """A subscriber that holds the weights of a module."""
    state = module.state_dict()
    pieces = [Piece(name, tuple(value.shape), "float32", 0, value.numel()) for name, value in state.items()]
    joined = torch.cat([value.reshape(-1) for value in state.values()])
    write(directory, 1, 0, encode(1, pieces, None, {"float32": joined}))
    subscriber = tw.Subscriber(str(directory))
    subscriber.update()
    return subscriber


def test_weights_load_into_a_module_of_any_dtype(tmp_path: Path) -> None:
    module = nn.Linear(3, 2)
    subscriber, twin = published(tmp_path, module), nn.Linear(3, 2).bfloat16()
    subscriber.load_into(twin)
    assert torch.equal(twin.weight, module.weight.bfloat16())
    subscriber.load_into(torch.compile(twin, backend="eager"))
    with pytest.raises(UsageError, match="differ in"):
        subscriber.load_into(nn.Linear(3, 2, bias=False))


class Counting(nn.Linear):
    """Has extra state."""

    seen = 7

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}


def test_extra_state_stays_as_it_is(tmp_path: Path) -> None:
    module, counting = nn.Linear(3, 2), Counting(3, 2)
    published(tmp_path, module).load_into(counting)
    assert torch.equal(counting.weight, module.weight)


def tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = module[0].weight
    return module


@pytest.mark.parametrize(
    ("made", "module", "problem"),
    [
        (nn.Linear(4, 1), nn.Linear(4, 3), r"weight \(\[3, 4\] in the module, \[1, 4\] in the weights\)"),
        (nn.PReLU(1), nn.PReLU(8), r"differ in weight \(\[8\] in the module"),
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), tied(), r"differ in 1\.weight \(tied to 0\.weight"),
        (nn.Linear(4, 4), nn.Linear(4, 4, device="meta"), "meta device"),
    ],
    ids=["rows", "slopes", "tied", "meta"],
)
def test_a_module_of_another_architecture_stays_as_it_is(
    tmp_path: Path, made: nn.Module, module: nn.Module, problem: str
) -> None:
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(UsageError, match=problem):
        published(tmp_path, made).load_into(module)
    assert all(value.is_meta or value.equal(before[name]) for name, value in module.state_dict().items())


@on_ranks(1)
def test_expanded_buffers_load_and_shares_of_others_are_refused(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("wide", torch.ones(1).expand(3, 2))
    subscriber = published(tmp_path, module)
    module.wide[:1, :1] = 0.0
    subscriber.load_into(module)
    assert torch.equal(module.wide, torch.ones(3, 2))
    mesh = init_device_mesh("cpu", (1,))
    module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, [Shard(0)]))
    with pytest.raises(UsageError, match=r"weight of the module is a DTensor, and load_into\(\) writes whole tensors"):
        subscriber.load_into(module)


def test_tensors_without_elements_need_not_be_published(tmp_path: Path) -> None:
    made, module = nn.Linear(4, 4), nn.Linear(4, 4)
    module.register_buffer("none", torch.zeros(0, 4))
    published(tmp_path, made).load_into(module)
    assert module.weight.equal(made.weight)


def test_tied_weights_load_from_one_of_their_names(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    write(tmp_path, 1, 0, encode(1, [Piece("0.weight", (3, 3), "float32", 0, 9)], None, {"float32": torch.ones(9)}))
    subscriber = tw.Subscriber(str(tmp_path))
    subscriber.update()
    with pytest.raises(UsageError, match=r"differ in 1\.weight"):
        subscriber.load_into(module)
    module[1].weight = module[0].weight
    subscriber.load_into(module)
    assert module[1].weight.equal(torch.ones(3, 3))


def test_messages_that_lie_about_their_length_are_refused() -> None:
    with pytest.raises(WireError, match="are not 3 values"):
        take("float32", memoryview(b"1234"), 3, None)
    with pytest.raises(WireError, match="are not 3000000000 values"):
        take("bfloat16", memoryview(b"1234"), 3_000_000_000, None)
    with pytest.raises(WireError, match="other than 0 and 1"):
        take("bool", memoryview(b"\0\1\7"), 3, None)
    step, pieces, messages = decode(encode(9, PIECES, None, values(1)))
    assert (step, pieces) == (9, PIECES)
    assert set(messages) == {"bfloat16", "int64"}


@pytest.mark.parametrize("store", ["nonsense://x", "", __file__])
def test_a_store_of_no_known_kind_is_refused(store: str) -> None:
    with pytest.raises(UsageError, match="give a directory"):
        tw.Subscriber(store)


@pytest.mark.parametrize(
    "piece",
    [
        Piece("a", (4,), "float32", -2, 4),
        Piece("a", (0, 1 << 40, 1 << 40), "float32", 0, 0),
        Piece("a", (0, 1 << 80), "float32", 0, 0),
        Piece("a", (4,), "float32", 2, 4),
        Piece("a", (-4,), "float32", 0, 0),
        Piece("a", (4,), "float32", 0, 4, Slice(0, 2, 0)),
        Piece("a", (4,), "float32", 0, 1, Slice(0, 3, 0)),
        Piece("a", (4,), "float32", 0, 1, Slice(1, 1, 0)),
        Piece("a", (4,), "float32", 0, 0, Slice(0, 0, -1)),
    ],
)
def test_pieces_of_no_tensor_are_refused(piece: Piece) -> None:
    with pytest.raises(WireError, match="not those that its head names"):
        decode(encode(1, [piece], None, {"float32": torch.zeros(4)}))


@pytest.mark.parametrize("dtype", ["nn", "save", "nonsense", "quint8", "uint4"])
def test_dtypes_of_no_tensor_are_refused(dtype: str) -> None:
    with pytest.raises(WireError, match=f"of dtype '{dtype}'"):
        decode(encode(1, [], None, {dtype: torch.zeros(0)}))


@pytest.mark.parametrize("shape", [(5,), (1 << 60,)])
def test_anchors_with_holes_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    write(tmp_path, 1, 0, encode(1, [Piece("a", shape, "float32", 0, 4)], None, {"float32": torch.zeros(4)}))
    with pytest.raises(WireError, match="an anchor holds 4 of"):
        tw.Subscriber(str(tmp_path)).update()


def test_parts_with_true_checksums_of_false_contents_raise_nothing_else(store: Path) -> None:
    (path,) = store.glob("*000000003.000000002*")
    content, rng = path.read_bytes(), random.Random(0)
    front = struct.calcsize("<4sIQ")
    for _ in range(400):
        rest = bytearray(content[front:])
        for _ in range(rng.choice((1, 1, 2, 8))):
            rest[rng.randrange(len(rest))] = rng.randrange(256)
        head = struct.unpack("<4sIQ", content[:front])[2] + rng.choice((0, 0, 0, -1, 1))
        path.write_bytes(struct.pack("<4sIQ", b"TWW1", zlib.crc32(rest), head) + rest)
        subscriber = tw.Subscriber(str(store))
        with contextlib.suppress(WireError):
            subscriber.update()
        assert subscriber.version in (2, 3)
