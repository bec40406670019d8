"""The values that codecs are judged on: two distributions, and what a small model of ours is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from thinwire.spec.recipe import DataRecipe
from thinwire.train.data.packing import prepare
from thinwire.train.data.samples import Samples
from thinwire.train.models.llama import Llama, LlamaConfig

DATA_SETS: Mapping[str, str] = {
    "normal": "N(0,1)",
    "student": "Student t with 3 degrees of freedom",
    "gradients": "of the matrices of a small Llama, after training it for a few dozen steps",
    "weights": "of those matrices",
    "activations": "what its blocks hand on",
}

_PIECE = 1 << 22
_STEPS = 40
_BATCH = 8
_SEQ = 128
_TEXT = 4 << 20
"""Bytes of text: enough for a few hundred thousand tokens, tokenized in a few seconds."""


def data_sets(
    names: Sequence[str], num_values: int, report: Callable[[str], None] = lambda line: None
) -> dict[str, Tensor]:
    """Data sets by name (keys of :data:`DATA_SETS`), 1-D fp32 on CPU. Synthetic ones have ``num_values``; those of the
    model have as many as the model."""
    makers: dict[str, Callable[[int], Tensor]] = {"normal": normal, "student": student}
    tensors = {name: makers[name](num_values) for name in names if name in makers}
    if set(names) - set(tensors):
        tensors |= _of_a_model(report)
    return {name: tensors[name] for name in names}


def normal(num_values: int, seed: int = 0) -> Tensor:
    return torch.randn(num_values, generator=torch.Generator().manual_seed(seed))


def student(num_values: int, seed: int = 1) -> Tensor:
    """Student t values with 3 degrees of freedom: a normal over the root of a mean of three squares."""
    generator = torch.Generator().manual_seed(seed)
    pieces = []
    for start in range(0, num_values, _PIECE):
        top, *below = torch.randn(4, min(_PIECE, num_values - start), generator=generator)
        pieces.append(top / (torch.stack(below).square().sum(0) / 3).sqrt())
    return torch.cat(pieces)


class SmallLlama:
    """A Llama of some 5 million parameters, trained on text of Python's library with samples of 128 tokens."""

    def __init__(self, layers: int, ffn: int, report: Callable[[str], None], weight_decay: float = 0.01) -> None:
        tokens = prepare(DataRecipe(source="stdlib", max_bytes=_TEXT), report).train
        self._samples = Samples(tokens, _SEQ, seed=0)
        config = LlamaConfig(vocab=tokens.vocab, hidden=256, layers=layers, heads=4, kv_heads=4, ffn=ffn, seq=_SEQ)
        self.model = Llama(config, seed=0)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True, weight_decay=weight_decay)

    def backward(self, step: int) -> None:
        """Compute the gradients of a step, of eight samples."""
        batch = self._samples.batch(self._samples.indices(step * _BATCH, _BATCH))
        loss = self.model(batch.input_ids, labels=batch.labels).loss
        assert loss is not None
        loss.backward()

    def step(self, step: int) -> None:
        """Train a step; no gradients are left."""
        self.backward(step)
        self.optim.step()
        self.optim.zero_grad()


def _of_a_model(report: Callable[[str], None]) -> dict[str, Tensor]:
    """Train a Llama and take it apart."""
    report("training a small model for its gradients, weights and activations")
    small = SmallLlama(layers=4, ffn=704, report=report)
    for step in range(_STEPS):
        small.step(step)
    outputs: list[Tensor] = []
    handles = [
        layer.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
        for layer in small.model.layers
    ]
    small.backward(_STEPS)
    for handle in handles:
        handle.remove()
    # The norms' weights, near 1, are one value in 2000 and would be half of the sum of squares.
    matrices = [parameter for parameter in small.model.parameters() if parameter.dim() == 2]
    return {
        "gradients": _flat(matrix.grad for matrix in matrices if matrix.grad is not None),
        "weights": _flat(matrices),
        "activations": _flat(outputs),
    }


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
