"""The shape of a model: its parts as the runtime cuts it into units, their tensors and their FLOPs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from thinwire.cost.blocks import EXPERTS, Routed, block_modules, norm_parameters
from thinwire.errors import SpecError
from thinwire.program import ALIGNMENT_BYTES
from thinwire.program.shares import LARGE_LEAF
from thinwire.spec import ModelSpec
from thinwire.spec.models.model import expert_layers, expert_parameters

__all__ = ["ModelPart", "Tensor", "alike", "parts"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One parameter.

    Attributes:
        name: Name in ``named_parameters``.
        numel: Number of elements.
    """

    name: str
    numel: int

    @property
    def is_whole(self) -> bool:
        """Whether tensor parallelism leaves it whole, as it does norms."""
        return "norm" in self.name


@dataclass(frozen=True, slots=True)
class ModelPart:
    """A module of the model that becomes a unit.

    Attributes:
        name: Dotted module name; empty for the root.
        kind: ``"embedding"``, ``"block"`` (or a module of one), ``"head"`` (including the loss) or ``"rest"``.
        block: Number of the block that it belongs to.
        tensors: Its parameters, in order.
        matrices: Rows and columns of its matrices: the width of their output and of their input.
        attention_width: Total width of its attention heads, whose FLOPs also depend on the sequence length.
        heads: Number of these heads.
        split_values: Values of one token that the forward reads or writes outside of matrix products and attention,
            and of which a tensor-parallel rank has its part: activation functions, rotations, logits.
        whole_values: The same of which every tensor-parallel rank has all: norms and residual additions.
        routed: Experts, of which a token visits a few; ``None`` without.
        matrix_flops: FLOPs of one token's forward through its matrices.
        numel: Number of elements of all its parameters.
        aligned: Whether its parameters need no padding between each other.
    """

    name: str
    kind: str
    block: int
    tensors: tuple[Tensor, ...]
    matrices: tuple[tuple[int, int], ...] = ()
    attention_width: int = 0
    heads: int = 0
    split_values: int = 0
    whole_values: int = 0
    routed: Routed | None = None

    matrix_flops: int = field(init=False)
    numel: int = field(init=False)
    aligned: bool = field(init=False)

    def __post_init__(self) -> None:
        flops = sum(2 * rows * columns for rows, columns in self.matrices)
        if self.routed is not None:
            flops += self.routed.active * sum(2 * rows * columns for rows, columns in self.routed.matrices)
        object.__setattr__(self, "matrix_flops", flops)
        object.__setattr__(self, "numel", sum(tensor.numel for tensor in self.tensors))
        object.__setattr__(self, "aligned", all(tensor.numel % ALIGNMENT_BYTES == 0 for tensor in self.tensors))

    @property
    def work(self) -> object:
        """What the seconds of its computation depend on; equal for equal blocks."""
        values = self.split_values, self.whole_values, self.matrix_flops, self.numel
        return self.kind, bool(self.name), self.matrices, self.routed, self.attention_width, self.heads, values

    @property
    def is_experts(self) -> bool:
        """Whether the part is the experts of a block and nothing else."""
        return self.routed is not None and self.name.endswith(EXPERTS)

    @property
    def is_linear(self) -> bool:
        """Whether the part is one linear layer with its own weight."""
        return self.matrix_flops > 0 and all(tensor.name.rpartition(".")[0] == self.name for tensor in self.tensors)

    def weight_gradient_share(self, seq: int) -> float:
        """Share of a linear layer's backward after which the gradient of its weight exists, if that comes first.

        It is half of the FLOPs of its matrix. An attention that is counted with the layer comes after both gradients.

        Args:
            seq: Tokens per sequence.
        """
        return self.matrix_flops / self.forward_flops(1, seq) / 2

    def forward_flops(self, tokens: int, seq: int) -> int:
        """FLOPs of the forward of ``tokens`` tokens in sequences of ``seq``; attention is not halved for causality."""
        return tokens * (self.matrix_flops + 4 * seq * self.attention_width)


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
            raise SpecError("plan", [f"ep = {ep} should divide the model's experts = {model.experts or 'none'}"])
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
    names = _NAMES[model.kind]
    outside = itertools.count(model.layers + 1)  # numbers of blocks; only their equality counts
    embedding_tensors = _tensors(names.embedding, [("weight", model.embedding_parameters)])
    head_tensors = _tensors("lm_head", [("weight", model.head_parameters)]) if model.head_parameters else ()
    embedding = ModelPart(names.embedding, "embedding", next(outside), embedding_tensors, whole_values=2 * model.hidden)
    norm = ModelPart(
        names.norm, "rest", next(outside), _tensors(names.norm, norm_parameters(model)), whole_values=2 * model.hidden
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
    """Several parts as one unit."""
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
    path = f"layers.{layer}"
    modules = [
        ModelPart(
            f"{path}.{module.name}",
            "block",
            layer + 1,
            _tensors(f"{path}.{module.name}", module.parameters),
            module.matrices,
            module.attention_width,
            module.heads,
            module.split_values,
            module.whole_values,
            module.routed,
        )
        for module in block_modules(model, experts=model.experts is not None and layer >= model.dense_layers)
    ]
    if granularity == "module":
        return modules
    own = [part for part in modules if apart and part.is_experts]
    return [_joined(path, "block", layer + 1, [part for part in modules if part not in own]), *own]


@dataclass(frozen=True, slots=True)
class _Names:
    embedding: str
    norm: str


_NAMES = {
    "llama": _Names("embed_tokens", "norm"),
    "gpt": _Names("embed_in", "final_layer_norm"),
}


def _tensors(path: str, named: Iterable[tuple[str, int]]) -> tuple[Tensor, ...]:
    return tuple(Tensor(f"{path}.{name}", numel) for name, numel in named)
