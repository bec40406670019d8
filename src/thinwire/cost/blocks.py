"""Parts of a model, and the modules of one block of the built-in models: parameters, matrices, what kernels move.

Names, shapes and order are those of the built-in Llama, its mixture of experts, and GPT. Of other mixtures of experts,
only sizes are alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from thinwire.program import ALIGNMENT_BYTES
from thinwire.spec import ModelSpec
from thinwire.spec.models.model import attention_width, block_matrices, latent_norms

EXPERTS = "mlp.experts"
"""Name of a block's experts below the block."""


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
class Tensor:
    """One parameter, by its name in ``named_parameters``."""

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
        """
        return self.matrix_flops / self.forward_flops(1, seq) / 2

    def forward_flops(self, tokens: int, seq: int) -> int:
        """FLOPs of the forward of ``tokens`` tokens in sequences of ``seq``; attention is not halved for causality."""
        return tokens * (self.matrix_flops + 4 * seq * self.attention_width)


def norm_parameters(model: ModelSpec) -> tuple[tuple[str, int], ...]:
    weight = (("weight", model.hidden),)
    return (*weight, ("bias", model.hidden)) if model.kind == "gpt" else weight


def block_modules(model: ModelSpec, layer: int) -> list[ModelPart]:
    experts = model.experts is not None and layer >= model.dense_layers
    linears = block_matrices(model, experts=experts)
    norms = ("input_layernorm", "post_attention_layernorm")
    of_attention = [name for name in linears if not name.startswith("mlp")]
    of_feed_forward = [name for name in linears if name.startswith("mlp")]
    order = [norms[0], *of_attention, norms[1], *of_feed_forward] if model.kind == "llama" else [*norms, *linears]
    split, whole = _kernel_values(model, experts=experts)
    vectors = latent_norms(model)

    def module(name: str, parameters: Iterable[tuple[str, int]], **computed: Any) -> ModelPart:
        path = f"layers.{layer}.{name}"
        return ModelPart(path, "block", layer + 1, tensors_of(path, parameters), **computed)

    modules = []
    for name in order:
        computed: dict[str, Any] = {"split_values": split.get(name, 0), "whole_values": whole.get(name, 0)}
        if name == of_attention[-1]:
            computed |= {"attention_width": attention_width(model), "heads": model.heads}
        if name in linears:
            bias = model.kind == "gpt" or (model.biases and (name in of_attention or name == "mlp.gate"))
            rows, columns = linears[name]
            parameters = [("weight", rows * columns), *([("bias", rows)] if bias else [])]
            modules.append(module(name, parameters, matrices=(linears[name],), **computed))
        else:
            modules.append(module(name, norm_parameters(model), **computed))
        if name in vectors:
            normalised, width = vectors[name]
            modules.append(module(normalised, [("weight", width)], whole_values=2 * width))
        if name == "mlp.gate":
            parameters, values, routed = _experts(model)
            modules.append(module(EXPERTS, parameters, split_values=values, routed=routed))
    return modules


def _experts(model: ModelSpec) -> tuple[list[tuple[str, int]], int, Routed]:
    """All experts of a block: tensors that hold the matrices of one kind of all experts, values that their kernels
    read and write for a token, and what a token visits."""
    assert model.experts is not None
    h, width, active = model.hidden, model.expert_ffn, model.active_experts
    parameters = [("gate_up_proj", model.experts * 2 * width * h), ("down_proj", model.experts * h * width)]
    if model.biases:
        parameters += [("gate_up_proj_bias", model.experts * 2 * width), ("down_proj_bias", model.experts * h)]
    # A token is copied for each expert and back, weighted and added up; SiLU and gate as in a feed-forward.
    values = active * (4 * h + 3 * width) + 4 * h
    return parameters, values, Routed(((2 * width, h), (h, width)), model.experts, active)


@lru_cache(maxsize=64)
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


def tensors_of(path: str, named: Iterable[tuple[str, int]]) -> tuple[Tensor, ...]:
    """Parameters of a module by their names below it."""
    return tuple(Tensor(f"{path}.{name}", numel) for name, numel in named)
