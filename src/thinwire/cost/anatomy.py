"""The parts of a model as the runtime cuts it: units, their tensors and their FLOPs.

Names, shapes and order are those of the built-in Llama, its mixture of experts, and GPT. Units, padding and dealt
shares therefore equal the runtime's; a test compares them. Of other mixtures of experts, only sizes are alike.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from thinwire.errors import SpecError
from thinwire.program import (
    ALIGNMENT_BYTES,
    Axis,
    BufferInfo,
    Even,
    UnitInfo,
    axis_shape,
    deal,
    flat_numel,
    slot_offsets,
)
from thinwire.program.shares import LARGE_LEAF
from thinwire.program.wire import ITEMSIZE, is_excluded
from thinwire.spec import ModelSpec, Plan
from thinwire.spec.block_shapes import attention_width, block_matrices, expert_layers, expert_parameters, latent_norms

__all__ = ["EXPERTS", "ModelPart", "Routed", "Tensor", "alike", "largest_share", "parts", "units"]

EXPERTS = "mlp.experts"
"""Name of a block's experts below the block."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One parameter.

    Attributes:
        name: Name in ``named_parameters``.
        numel: Number of elements.
    """

    name: str
    numel: int


@dataclass(frozen=True, slots=True)
class Routed:
    """The experts of a part.

    Attributes:
        matrices: Rows and columns of one expert's matrices.
        experts: Number of experts that the tokens are spread over.
        active: Number of experts that a token visits.
    """

    matrices: tuple[tuple[int, int], ...]
    experts: int
    active: int


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


def units(model: ModelSpec, plan: Plan, shard: int = 0) -> tuple[UnitInfo, ...]:
    """The units of a model under a plan, as the program needs them.

    Args:
        model: Dimensions of the model.
        plan: The plan; its factors, dtype and exclusions count.
        shard: Number of the ``P`` shard; shares of unequal size differ between shards.

    Raises:
        SpecError: The plan cuts single blocks further than the rest, which has no price yet.
    """
    if any(unit.granularity not in (None, plan.granularity) for unit in plan.units):
        raise SpecError(
            f"plan {plan.name or plan.fingerprint()}",
            ["units: granularity of single blocks is executed, but neither planned nor simulated; leave it unset here"],
        )
    own = parts(model, plan.granularity, plan.tp, plan.ep)
    if plan.ep == 1:
        return _units(own, plan, shard)
    rest = iter(_units([part for part in own if not part.is_experts], plan, shard))
    experts = iter(_units([part for part in own if part.is_experts], plan.for_experts(), shard))
    return tuple(replace(next(experts), experts=True) if part.is_experts else next(rest) for part in own)


def _units(own: Sequence[ModelPart], plan: Plan, shard: int) -> tuple[UnitInfo, ...]:
    """The units of some parts, all of them under one plan."""
    if not (plan.units or plan.wire.exclude or plan.partition == "inter"):
        return _even_units(own, plan)
    cut = [(part, _kinds(part, plan)) for part in own]
    buffers = _flat_buffers(plan, cut)
    shares = iter(_shares(plan, buffers, shard))
    lengths, sizes = iter(buffer.numel for buffer in buffers), iter(buffer.itemsize for buffer in buffers)
    return tuple(
        UnitInfo(
            part.name,
            tuple(BufferInfo(next(lengths), next(sizes), True, next(shares), encoded) for encoded, _ in kinds),
            len(part.tensors),
            part.block,
            plan.override(part.name).keep_gathered if plan.units else None,
            plan.overlap.input_gradient and part.is_linear,
        )
        for part, kinds in cut
    )


def _even_units(cut: Iterable[ModelPart], plan: Plan) -> tuple[UnitInfo, ...]:
    """The units of a plan that treats all alike and cuts them evenly: parts of equal size share their buffers."""
    itemsize, (local, nodes) = ITEMSIZE[plan.compute_dtype], axis_shape(plan, Axis.SHARD)
    buffers: dict[int, tuple[BufferInfo, ...]] = {}
    made, first, owners = [], plan.overlap.input_gradient, local * nodes
    for part in cut:
        payload = part.numel if part.aligned else _payload(part.tensors, itemsize)
        if payload not in buffers:
            numel = flat_numel(payload, plan, itemsize)
            share = Even(numel // plan.params.ranks // owners, owners)
            buffers[payload] = (BufferInfo(numel, itemsize, True, share, True),)
        parameters = len(part.tensors)
        made.append(UnitInfo(part.name, buffers[payload], parameters, part.block, None, first and part.is_linear))
    return tuple(made)


def alike(parts: Iterable[ModelPart]) -> list[tuple[int, ModelPart]]:
    """Parts that compute differently, each with the number of parts that compute like it."""
    counts: dict[object, tuple[int, ModelPart]] = {}
    for part in parts:
        key = part.work
        counts[key] = counts.get(key, (0, part))[0] + 1, part
    return list(counts.values())


def largest_share(model: ModelSpec, plan: Plan) -> int:
    """Number of elements on the rank that owns the most optimizer states of the first ``P`` shard.

    The same as the largest sum of :func:`units`' shares, without a list of every owner's.

    Args:
        model: Dimensions of the model.
        plan: The plan; its factors, partition, dtype and exclusions count.
    """
    buffers = _flat_buffers(plan, [(part, _kinds(part, plan)) for part in parts(model, plan.granularity, plan.tp)])
    local, nodes = axis_shape(plan, Axis.SHARD)
    if plan.partition == "intra" or local * nodes == 1:
        return sum(buffer.numel // plan.optimizer.ranks for buffer in buffers)
    pieces = [piece for _, piece in _all_pieces(plan, buffers, 0)]
    owned: Counter[int] = Counter()
    for piece, owner in zip(pieces, deal(pieces, local * nodes), strict=True):
        owned[owner] += piece
    return max(owned.values())


class _FlatBuffer(NamedTuple):
    """A flat buffer of a unit, before it has owners.

    Attributes:
        tensors: Parameters in it.
        itemsize: Bytes of an element.
        numel: Elements, including padding.
    """

    tensors: tuple[Tensor, ...]
    itemsize: int
    numel: int


_Kinds = Sequence[tuple[bool, tuple[Tensor, ...]]]


def _flat_buffers(plan: Plan, cut: Iterable[tuple[ModelPart, _Kinds]]) -> list[_FlatBuffer]:
    """The flat buffers of all parts, in order."""
    made = []
    for part, kinds in cut:
        itemsize = ITEMSIZE[plan.unit_dtype(part.name) if plan.units else plan.compute_dtype]
        for _, tensors in kinds:
            whole = part.aligned and tensors is part.tensors
            payload = part.numel if whole else _payload(tensors, itemsize)
            made.append(_FlatBuffer(tensors, itemsize, flat_numel(payload, plan, itemsize)))
    return made


def _kinds(part: ModelPart, plan: Plan) -> _Kinds:
    """Tensors that may be encoded, and tensors that are always sent unencoded."""
    exact = bool(plan.units) and plan.override(part.name).codec is not None
    if exact or not plan.wire.exclude:
        return [(not exact, part.tensors)]
    excluded = {tensor: is_excluded(plan, tensor.name) for tensor in part.tensors}
    kinds = [(not out, tuple(t for t in part.tensors if excluded[t] is out)) for out in (False, True)]
    return [(encoded, tensors) for encoded, tensors in kinds if tensors]


def _payload(tensors: Sequence[Tensor], itemsize: int) -> int:
    """Elements of a flat buffer up to the end of its last parameter."""
    return slot_offsets([tensor.numel for tensor in tensors], itemsize)[-1] + tensors[-1].numel


def _shares(plan: Plan, buffers: Sequence[_FlatBuffer], shard: int) -> list[Sequence[int]]:
    local, nodes = axis_shape(plan, Axis.SHARD)
    owners = local * nodes
    if plan.partition == "intra" or owners == 1:
        return [Even(buffer.numel // plan.params.ranks // owners, owners) for buffer in buffers]
    pieces = _all_pieces(plan, buffers, shard)
    shares = [[0] * owners for _ in buffers]
    for (index, piece), owner in zip(pieces, deal([piece for _, piece in pieces], owners), strict=True):
        shares[index][owner] += piece
    return [tuple(share) for share in shares]


def _all_pieces(plan: Plan, buffers: Sequence[_FlatBuffer], shard: int) -> list[tuple[int, int]]:
    """The parts of tensors in a ``P`` shard: number of the buffer, and number of elements."""
    lengths = [buffer.numel // plan.params.ranks for buffer in buffers]
    return [
        (index, piece)
        for index, (buffer, length) in enumerate(zip(buffers, lengths, strict=True))
        for piece in _pieces(buffer.tensors, buffer.itemsize, shard * length, (shard + 1) * length)
    ]


def _pieces(tensors: Sequence[Tensor], itemsize: int, begin: int, end: int) -> Iterable[int]:
    """Number of elements that each parameter contributes to ``[begin, end)`` of its flat buffer."""
    offsets = slot_offsets([tensor.numel for tensor in tensors], itemsize)
    for tensor, offset in zip(tensors, offsets, strict=True):
        length = min(offset + tensor.numel, end) - max(offset, begin)
        if length > 0:
            yield length


# -- the built-in models -----------------------------------------------------------------------------------------

_LOGIT_VALUES = 10
"""Values that the loss reads or writes for each logit: cast to fp32, log-softmax, and their temporaries."""


@dataclass(frozen=True, slots=True)
class _Module:
    """A module of a block: its name below the block, its parameters, and what it computes besides; see ModelPart."""

    name: str
    parameters: tuple[tuple[str, int], ...]
    matrices: tuple[tuple[int, int], ...] = ()
    attention_width: int = 0
    heads: int = 0
    split_values: int = 0
    whole_values: int = 0
    routed: Routed | None = None


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
        tensor if "norm" in tensor.name else Tensor(tensor.name, -(-tensor.numel // tp)) for tensor in part.tensors
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
        names.norm, "rest", next(outside), _tensors(names.norm, _norm(model)), whole_values=2 * model.hidden
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
        for module in _block_modules(model, experts=model.experts is not None and layer >= model.dense_layers)
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


def _norm(model: ModelSpec) -> tuple[tuple[str, int], ...]:
    weight = (("weight", model.hidden),)
    return (*weight, ("bias", model.hidden)) if model.kind == "gpt" else weight


def _linear(rows: int, columns: int, *, bias: bool) -> tuple[tuple[str, int], ...]:
    weight = (("weight", rows * columns),)
    return (*weight, ("bias", rows)) if bias else weight


@lru_cache(maxsize=64)
def _block_modules(model: ModelSpec, *, experts: bool) -> tuple[_Module, ...]:
    linears = block_matrices(model, experts=experts)
    norms = ("input_layernorm", "post_attention_layernorm")
    of_attention = [name for name in linears if not name.startswith("mlp")]
    of_feed_forward = [name for name in linears if name.startswith("mlp")]
    order = [norms[0], *of_attention, norms[1], *of_feed_forward] if model.kind == "llama" else [*norms, *linears]
    split, whole = _kernel_values(model, experts=experts)
    modules = []
    vectors = latent_norms(model)
    for name in order:
        matrices = (linears[name],) if name in linears else ()
        bias = model.kind == "gpt" or (model.biases and (name in of_attention or name == "mlp.gate"))
        parameters = _linear(*linears[name], bias=bias) if name in linears else _norm(model)
        attention = (attention_width(model), model.heads) if name == of_attention[-1] else (0, 0)
        modules.append(_Module(name, parameters, matrices, *attention, split.get(name, 0), whole.get(name, 0)))
        if name in vectors:
            normalised, width = vectors[name]
            modules.append(_Module(normalised, (("weight", width),), whole_values=2 * width))
        if name == "mlp.gate":
            modules.append(_experts(model))
    return tuple(modules)


def _experts(model: ModelSpec) -> _Module:
    """All experts of a block, as tensors that hold the matrices of one kind of all experts."""
    assert model.experts is not None
    h, width, active = model.hidden, model.expert_ffn, model.active_experts
    parameters = [("gate_up_proj", model.experts * 2 * width * h), ("down_proj", model.experts * h * width)]
    if model.biases:
        parameters += [("gate_up_proj_bias", model.experts * 2 * width), ("down_proj_bias", model.experts * h)]
    # A token is copied for each expert and back, weighted and added up; SiLU and gate as in a feed-forward.
    values = active * (4 * h + 3 * width) + 4 * h
    routed = Routed(((2 * width, h), (h, width)), model.experts, active)
    return _Module(EXPERTS, tuple(parameters), split_values=values, routed=routed)


def _kernel_values(model: ModelSpec, *, experts: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Values of a token that kernels between the matrix products read and write in the forward, by module: those that
    tensor parallelism splits, and those that it does not. A norm reads and writes the stream once; a residual addition
    reads two and writes one; a rotation reads and writes its vector."""
    h, queries, kv = model.hidden, model.heads * model.head_dim, model.kv_hidden
    norms = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), 2 * h)
    if model.kind != "llama":
        # GELU, and dropout before each residual addition, which adds a read and a write (Korthikanti et al. 2022).
        return {"mlp.dense_h_to_4h": 2 * model.ffn}, {**norms, "attention.dense": 5 * h, "mlp.dense_4h_to_h": 5 * h}
    if model.latent is None:
        split = {"self_attn.q_proj": 2 * queries, "self_attn.k_proj": 2 * kv}
    else:  # only a part of the queries is rotated, and one key for all heads
        split = {"self_attn.kv_b_proj": 2 * (model.heads + 1) * model.latent.rotary}
    # SiLU and the product with the gate: two values in, one out.
    if not experts:
        return split | {"mlp.down_proj": 3 * model.ffn}, {**norms, "self_attn.o_proj": 3 * h, "mlp.down_proj": 3 * h}
    if model.shared_ffn:
        split["mlp.shared_expert.down_proj"] = 3 * model.shared_ffn
    return split, {**norms, "self_attn.o_proj": 3 * h, "mlp.gate": 3 * h}
