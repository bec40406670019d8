"""The shape of a model: its parts as the runtime cuts it into units, their tensors and their FLOPs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

from thinwire.cost.blocks import ModelPart, Tensor, block_modules, norm_parameters, tensors_of
from thinwire.errors import SpecError
from thinwire.program.shares import LARGE_LEAF
from thinwire.spec import ModelSpec
from thinwire.spec.models.model import expert_layers, expert_parameters


def alike(parts: Iterable[ModelPart]) -> list[tuple[int, ModelPart]]:
    """Parts that compute differently, each with the number of parts that compute like it."""
    counts: dict[object, tuple[int, ModelPart]] = {}
    for part in parts:
        key = part.work
        counts[key] = counts.get(key, (0, part))[0] + 1, part
    return list(counts.values())


_LOGIT_VALUES = 10
"""Values that the loss reads or writes for each logit: cast to fp32, log-softmax, and their temporaries."""


@lru_cache(maxsize=256)
def parts(model: ModelSpec, granularity: str, tp: int = 1, ep: int = 1) -> tuple[ModelPart, ...]:
    """The model's parts in the runtime's order; the root comes first if it owns any parameter.

    Args:
        model: Dimensions of the model.
        granularity: ``"block"`` or ``"module"``, as in a plan.
        tp: Number of ranks that share matrices, heads and the vocabulary; the result is the share of one rank.
        ep: Number of ranks that share experts, which then are parts by themselves.

    Raises:
        SpecError: ``ep`` does not divide the number of experts.
    """
    if ep > 1:
        if (model.experts or 1) % ep:
            raise SpecError("plan", f"ep = {ep} should divide the model's experts = {model.experts or 'none'}")
        apart = _whole_parts(model, granularity, apart=True)
        return tuple(_shared(part, ep) if part.is_experts else part for part in apart)
    whole = _whole_parts(model, granularity)
    return whole if tp == 1 else tuple(_sliced(part, tp) for part in whole)


def _shared(part: ModelPart, ep: int) -> ModelPart:
    """A rank's share of experts: it computes as many tokens as without sharing, with fewer experts."""
    assert part.routed is not None
    tensors = tuple(Tensor(tensor.name, tensor.numel // ep) for tensor in part.tensors)
    return replace(part, tensors=tensors, routed=replace(part.routed, experts=part.routed.experts // ep))


def _sliced(part: ModelPart, tp: int) -> ModelPart:
    """A tensor-parallel rank's share; norms are on every rank."""
    tensors = tuple(
        tensor if tensor.is_whole else Tensor(tensor.name, -(-tensor.numel // tp)) for tensor in part.tensors
    )
    return replace(
        part,
        tensors=tensors,
        # Either side may be the one that is cut; the work is the same.
        matrices=tuple((-(-rows // tp), columns) for rows, columns in part.matrices),
        attention_width=part.attention_width // tp,
        heads=part.heads // tp,
        split_values=part.split_values // tp,
    )


@lru_cache(maxsize=64)
def _whole_parts(model: ModelSpec, granularity: str, *, apart: bool = False) -> tuple[ModelPart, ...]:
    name, last = _NAMES[model.kind]
    outside = itertools.count(model.layers + 1)  # numbers of blocks; only their equality counts
    embedding_tensors = tensors_of(name, [("weight", model.embedding_parameters)])
    head_tensors = tensors_of("lm_head", [("weight", model.head_parameters)]) if model.head_parameters else ()
    embedding = ModelPart(name, "embedding", next(outside), embedding_tensors, whole_values=2 * model.hidden)
    norm = ModelPart(
        last, "rest", next(outside), tensors_of(last, norm_parameters(model)), whole_values=2 * model.hidden
    )
    logits = ((model.vocab, model.hidden),)
    head = ModelPart("lm_head", "head", next(outside), head_tensors, logits, split_values=_LOGIT_VALUES * model.vocab)
    blocks = [part for layer in range(model.layers) for part in _block_parts(model, layer, granularity, apart=apart)]
    if model.tied_embedding:
        alone: tuple[ModelPart, ...] = (norm,) if granularity == "module" else ()
    elif granularity == "module":
        alone = (embedding, norm, head)
    else:
        # The runtime looks for large leaves in the part of the model that has no shared experts.
        total = model.parameters - (expert_layers(model) * expert_parameters(model) if apart else 0)
        alone = tuple(p for p in (embedding, head) if p.numel * LARGE_LEAF >= total)
    # The root owns what is too small to be a unit, and what two units share.
    rest = [part for part in (embedding, norm, head) if part not in alone]
    root = _joined("", "head" if head in rest else "rest", 0, rest)
    first = [part for part in (root, embedding) if part.tensors and (part is root or part in alone)]
    return (*first, *blocks, *(part for part in (norm, head) if part in alone))


def _joined(name: str, kind: str, block: int, joined: Sequence[ModelPart]) -> ModelPart:
    return ModelPart(
        name,
        kind,
        block,
        tuple(tensor for part in joined for tensor in part.tensors),
        tuple(matrix for part in joined for matrix in part.matrices),
        sum(part.attention_width for part in joined),
        sum(part.heads for part in joined),
        sum(part.split_values for part in joined),
        sum(part.whole_values for part in joined),
        next((part.routed for part in joined if part.routed is not None), None),
    )


def _block_parts(model: ModelSpec, layer: int, granularity: str, *, apart: bool) -> list[ModelPart]:
    modules = block_modules(model, layer)
    if granularity == "module":
        return modules
    own = [part for part in modules if apart and part.is_experts]
    rest = [part for part in modules if part not in own]
    return [_joined(f"layers.{layer}", "block", layer + 1, rest), *own]


_NAMES = {"llama": ("embed_tokens", "norm"), "gpt": ("embed_in", "final_layer_norm")}
"""Names of the embedding and of the last norm, by kind of model."""
