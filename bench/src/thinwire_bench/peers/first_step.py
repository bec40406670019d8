"""A plain training script up to its first step: ``torchrun -m thinwire_bench.peers.first_step SYSTEM``.

It imports what its system needs and nothing else, as a user's script would; its model is therefore its own. Rank 0
prints when each phase ended, in seconds since the epoch.
"""

from __future__ import annotations

import json
import sys
import time

stamps = {"started": time.time()}

import os  # noqa: E402

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402

SYSTEM, VOCAB, HIDDEN, LAYERS, HEADS, FFN, SEQ = sys.argv[1], *(int(word) for word in sys.argv[2:8])
IS_OURS = SYSTEM.startswith("tw:")

if IS_OURS:
    import thinwire as tw

    tw.shard  # noqa: B018 - names are imported on first use
else:
    import torch.distributed as dist
if SYSTEM == "fsdp2":
    from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    """A block of a Llama, without rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(2))
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.up, self.down = nn.Linear(HIDDEN, 2 * FFN, bias=False), nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform: ``(B, T, D)`` to ``(B, T, D)``."""
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        gate, up = self.up(self.norms[1](x)).chunk(2, -1)
        transformed: Tensor = x + self.down(F.silu(gate) * up)
        return transformed


class Model(nn.Module):
    """A small language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits, ``(B, T, V)``, of ids, ``(B, T)``."""
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def prepare(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Join the other ranks, and distribute the model and its optimizer."""
    if IS_OURS:
        plan = tw.Plan.preset(SYSTEM.removeprefix("tw:"), nodes=1, local=int(os.environ["WORLD_SIZE"]))
        model = tw.shard(model, plan.with_(compute_dtype="float32"))
        return model, tw.optimizer(model, torch.optim.AdamW, lr=1e-3, fused=True)
    dist.init_process_group("gloo")
    if SYSTEM == "fsdp2":
        for layer in model.layers:  # type: ignore[union-attr]
            fully_shard(layer)
        fully_shard(model)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def main() -> None:
    """Train one step."""
    stamps["imports"] = time.time()
    model: nn.Module = Model()
    stamps["model"] = time.time()
    model, optimizer = prepare(model)
    stamps["sharding"] = time.time()
    ids = torch.randint(0, VOCAB, (1, SEQ + 1), generator=torch.Generator().manual_seed(int(os.environ["RANK"])))
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    value = float(loss.detach())
    stamps["step"] = time.time()
    if os.environ["RANK"] == "0":
        print(json.dumps({"stamps": stamps, "loss": value}), flush=True)


if __name__ == "__main__":
    main()
