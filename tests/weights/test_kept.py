"""A file of weights is always that of a whole version."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.weights import differences, write_version

import thinwire as tw
from thinwire.errors import UsageError
from thinwire.weights.parts import Name, Piece, encode

RUN = "000001-00000000"
SIZE = 1 << 20
PIECES = [Piece("a", (SIZE,), "bfloat16", 0, SIZE), Piece("n", (), "int64", 0, 1)]


def values(version: int) -> dict[str, torch.Tensor]:
    """All of them say which version they are of."""
    return {"bfloat16": torch.full((SIZE,), float(version)).bfloat16(), "int64": torch.tensor([version])}


def publish(store: Path, version: int) -> None:
    write_version(store, version, PIECES, values)


def held(directory: Path) -> int:
    """The version that the file holds."""
    tensors = load_file(directory / "model.safetensors")
    version = int(tensors["n"])
    assert tensors["a"].equal(values(version)["bfloat16"])
    return version


CONFIG = {
    "model_type": "mixtral",
    **{"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"num_key_value_heads": 2, "vocab_size": 16, "num_local_experts": 3, "num_experts_per_tok": 1},
}


@pytest.mark.parametrize("architectures", [None, ["MixtralForCausalLM"]])
def test_experts_are_kept_as_files_of_transformers_have_them(
    tmp_path: Path, architectures: list[str] | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**CONFIG)).bfloat16()
    weights = model.state_dict()
    pieces = [Piece(name, tuple(value.shape), "bfloat16", 0, value.numel()) for name, value in weights.items()]
    joined = torch.cat([value.reshape(-1) for value in weights.values()])
    directory, config = tmp_path / "model", tmp_path / "model" / "config.json"
    subscriber = tw.Subscriber(str(tmp_path), directory)
    config.write_text(json.dumps({**CONFIG, "architectures": architectures}))
    for version in (1, 2):
        write_version(tmp_path, version, pieces, lambda version: {"bfloat16": joined * version})
        assert subscriber.update() == version
        model.load_state_dict({name: value * version for name, value in weights.items()})
        model.save_pretrained(tmp_path / "theirs")
        ours, theirs = (load_file(path / "model.safetensors") for path in (directory, tmp_path / "theirs"))
        assert "model.layers.0.block_sparse_moe.experts.2.w3.weight" in theirs
        assert differences(ours, theirs) == []
        model.load_state_dict(weights)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
        assert differences(loaded.state_dict(), subscriber.state_dict()) == []
        subscriber.close()
        (delta,) = tmp_path.glob("*delta*") if version == 2 else [None]
        nbytes = subscriber.nbytes
        subscriber = tw.Subscriber(str(tmp_path), directory)
        assert subscriber.version == version
        assert delta is None or nbytes == delta.stat().st_size  # it went on from its file
    subscriber.close()
    config.unlink()
    with contextlib.closing(tw.Subscriber(str(tmp_path), directory)) as subscriber:
        assert subscriber.version is None
        assert "config.json, or transformers, cuts the weights otherwise" in caplog.text
        config.write_text(json.dumps(CONFIG))
        monkeypatch.setitem(sys.modules, "transformers.core_model_loading", None)
        with pytest.raises(UsageError, match=r"hold every expert by itself.* install thinwire\[transformers\] here"):
            subscriber.update()


def test_a_subscriber_goes_on_from_its_file(tmp_path: Path) -> None:
    store, directory = tmp_path / "store", tmp_path / "model"
    publish(store, 1)
    subscriber = tw.Subscriber(str(store), directory)
    assert subscriber.update() == 1
    assert held(directory) == 1
    assert (directory / "model.safetensors").stat().st_mode & 0o777 == 0o644  # an engine's user may be another
    with pytest.raises(UsageError, match="another subscriber keeps"):
        tw.Subscriber(str(store), directory)
    subscriber.close()
    publish(store, 2)
    (delta,) = store.glob("*delta*")
    again = tw.Subscriber(str(store), directory)
    assert (again.run, again.version, again.step) == (RUN, 1, 1)
    assert again.update() == 2
    assert again.nbytes == delta.stat().st_size
    assert held(directory) == 2


def test_weights_that_came_under_inference_mode_take_the_next_version(tmp_path: Path) -> None:
    store, directory = tmp_path / "store", tmp_path / "model"
    publish(store, 1)
    with torch.inference_mode():
        subscriber = tw.Subscriber(str(store), directory)
        assert subscriber.update() == 1
        subscriber.close()
        again = tw.Subscriber(str(store), directory)  # reads the file
    publish(store, 2)
    assert [subscriber.update(), again.update()] == [2, 2]


def test_a_dtype_that_files_lack_is_followed_in_memory_only(tmp_path: Path) -> None:
    store, directory = tmp_path / "store", tmp_path / "model"
    store.mkdir()
    values = {"complex128": torch.tensor([1 + 2j, 3], dtype=torch.complex128)}
    part = encode(1, [Piece("freqs", (2,), "complex128", 0, 2)], None, values)
    (store / str(Name(RUN, 1, 0, "anchor", 0, 1))).write_bytes(part)
    subscriber = tw.Subscriber(str(store))
    assert subscriber.update() == 1
    assert subscriber.state_dict()["freqs"].equal(values["complex128"])
    with (
        contextlib.closing(tw.Subscriber(str(store), directory)) as keeper,
        pytest.raises(UsageError, match=r"freqs is torch\.complex128, which model\.safetensors cannot hold"),
    ):
        keeper.update()
    assert not (directory / "model.safetensors").exists()


def test_other_files_are_replaced_and_several_refused(tmp_path: Path) -> None:
    store, directory = tmp_path / "store", tmp_path / "model"
    publish(store, 1)
    directory.mkdir()
    for write in (
        lambda path: save_file({"x": torch.zeros(1)}, path),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(b""),
    ):
        write(directory / "model.safetensors")
        subscriber = tw.Subscriber(str(store), directory)
        assert subscriber.version is None
        assert subscriber.update() == 1
        assert held(directory) == 1
        subscriber.close()
    (directory / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(UsageError, match="readers take other files"):
        tw.Subscriber(str(store), directory)


def test_a_file_that_cannot_be_read_leaves_the_directory_free(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(OSError, match="device"):
        tw.Subscriber(str(tmp_path / "store"), tmp_path)
    (tmp_path / "model.safetensors").rmdir()
    assert tw.Subscriber(str(tmp_path / "store"), tmp_path).version is None


def test_a_full_disk_leaves_the_file_and_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, directory = tmp_path / "store", tmp_path / "model"
    publish(store, 1)
    subscriber = tw.Subscriber(str(store), directory)
    subscriber.update()
    publish(store, 2)
    (directory / ".model.safetensors.part").touch()  # in the way of the draft
    with pytest.raises(OSError, match=r"model\.safetensors\.part"):
        subscriber.update()
    assert held(directory) == 1
    (directory / ".model.safetensors.part").unlink()
    assert subscriber.update() == 2
    assert held(directory) == 2


FOLLOW = """
import sys, thinwire as tw
subscriber = tw.Subscriber(sys.argv[1], sys.argv[2])
print("ready", flush=True)
while True:
    subscriber.follow(interval=0.001)
"""


@pytest.mark.slow
def test_a_subscriber_that_is_killed_leaves_a_whole_version(tmp_path: Path) -> None:
    store, directory = tmp_path / "store", tmp_path / "model"
    version = 1
    publish(store, version)
    first = tw.Subscriber(str(store), directory)
    first.update()
    first.close()
    for life in range(2):
        with subprocess.Popen(
            [sys.executable, "-c", FOLLOW, str(store), str(directory)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            for _ in range(3):
                version += 1
                publish(store, version)
                time.sleep(0.004 + 0.006 * life)
            process.send_signal(signal.SIGKILL)
        assert 1 <= held(directory) <= version
    assert tw.Subscriber(str(store), directory).update() in (version, None)
    assert held(directory) == version
    assert sorted(path.name for path in directory.iterdir()) == [".model.safetensors.lock", "model.safetensors"]


@pytest.mark.parametrize("name", [".model.safetensors.part/.tmpXyz", ".model.safetensors.part"])
def test_what_a_killed_writer_leaves_is_removed(tmp_path: Path, name: str) -> None:
    """safetensors writes to a file with a name of its own; the draft of earlier releases was a file."""
    store, directory = tmp_path / "store", tmp_path / "model"
    publish(store, 1)
    (directory / name).parent.mkdir(parents=True, exist_ok=True)
    (directory / name).write_bytes(bytes(100))
    assert tw.Subscriber(str(store), directory).update() == 1
    assert sorted(path.name for path in directory.iterdir()) == [".model.safetensors.lock", "model.safetensors"]
