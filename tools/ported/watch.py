"""Run a script on this rank and note what it trained: ``watch.py FOLDER SCRIPT [ARGUMENT ...]``, started by torchrun.

Every loss of which the script computes gradients is noted, and the weights of every model that DDP or thinwire trains,
at the end of the script or when it destroys the process group. The script itself stays as it is.
"""

from __future__ import annotations

import json
import os
import random
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.integrations.common.optimizers import is_sharded

LOSSES, WEIGHTS = "losses-{rank}.json", "weights.pt"


class Watch:
    """Notes losses of this rank, and models in the order in which they were wrapped or sharded.

    Args:
        folder: Where the notes are written, which exists.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rank = int(os.environ["RANK"])
        self._losses: list[float] = []
        self._models: list[nn.Module] = []
        # torch 2.13 hangs at times where a wrapper is freed after its process group was destroyed.
        self._wrappers: list[DistributedDataParallel] = []
        self._written = False

    def begin(self) -> None:
        """Put notes around the calls that every trainer and loop makes."""
        backward, wrap, shard, destroy = (
            torch.Tensor.backward,
            DistributedDataParallel.__init__,
            tw.shard,
            dist.destroy_process_group,
        )

        def noted_backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            self._losses.append(float(loss.detach()))
            backward(loss, *args, **kwargs)

        def noted_wrap(wrapped: DistributedDataParallel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
            wrap(wrapped, module, *args, **kwargs)
            self._models.append(module)
            self._wrappers.append(wrapped)

        def noted_shard(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._models.append(model)
            return shard(model, *args, **kwargs)

        def noted_destroy(group: dist.ProcessGroup | None = None) -> None:
            if group is None:
                self.write()
            destroy(group)

        changed: Any = torch.Tensor, DistributedDataParallel, tw, dist
        changed[0].backward, changed[1].__init__, changed[2].shard = noted_backward, noted_wrap, noted_shard
        changed[3].destroy_process_group = noted_destroy

    def write(self) -> None:
        """Write the notes, once. Collective."""
        if self._written:
            return
        self._written = True
        states = [tw.full_state_dict(one) if is_sharded(one) else one.state_dict() for one in self._models]
        (self._folder / LOSSES.format(rank=self._rank)).write_text(json.dumps(self._losses), encoding="utf-8")
        if self._rank == 0:
            torch.save([{name: item.cpu() for name, item in state.items()} for state in states], self._folder / WEIGHTS)


def main() -> None:
    """Run the script as its own program would."""
    folder, script, *arguments = sys.argv[1:]
    random.seed(0)
    torch.manual_seed(0)  # of scripts that set no seed
    watch = Watch(Path(folder))
    watch.begin()
    sys.argv, sys.path[0] = [script, *arguments], str(Path.cwd())
    runpy.run_path(script, run_name="__main__")
    watch.write()
    sys.stdout.flush()
    os._exit(0)  # without freeing the wrappers


if __name__ == "__main__":
    main()
