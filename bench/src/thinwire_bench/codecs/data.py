"""The values that codecs are judged on: two distributions, and what a small model of ours is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

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


def _of_a_model(report: Callable[[str], None]) -> dict[str, Tensor]:
    """Train a Llama of 5 million parameters and take it apart."""
    report("training a small model for its gradients, weights and activations")
    model, samples = _trained_model(report)
    outputs: list[Tensor] = []
    handles = [layer.register_forward_hook(_keep(outputs)) for layer in model.layers]
    backward(model, samples, _STEPS)
    for handle in handles:
        handle.remove()
    matrices = _matrices(model)
    return {
        "gradients": _flat(matrix.grad for matrix in matrices if matrix.grad is not None),
        "weights": _flat(matrices),
        "activations": _flat(outputs),
    }


def _trained_model(report: Callable[[str], None]) -> tuple[Llama, Samples]:
    """The model after its training, without gradients, and the samples that go on."""
    tokens = prepare(DataRecipe(source="stdlib", max_bytes=_TEXT), report).train
    samples = Samples(tokens, _SEQ, seed=0)
    config = LlamaConfig(vocab=tokens.vocab, hidden=256, layers=4, heads=4, kv_heads=4, ffn=704, seq=_SEQ)
    model = Llama(config, seed=0)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for step in range(_STEPS):
        backward(model, samples, step)
        optim.step()
        optim.zero_grad()
    return model, samples


def _matrices(model: Llama) -> list[nn.Parameter]:
    """The norms' weights, near 1, are one value in 2000 and would be half of the sum of squares."""
    return [parameter for parameter in model.parameters() if parameter.dim() == 2]


def backward(model: Llama, samples: Samples, step: int) -> None:
    """Compute the gradients of a step, of eight samples."""
    batch = samples.batch(samples.indices(step * _BATCH, _BATCH))
    loss = model(batch.input_ids, labels=batch.labels).loss
    assert loss is not None
    loss.backward()


def _keep(outputs: list[Tensor]) -> Callable[[nn.Module, object, Tensor], None]:
    def hook(module: nn.Module, inputs: object, output: Tensor) -> None:
        del module, inputs
        outputs.append(output)

    return hook


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
