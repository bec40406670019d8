"""How our models are cut: torch's tensor-parallel styles by module, and the blocks of a pipeline stage.

Sums over tensor-parallel ranks follow Megatron-LM (arXiv 1909.08053, section 3): one behind attention and one behind
the feed-forward. With sequence parallelism (arXiv 2205.05198, section 4.2) each is a reduce-scatter, and an all-gather
stands before the next matrices; norms and residuals work on the tokens of one rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

__all__ = ["Half", "kept_blocks", "styles"]


@dataclass(frozen=True)
class Half:
    """Attention or the feed-forward of a block.

    Attributes:
        columns: matrices whose columns are cut; they read its first input.
        rows: the matrix whose rows are cut; it makes the output.
        inputs: how many it takes.
    """

    columns: tuple[str, ...]
    rows: str
    inputs: int


def styles(
    *,
    embedding: str | None,
    positions: str | None,
    norm: str | None,
    head: str | None,
    block_norms: Sequence[str],
    halves: Mapping[str, Half],
    sequence: bool,
) -> dict[str, ParallelStyle]:
    """Styles of a decoder's modules.

    Args:
        embedding: of tokens, if it is here.
        positions: learned ones, if there are any here.
        norm: before the head, if it is here.
        head: if it is here.
        block_norms: within a block.
        halves: attention and feed-forward within a block, by name.
        sequence: whether tokens are cut between matrices.
    """
    tokens = Shard(1) if sequence else Replicate()
    made: dict[str, ParallelStyle] = {}
    if embedding is not None:
        made[embedding] = RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens)
    if positions is not None:
        layout = Shard(0) if sequence else Replicate()
        made[positions] = RowwiseParallel(input_layouts=Replicate(), output_layouts=layout)
    if norm is not None and sequence:
        made[norm] = SequenceParallel()
    if head is not None:
        made[head] = ColwiseParallel(input_layouts=tokens, output_layouts=Shard(-1))
    for name, half in halves.items():
        others = (None,) * (half.inputs - 1)
        # One DTensor for all matrices that read it: their gradients are summed before they are sent, not after.
        made[f"layers.*.{name}"] = PrepareModuleInput(
            input_layouts=(tokens, *others), desired_input_layouts=(Replicate(), *others)
        )
        made |= {f"layers.*.{name}.{matrix}": ColwiseParallel() for matrix in half.columns}
        made[f"layers.*.{name}.{half.rows}"] = RowwiseParallel(output_layouts=tokens)
    if sequence:
        made |= {f"layers.*.{name}": SequenceParallel() for name in block_norms}
    return made


def kept_blocks(layers: nn.ModuleList, blocks: range) -> nn.ModuleList:
    """Some blocks, under the names they had."""
    kept = nn.ModuleList()
    for index in blocks:
        kept.add_module(str(index), layers[index])
    return kept
