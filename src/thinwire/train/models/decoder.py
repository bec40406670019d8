"""What thinwire's models have in common: their forward, and how they are split over ranks and stages of a pipeline.

Sums over tensor-parallel ranks follow Megatron-LM (arXiv 1909.08053, section 3): one after attention and one after the
feed-forward. With sequence parallelism (arXiv 2205.05198, section 4.2), each sum is a reduce-scatter, followed by an
all-gather before the next matrices; norms and residuals work on the tokens of one rank. Shapes: B sequences, T tokens,
D hidden.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from thinwire.train.models.common import STACKED, CausalOutput, RotaryTable, cross_entropy


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
    """Names of a decoder's modules; only some kinds of models have learned positions."""

    embedding: str
    norm: str
    head: str
    block_norms: tuple[str, ...]
    halves: Mapping[str, Half]
    positions: str | None = None


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shape of a decoder for sequences of at most ``seq`` tokens; ``tied``: the head shares the embedding's weight."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    ffn: int
    seq: int
    tied: bool = False
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5


class Draw(NamedTuple):
    """A weight with random initial values from a normal distribution."""

    name: str
    weight: Tensor
    std: float


class Decoder(nn.Module):
    """A causal language model that can be split: a :class:`thinwire.parallel.Divisible` once a subclass adds its sizes.

    Modules of :attr:`module_names` that are on another stage of a pipeline are ``None``.

    Attributes:
        module_names: Names of its modules; the blocks are in ``layers``.
        sequence_ways: Number of tensor-parallel ranks that share the tokens of hidden states; set when the model is
            split.
    """

    module_names: ClassVar[ModuleNames]
    config: DecoderConfig
    layers: nn.ModuleList
    rotary: RotaryTable | None

    def __init__(self) -> None:
        super().__init__()
        self.sequence_ways = 1

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> CausalOutput | Tensor:
        """Predict the next tokens.

        Inputs are int64 ``(B, T)`` with T at most ``config.seq``, or hidden states ``(B, T, D)`` where the embedding is
        on an earlier stage of a pipeline; labels are int64 ``(B, T)``, the token that follows each input. Returns
        logits, and the loss when there are labels; hidden states where the head is on a later stage.
        """
        embedding, norm, head = (
            getattr(self, name)
            for name in (self.module_names.embedding, self.module_names.norm, self.module_names.head)
        )
        x, length = input_ids, input_ids.shape[1]
        if embedding is None:
            length *= self.sequence_ways
        else:
            x = self.embedded(embedding, input_ids)
        cos, sin = self.angles(length, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        if norm is None or head is None:
            return x
        logits = head(norm(x))
        return CausalOutput(logits, None if labels is None else cross_entropy(logits, labels))

    def embedded(self, embedding: nn.Module, input_ids: Tensor) -> Tensor:
        """What the first block gets of tokens: ``(B, T)`` to ``(B, T, D)``."""
        vectors: Tensor = embedding(input_ids)
        return vectors

    def angles(self, length: int, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """Cosines and sines of rotary positions for T tokens, each ``(T, channels)``; ``None`` without rotation."""
        return (None, None) if self.rotary is None else self.rotary(length, dtype)

    @property
    def num_blocks(self) -> int:
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

    def draws(self) -> list[Draw]:
        """List the weights with random initial values, in the order in which they are drawn.

        As in GPT-2, the standard deviation is 0.02, divided by sqrt(2 L) for layers, and stacks of experts, that write
        to the residual stream. All other parameters keep the initial values of torch's modules (norms at one), except
        that all biases are zero.
        """
        to_residual = {half.rows for half in self.module_names.halves.values()}

        def drawn(owner: str, name: str, weight: Tensor, layer: str) -> Draw:
            return Draw(
                f"{owner}.{name}", weight, 0.02 / math.sqrt(2 * len(self.layers) if layer in to_residual else 1)
            )

        found = []
        for owner, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                found.append(drawn(owner, "weight", module.weight, owner.rpartition(".")[2]))
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.ndim == STACKED:
                    found.append(drawn(owner, name, parameter, name))
        return found

    def init_weights(self, seed: int) -> None:
        """Draw the initial values of :meth:`draws` on the CPU, and set the biases of linear layers to zero. A model on
        the meta device stays as it is.

        The values depend only on ``seed`` and on the order of the names, not on the device or the global random state.
        """
        generator = torch.Generator().manual_seed(seed)
        for draw in self.draws():
            nn.init.normal_(draw.weight, std=draw.std, generator=generator)
        for module in self.modules():
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

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
