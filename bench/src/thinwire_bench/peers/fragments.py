"""Parts of a model that torchft's DiLoCo exchanges at different steps."""

from __future__ import annotations

import itertools

from torch import nn

from thinwire.errors import UsageError

__all__ = ["fragments_of"]


def fragments_of(model: nn.Module, number: int) -> list[nn.Module]:
    """The model in as many parts of consecutive layers; the first one has the embedding, the last one the head. With
    fewer layers than parts, the embedding and the head are parts of their own.

    Raises:
        UsageError: The model has too few layers even so.
    """
    if number == 1:
        return [model]
    first, *rest = [module for module in model.children() if not isinstance(module, nn.ModuleList)]
    layers = [[layer] for module in model.children() if isinstance(module, nn.ModuleList) for layer in module]
    if len(layers) < number:
        layers = [[first], *layers, rest]
    else:
        layers = [[first, *layers[0]], *layers[1:-1], [*layers[-1], *rest]]
    if len(layers) < number:
        raise UsageError(f"a model of {len(layers) - 2} layers cannot be exchanged in {number} fragments")
    bounds = [len(layers) * index // number for index in range(number + 1)]
    return [nn.ModuleList(itertools.chain(*layers[start:end])) for start, end in itertools.pairwise(bounds)]
