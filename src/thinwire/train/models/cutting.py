"""Splits thinwire's models: torch's tensor-parallel styles by module, and the blocks of a pipeline stage.

Sums over tensor-parallel ranks follow Megatron-LM (arXiv 1909.08053, section 3): one after attention and one after the
feed-forward. With sequence parallelism (arXiv 2205.05198, section 4.2), each sum is a reduce-scatter, followed by an
all-gather before the next matrices; norms and residuals work on the tokens of one rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

__all__ = ["Decoder", "Half", "ModuleNames"]


@dataclass(frozen=True)
class Half:
    """Attention or the feed-forward of a block.

    Attributes:
        columns: Names of the matrices that are split by columns; they read the first input.
        rows: Name of the matrix that is split by rows; it makes the output.
        inputs: Number of inputs.
    """

    columns: tuple[str, ...]
    rows: str
    inputs: int


@dataclass(frozen=True)
class ModuleNames:
    """Names of a decoder's modules.

    Attributes:
        embedding: The token embedding.
        norm: The norm before the head.
        head: The module that makes logits.
        block_norms: The norms of a block.
        halves: Attention and feed-forward of a block, by name.
        positions: The learned position embedding, for kinds of models that may have one.
    """

    embedding: str
    norm: str
    head: str
    block_norms: tuple[str, ...]
    halves: Mapping[str, Half]
    positions: str | None = None


class DecoderShape(Protocol):
    """The sizes of a decoder that tensor and pipeline parallelism need, from its configuration."""

    @property
    def vocab(self) -> int:
        """Size of the vocabulary, V."""

    @property
    def hidden(self) -> int:
        """Width of the residual stream, D."""

    @property
    def tied(self) -> bool:
        """Whether the head shares the embedding's weight."""


class Decoder(nn.Module):
    """A causal language model that can be split: a :class:`thinwire.parallel.Divisible` once a subclass adds its sizes.

    Modules of :attr:`module_names` that are on another stage of a pipeline are ``None``.

    Attributes:
        module_names: Names of its modules; the blocks are in ``layers``.
        sequence_ways: Number of tensor-parallel ranks that share the tokens of hidden states; set when the model is
            split.
    """

    module_names: ClassVar[ModuleNames]
    config: DecoderShape
    layers: nn.ModuleList

    def __init__(self) -> None:
        super().__init__()
        self.sequence_ways = 1

    @property
    def num_blocks(self) -> int:
        """Number of blocks of this stage."""
        return len(self.layers)

    @property
    def width(self) -> int:
        """Width of the residual stream, D."""
        return self.config.hidden

    @property
    def vocabulary(self) -> int:
        """Size of the vocabulary, V."""
        return self.config.vocab

    @property
    def is_tied(self) -> bool:
        """Whether the head shares the embedding's weight."""
        return self.config.tied

    def tensor_parallel_styles(self, *, sequence: bool) -> dict[str, ParallelStyle]:
        """torch's style of each module of this stage."""
        names = self.module_names
        tokens = Shard(1) if sequence else Replicate()
        outer: dict[str | None, ParallelStyle] = {
            names.embedding: RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens),
            names.positions: RowwiseParallel(
                input_layouts=Replicate(), output_layouts=Shard(0) if sequence else Replicate()
            ),
            names.head: ColwiseParallel(input_layouts=tokens, output_layouts=Shard(-1)),
        }
        if sequence:
            outer[names.norm] = SequenceParallel()
        made = {name: style for name, style in outer.items() if name is not None and getattr(self, name) is not None}
        for name, half in names.halves.items():
            others = (None,) * (half.inputs - 1)
            # All matrices read one DTensor, so that their gradients are added up before they are sent.
            made[f"layers.*.{name}"] = PrepareModuleInput(
                input_layouts=(tokens, *others), desired_input_layouts=(Replicate(), *others)
            )
            made |= {f"layers.*.{name}.{matrix}": ColwiseParallel() for matrix in half.columns}
            made[f"layers.*.{name}.{half.rows}"] = RowwiseParallel(output_layouts=tokens)
        if sequence:
            made |= {f"layers.*.{name}": SequenceParallel() for name in names.block_norms}
        return made

    def tie(self) -> None:
        """Share the embedding's weight with the head, if they are tied."""
        embedding, head = getattr(self, self.module_names.embedding), getattr(self, self.module_names.head)
        if self.is_tied and embedding is not None and head is not None:
            head.weight = embedding.weight

    def keep(self, blocks: range, *, first: bool, last: bool) -> None:
        """Keep one stage of a pipeline. Blocks keep their names."""
        kept = nn.ModuleList()
        for index in blocks:
            kept.add_module(str(index), self.layers[index])
        self.layers = kept
        names = self.module_names
        gone = [*(() if first else (names.embedding, names.positions)), *(() if last else (names.norm, names.head))]
        for name in gone:
            if name is not None:
                setattr(self, name, None)
