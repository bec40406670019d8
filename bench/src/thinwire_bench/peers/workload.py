"""The workload of every system: models with weights of one seed, batches by rank and step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from thinwire.train.models.llama import Llama, LlamaConfig
from thinwire_bench.peers.catalog import MODELS


def make_model(options: Mapping[str, Any]) -> Llama:
    """The model that ``options`` name, in fp32 with the weights of seed 0.

    Args:
        options: ``model``, a key of ``MODELS`` or fields of ``LlamaConfig``; ``seq``, the longest sequence in tokens.
    """
    return Llama(LlamaConfig(**_fields(options), seq=options["seq"]), seed=0)


def batches(options: Mapping[str, Any], rank: int) -> Iterator[torch.Tensor]:
    """Learnable sequences: tokens of a narrow, skewed range. The same for a rank in every system.

    Args:
        options: ``model``, as for :func:`make_model`; ``seq``, the sequence length in tokens.
        rank: Rank, which seeds the data.

    Yields:
        int64 ids of shape [1, seq + 1].
    """
    generator = torch.Generator().manual_seed(1000 + rank)
    shape, vocab = (1, options["seq"] + 1), _fields(options)["vocab"]
    while True:
        yield torch.randint(0, 64, shape, generator=generator) ** 2 % vocab


def _fields(options: Mapping[str, Any]) -> dict[str, Any]:
    model = options["model"]
    return dict(MODELS[model] if isinstance(model, str) else model)
