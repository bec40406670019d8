"""Measures what publishing costs a trainer, and what a version costs a receiver, over links of 200 Mbit/s.

Two hosts train a small Llama together. The first one serves what both publish after every step, over the link on which
it also exchanges gradients, and a third host follows. Publishing is on for some steps and off for as many, in turn.

- *Step*: median seconds of a step with publishing, and without, and the ratio of all seconds. The ratio of the first
  rank's processor time, its publishing included, does not depend on what else runs on the machine.
- *Pause*: of a receiver that reads ahead while it generates: taking a version, and copying it into a module. Beside it
  the same of parts that lie in memory, which is applying and nothing else, and without reading ahead.

    thinwire lab --nodes 3 --ranks 1 --bandwidth 200mbit -- python benchmarks/publish_weights.py
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Final

import torch

import thinwire as tw
from thinwire.spec.recipe import DataRecipe
from thinwire.train.data.packing import prepare
from thinwire.train.data.samples import Samples
from thinwire.train.data.tokens import TokenBin
from thinwire.train.models.llama import Llama, LlamaConfig
from thinwire_bench.environment import describe

TRAINERS: Final = 2
PORT: Final = 29520
RECEIVED: Final = "received.json"
SEQ: Final = 128


def tokens() -> TokenBin:
    return prepare(DataRecipe(source="stdlib", max_bytes=1 << 20), lambda line: None).train


def model(vocabulary: int) -> Llama:
    return Llama(LlamaConfig(vocab=vocabulary, hidden=256, layers=6, heads=4, kv_heads=4, ffn=688, seq=SEQ), seed=0)


def trainer(rank: int, store: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Train with publishing and without, in turn."""
    os.environ["WORLD_SIZE"] = str(TRAINERS)
    served = [sys.executable, "-m", "thinwire.cli.main", "serve-weights", str(store), "--host", "0.0.0.0"]
    server = subprocess.Popen([*served, "--port", str(PORT)]) if rank == 0 else None
    samples = Samples(text := tokens(), SEQ, seed=0)
    sharded = tw.shard(
        model(text.vocab), tw.Plan.preset(options.preset, nodes=TRAINERS, local=1, compute_dtype="bfloat16")
    )
    optim = tw.optimizer(sharded, torch.optim.AdamW, lr=1e-3, weight_decay=0.0)
    publisher = tw.publisher(sharded, str(store))
    number = 0

    def step(*, publishes: bool) -> float:
        nonlocal number
        began = time.perf_counter()
        batch = samples.batch(samples.indices(options.batch * (TRAINERS * number + rank), options.batch))
        loss = sharded(batch.input_ids, labels=batch.labels).loss
        assert loss is not None
        loss.backward()
        optim.step()
        optim.zero_grad()
        if publishes:
            publisher.step()
        number += 1
        return time.perf_counter() - began

    for _ in range(options.warm_up):
        step(publishes=False)
    for group in optim.param_groups:
        group["lr"] = options.rate
    for _ in range(3):  # the anchor, and the first deltas
        step(publishes=True)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    work: dict[bool, float] = {True: 0.0, False: 0.0}
    for _ in range(options.rounds):
        for publishes in (True, False):
            began = time.process_time()
            seconds[publishes] += [step(publishes=publishes) for _ in range(options.steps)]
            if publisher._thread is not None:
                publisher._thread.join()  # what it writes belongs to these steps
            work[publishes] += time.process_time() - began
    (store / "timed").touch()
    for _ in range(options.pauses):
        step(publishes=True)
        time.sleep(1.0)  # so that the receiver takes each version by itself
    publisher.close()
    if server is not None:
        (store / "ended").touch()
        while not (store / RECEIVED).exists():
            time.sleep(0.1)
        server.terminate()
    with_, without = (statistics.median(seconds[publishes]) for publishes in (True, False))
    return {
        "step_with": with_,
        "step_without": without,
        "ratio": with_ / without,
        "whole_ratio": sum(seconds[True]) / sum(seconds[False]),
        "processor_ratio": work[True] / work[False],
        "versions": publisher.version,
        "skipped": publisher.skipped,
        "bytes": publisher.nbytes,
        "seconds": {str(publishes): of_steps for publishes, of_steps in seconds.items()},
    }


def receiver(store: Path) -> dict[str, Any]:
    """Follow over the link. Once no step is timed any more, two others take the same versions: from memory, and without
    reading ahead."""
    url = f"http://{os.environ['MASTER_ADDR']}:{PORT}"
    ahead, memory, plain = (tw.Subscriber(url) for _ in range(3))
    module = model(tokens().vocab).bfloat16()
    taken: dict[str, list[float]] = {"pause": [], "applying": [], "without reading ahead": []}
    ended = threading.Event()
    threading.Thread(target=_read_ahead, args=(ahead, ended), daemon=True).start()

    def take(name: str, subscriber: tw.Subscriber) -> int | None:
        began = time.perf_counter()
        version = subscriber.update(ahead.version if subscriber is plain else None, fetched=subscriber is not plain)
        if version is not None:
            subscriber.load_into(module)
            taken[name].append(time.perf_counter() - began)
        return version

    while not (store / "ended").exists():
        time.sleep(0.05)
        compares = (store / "timed").exists()
        read = ahead._fetched.copy()
        if take("pause", ahead) is None:
            continue
        if not compares:
            taken["pause"].clear()
            memory._tensors = {name: value.clone() for name, value in ahead.state_dict().items()}
            memory.run, memory.version, memory._past = ahead.run, ahead.version, ahead._past
        else:
            memory._fetched = read
            take("applying", memory)
            take("without reading ahead", plain)
    ended.set()
    assert all(value.equal(memory.state_dict()[name]) for name, value in ahead.state_dict().items())
    medians = {name: statistics.median(seconds) for name, seconds in taken.items()}
    return medians | {"ratio": medians["pause"] / medians["applying"], "version": ahead.version, "seconds": taken}


def _read_ahead(subscriber: tw.Subscriber, ended: threading.Event) -> None:
    while not ended.wait(0.5):
        with contextlib.suppress(OSError):  # the server is not there yet
            subscriber.fetch()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="zero1")
    parser.add_argument("--rate", type=float, default=1e-6, help="learning rate of the measured steps")
    parser.add_argument("--warm-up", type=int, default=20, help="steps before, at 1e-3")
    parser.add_argument("--rounds", type=int, default=8, help="times that publishing is on, and off")
    parser.add_argument("--steps", type=int, default=5, help="steps of each")
    parser.add_argument("--batch", type=int, default=32, help="sequences of a step and rank")
    parser.add_argument("--pauses", type=int, default=12, help="further steps, for pauses of the receiver")
    parser.add_argument("--json", type=Path, help="file of the result, of each rank")
    options = parser.parse_args()
    rank = int(os.environ["RANK"])
    store = Path(tempfile.gettempdir()) / f"publish-weights-{os.environ['MASTER_PORT']}-{os.getppid()}"
    store.mkdir(exist_ok=True)
    if rank == TRAINERS:
        draft = store / "draft"
        draft.write_text(json.dumps(receiver(store)), encoding="utf-8")
        draft.rename(store / RECEIVED)
        return
    found = {"trainer": trainer(rank, store, options)}
    if rank != 0:
        return
    found["receiver"] = json.loads((store / RECEIVED).read_text(encoding="utf-8"))
    shutil.rmtree(store)
    for who, of_who in found.items():
        print(f"{who}: {json.dumps({key: value for key, value in of_who.items() if key != 'seconds'})}")
    if options.json is not None:
        study = found | {"environment": describe(), "load": os.getloadavg(), "options": vars(options) | {"json": None}}
        options.json.write_text(json.dumps(study) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
