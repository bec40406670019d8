"""The tensors that would cross each parallel axis while a small Llama trains, taken from one process.

One process holds all that ranks would exchange: a micro-batch's gradients are what one data-parallel rank sends, the
outputs of a block's second matrices what tensor parallelism sums, the residual stream what pipeline stages hand on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from thinwire.errors import UsageError
from thinwire.spec.recipe import DataRecipe
from thinwire.train.data.packing import prepare
from thinwire.train.data.samples import Batch, Samples
from thinwire.train.models.llama import Llama, LlamaBlock, LlamaConfig, LlamaMLP
from thinwire.train.schedule import learning_rate_share

__all__ = ["KINDS", "Crossing", "CrossingKind", "Moment", "Training", "observe", "train"]

_TEXT: Final = 4 << 20
"""Bytes of text: a million tokens."""
_HEAD: Final = 64
"""Channels of an attention head."""


class CrossingKind(NamedTuple):
    """A kind of tensor that crosses an axis.

    Attributes:
        axis: Field of a policy that sets its codec.
        meaning: Description of the tensors.
    """

    axis: str
    meaning: str


KINDS: Final[Mapping[str, CrossingKind]] = {
    "gradients of a rank": CrossingKind("dp", "weight gradients of one rank's micro-batch, before any reduction"),
    "mean gradients": CrossingKind("dp", "their mean over the data-parallel ranks"),
    "forward sums": CrossingKind("tp", "outputs of o_proj and down_proj, which the forward sums; tokens x hidden"),
    "backward sums": CrossingKind("tp", "gradients of the inputs of both halves of a block, which the backward sums"),
    "forward messages": CrossingKind("pp", "the residual stream between blocks; tokens x hidden"),
    "backward messages": CrossingKind("pp", "its gradient"),
    "parameters": CrossingKind("gather", "weight matrices after the update, which spread sends too"),
    "changes of a step": CrossingKind("spread", "what the update added to them, as spread_difference sends it"),
}
"""Everything that is measured."""


class Crossing(NamedTuple):
    """A tensor that would cross an axis.

    Attributes:
        kind: A key of :data:`KINDS`.
        part: Name of the module of a block, or of the model.
        tensor: The tensor, 2-D, fp32.
    """

    kind: str
    part: str
    tensor: Tensor


class Moment(NamedTuple):
    """A step at which all of it was taken.

    Attributes:
        step: Number of the update, from 1.
        loss: Mean loss of the step, in nats per token.
        crossings: The tensors that would cross an axis.
    """

    step: int
    loss: float
    crossings: list[Crossing]


@dataclass(frozen=True, kw_only=True)
class Training:
    """A short training.

    Attributes:
        at: Steps at which to take tensors, from 1, in rising order; training ends with the last one.
        layers: Number of blocks, at least 2.
        hidden: Width of the residual stream, a multiple of 64.
        seq: Sequence length in tokens.
        ranks: Data-parallel ranks; their micro-batches are computed one after another.
        micro_batch: Sequences per rank.
        lr: Peak learning rate.

    Raises:
        UsageError: a value is none of these.
    """

    at: tuple[int, ...] = (10, 100, 250)
    layers: int = 6
    hidden: int = 256
    seq: int = 128
    ranks: int = 2
    micro_batch: int = 4
    lr: float = 2e-3

    def __post_init__(self) -> None:
        if not self.at or self.at[0] < 1 or list(self.at) != sorted(set(self.at)):
            raise UsageError(f"at = {list(self.at)}: rising steps of at least 1 are needed, such as 10,100,250")
        if self.layers < 2:
            raise UsageError(f"layers = {self.layers}: at least 2 are needed for a message between them")
        if self.hidden < _HEAD or self.hidden % _HEAD:
            raise UsageError(f"hidden = {self.hidden}: it should be a multiple of {_HEAD}, a head's channels")

    def config(self, vocab: int) -> LlamaConfig:
        """The model: grouped-query attention where heads come in pairs, a feed-forward network of 2.75 the width."""
        heads = self.hidden // _HEAD
        return LlamaConfig(
            vocab=vocab,
            hidden=self.hidden,
            layers=self.layers,
            heads=heads,
            kv_heads=heads // 2 if heads % 2 == 0 else heads,
            ffn=self.hidden * 11 // 4,
            seq=self.seq,
        )


def train(training: Training, report: Callable[[str], None] = lambda line: None) -> Iterator[Moment]:
    """Train on the source of the standard library.

    Args:
        training: Model, lengths and steps.
        report: Called with a line of text before anything that takes long.

    Yields:
        Every step of ``training.at``. The tensors are copies.
    """
    tokens = prepare(DataRecipe(source="stdlib", max_bytes=_TEXT), report).train
    samples = Samples(tokens, training.seq, seed=0)
    model = Llama(training.config(tokens.vocab), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    steps = training.at[-1]
    report(f"training {sum(p.numel() for p in model.parameters()):,} parameters for {steps} steps")
    for step in range(steps):
        share = learning_rate_share(step, warmup=max(1, steps // 8), steps=steps, final=0.1)
        optimizer.param_groups[0]["lr"] = share * training.lr
        batches = [
            samples.batch(samples.indices((step * training.ranks + rank) * training.micro_batch, training.micro_batch))
            for rank in range(training.ranks)
        ]
        if step + 1 in training.at:
            moment = observe(model, optimizer, batches, step + 1)
            report(f"step {moment.step}: loss {moment.loss:.3f}")
            yield moment
        else:
            _backward(model, batches, len(batches))
            _update(model, optimizer)


def observe(model: Llama, optimizer: torch.optim.Optimizer, batches: Sequence[Batch], step: int) -> Moment:
    """Make one update and take everything that would cross an axis.

    Args:
        model: The model, without gradients; it has none afterwards either.
        optimizer: Optimizer of all its parameters.
        batches: The batch of each rank.
        step: Number of the update, from 1.

    Returns:
        Copies; activations and their gradients are those of the first rank.
    """
    with _activations(model) as taken:
        loss = _backward(model, batches[:1], len(batches))
    taken += _crossings("gradients of a rank", _gradients(model))
    loss += _backward(model, batches[1:], len(batches))
    taken += _crossings("mean gradients", _gradients(model))
    before = {name: matrix.clone() for name, matrix in _matrices(model).items()}
    _update(model, optimizer)
    after = _matrices(model)
    taken += _crossings("parameters", after)
    taken += _crossings("changes of a step", {name: after[name] - before[name] for name in after})
    return Moment(step, loss, taken)


def _backward(model: Llama, batches: Sequence[Batch], ranks: int) -> float:
    """Adds these ranks' share to the gradients, and returns their share of the mean loss."""
    total = 0.0
    for batch in batches:
        loss = model(batch.input_ids, labels=batch.labels).loss
        assert loss is not None
        (loss / ranks).backward()
        total += loss.item() / ranks
    return total


def _update(model: Llama, optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


@contextlib.contextmanager
def _activations(model: Llama) -> Iterator[list[Crossing]]:
    """Collect what tensor and pipeline parallelism would send during the forward and backward passes in the block."""
    taken: list[Crossing] = []
    handles = []

    def keep(kind: str, part: str, tensor: Tensor) -> None:
        taken.append(Crossing(kind, part, tensor.detach().flatten(0, -2).clone()))

    def take_output(module: nn.Module, kind: str, part: str) -> None:
        handles.append(module.register_forward_hook(lambda _module, _inputs, output: keep(kind, part, output)))

    def take_gradient(module: nn.Module, kind: str, part: str) -> None:
        def hook(module: nn.Module, inputs: object, output: Tensor) -> None:
            del module, inputs
            output.register_hook(lambda gradient: keep(kind, part, gradient))

        handles.append(module.register_forward_hook(hook))

    blocks = [layer for layer in model.layers if isinstance(layer, LlamaBlock)]
    for block in blocks:
        take_output(block.self_attn.o_proj, "forward sums", "o_proj")
        assert isinstance(block.mlp, LlamaMLP), "a dense model"
        take_output(block.mlp.down_proj, "forward sums", "down_proj")
        take_gradient(block.input_layernorm, "backward sums", "self_attn")
        take_gradient(block.post_attention_layernorm, "backward sums", "mlp")
    for block in blocks[:-1]:
        take_output(block, "forward messages", "block")
        take_gradient(block, "backward messages", "block")
    try:
        yield taken
    finally:
        for handle in handles:
            handle.remove()


def _matrices(model: Llama) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.dim() == 2}


def _gradients(model: Llama) -> dict[str, Tensor]:
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.dim() == 2 and parameter.grad is not None
    }


def _crossings(kind: str, tensors: Mapping[str, Tensor]) -> list[Crossing]:
    """Copies of matrices by name."""
    return [Crossing(kind, name.split(".")[-2], tensor.clone()) for name, tensor in tensors.items()]
