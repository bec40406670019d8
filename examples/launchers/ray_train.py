"""Trains with Ray Train: Ray places the workers, starts torch's process group and restarts after a failure.

python examples/launchers/ray_train.py --workers 4 --steps 20
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray.train
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train(config: dict[str, Any]) -> None:
    """Be one worker: an ordinary loop of thinwire. Ray has set torchrun's variables and joined the process group."""
    import torch
    from torch.nn.functional import cross_entropy

    import thinwire as tw

    context = ray.train.get_context()
    rank, local = context.get_world_rank(), context.get_local_world_size()
    plan = tw.Plan.preset("zero3", nodes=context.get_world_size() // local, local=local)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(64, 32), torch.nn.Linear(32, 128), torch.nn.Linear(128, 64))
    model = tw.shard(model, plan)
    optim = tw.optimizer(model, torch.optim.AdamW, lr=3e-3)
    start = 0
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as directory:
            tw.load(model, optim, Path(directory) / "state")
            start = int((Path(directory) / "step").read_text())
        print(f"rank {rank} goes on after step {start}", flush=True)
    data = torch.Generator()
    for step in range(start, config["steps"]):
        # A step's data depends on the step, so that a run that was restarted sees what it would have seen.
        data.manual_seed(step * context.get_world_size() + rank)
        ids = torch.randint(0, 63, (64,), generator=data)
        loss = cross_entropy(model(ids).float(), ids + 1)
        loss.backward()
        optim.step()
        optim.zero_grad()
        metrics = {"loss": loss.item(), "step": step + 1}
        if (step + 1) % config["every"]:
            ray.train.report(metrics)
            continue
        # Every rank saves its shards into one directory, and rank 0 hands it to Ray.
        directory = Path(config["storage"]) / f"step-{step + 1}"
        tw.save(model, optim, directory / "state")
        if rank == 0:
            (directory / "step").write_text(str(step + 1))
        ray.train.report(metrics, checkpoint=Checkpoint.from_directory(directory) if rank == 0 else None)


def main() -> None:
    """Start the workers, and print the last loss."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--storage", default=None, help="a directory that all nodes see")
    parser.add_argument("--gpu", action="store_true", help="one GPU for each worker")
    arguments = parser.parse_args()
    storage = arguments.storage or tempfile.mkdtemp()
    trainer = TorchTrainer(
        train,
        train_loop_config={"steps": arguments.steps, "every": 10, "storage": storage},
        scaling_config=ScalingConfig(num_workers=arguments.workers, use_gpu=arguments.gpu),
        run_config=RunConfig(storage_path=storage, name="thinwire", failure_config=FailureConfig(max_failures=3)),
    )
    result = trainer.fit()
    print(f"step {result.metrics['step']}, loss {result.metrics['loss']:.3f}")


if __name__ == "__main__":
    main()
