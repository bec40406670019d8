"""Expert parallelism: neighbouring data-parallel ranks share the experts of every block, and send each other tokens.

Every rank of a group of ``ep`` ranks holds an equal part of the experts. It sends each of its tokens to the ranks of
the experts that its router has chosen, by torch's all-to-all, computes what arrives with its own experts, and sends
the results back (GShard, arXiv 2006.16668). No token is dropped.

Experts are a part of the model by themselves, sharded over the ranks that hold the same ones. All other parameters are
data-parallel over all ranks. Gradients are means over all of them: those of an expert add up over the ranks of its
group, which have sent it tokens, so that they are divided by the size of the group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from thinwire.collectives.job.torch_groups import exchange_counts, exchange_rows
from thinwire.errors import UsageError
from thinwire.spec import Plan

NAME = "experts"
"""Name of a block's module of experts."""

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The forward of experts: hidden states ``(N, D)``, chosen experts ``(N, K)`` and their weights ``(N, K)``, to
``(N, D)``."""


class ExpertPart(nn.Module):
    """The experts that this rank holds, as a part of the model; its forward is that of the whole model.

    Args:
        whole: The model, which does not own the experts any more.
        experts: Its modules of experts, by name.
    """

    def __init__(self, whole: nn.Module, experts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        # Not as a module, because its parameters are not of this part.
        object.__setattr__(self, "_whole", whole)
        for name, module in experts.items():
            *path, last = name.split(".")
            holder: nn.Module = self
            for step in path:
                if step not in holder._modules:
                    holder.add_module(step, nn.Module())
                holder = holder.get_submodule(step)
            holder.add_module(last, module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the whole model."""
        whole: Any = self.__dict__["_whole"]
        return whole(*args, **kwargs)


def expert_modules(model: nn.Module, plan: Plan) -> dict[str, nn.Module]:
    """The modules of experts of a model of thinwire or of ``transformers``, by name.

    Raises:
        UsageError: The model has no experts that can be shared.
        SpecError: Their number is no multiple of ``ep``.
    """
    if not getattr(model, "shares_experts", True):
        raise UsageError(
            f"ep = {plan.ep} does not work with this model of transformers: experts of model_type = 'mixtral' and "
            "'qwen3_moe' can be shared, and those of thinwire's Llama; use ep = 1"
        )
    found = {
        name: module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == NAME and _is_stacked(module)
    }
    if not found:
        raise UsageError(
            f"ep = {plan.ep}, but {type(model).__name__} has no module {NAME!r} that stacks the matrices of experts: "
            "thinwire's Llama with experts has, and Mixtral and Qwen3-MoE of transformers; use ep = 1"
        )
    counts = {_number(module) for module in found.values()}
    uneven = sorted(count for count in counts if count % plan.ep)
    if uneven:
        raise plan.unsuitable(*(f"ep = {plan.ep} should divide the model's experts = {count}" for count in uneven))
    return found


def _number(module: nn.Module) -> int:
    """Number of experts that a module holds; 0 if it does not say."""
    number: Any = getattr(module, "num_experts", 0)
    return number if isinstance(number, int) else 0


def _is_stacked(module: nn.Module) -> bool:
    number = _number(module)
    parameters = list(module.parameters())
    return bool(parameters) and all(p.ndim > 1 and p.shape[0] == number for p in parameters)


def share_experts(model: nn.Module, experts: Mapping[str, nn.Module], mesh: DeviceMesh) -> ExpertPart:
    """Take this rank's experts out of a model, in place, and let the model exchange tokens with the other ranks of the
    one-dimensional mesh. Returns these experts; their parameters are DTensors."""
    for name, module in experts.items():
        parent, _, last = name.rpartition(".")
        holder = model.get_submodule(parent)
        del holder._modules[last]
        holder.__dict__[last] = module  # called as before, and no part of the model
        forward: Forward = module.forward
        _cut(module, mesh)
        module.forward = _Shared(module, forward, mesh.get_group())
    return ExpertPart(model, experts)


def _cut(module: nn.Module, mesh: DeviceMesh) -> None:
    """Keep this rank's experts."""
    ways, index = mesh.size(), mesh.get_local_rank()
    parameters: dict[str, Any] = module._parameters
    for name, whole in parameters.items():
        if whole is not None:
            mine = whole.detach().chunk(ways)[index].clone()
            cut = DTensor.from_local(mine, mesh, [Shard(0)], run_check=False)
            parameters[name] = nn.Parameter(cut, requires_grad=whole.requires_grad)
    module.num_experts = _number(module) // ways  # type: ignore[assignment]


class _Shared:
    """The forward of a module of experts that ranks share: of this rank's, by the module's own forward."""

    def __init__(self, module: nn.Module, forward: Forward, group: dist.ProcessGroup) -> None:
        self._module, self._forward, self._group, self._ways = module, forward, group, group.size()

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Send tokens to their experts, and add up what these make of them.

        Args:
            hidden_states: ``(N, D)``.
            top_k_index: Numbers of the chosen experts among those of all ranks, int64, ``(N, K)``.
            top_k_weights: Their weights, ``(N, K)``.

        Returns:
            ``(N, D)``.
        """
        mine = _number(self._module)
        chosen = top_k_index.flatten()
        order = chosen.argsort(stable=True)
        tokens = order // top_k_index.shape[1]
        counts = torch.bincount(chosen, minlength=self._ways * mine).view(self._ways, mine)
        theirs = exchange_counts(counts, self._group)
        sent, received = counts.sum(1).tolist(), theirs.sum(1).tolist()
        arrived = exchange_rows(hidden_states[tokens], received, sent, self._group)
        made = self._compute(arrived, theirs, top_k_weights.dtype)
        back = exchange_rows(made, sent, received, self._group)
        weighted = back * top_k_weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(hidden_states).index_add(0, tokens, weighted.to(hidden_states.dtype))

    def _compute(self, rows: Tensor, counts: Tensor, dtype: torch.dtype) -> Tensor:
        """What this rank's experts make of the rows of all ranks.

        Args:
            rows: Rows by rank, and by expert for each rank, ``(R, D)``.
            counts: Number of rows of each rank for each expert, ``(ranks, experts)``.
            dtype: Dtype of weights.
        """
        numbers = torch.arange(counts.shape[1], device=rows.device).repeat(self._ways)
        expert = numbers.repeat_interleave(counts.flatten(), output_size=rows.shape[0])
        with _local_parameters(self._module) as parameters:
            if not rows.shape[0]:  # the backward still has to take part in the exchange of the others
                return rows + sum(parameter.flatten()[:0].sum() for parameter in parameters)
            ones = torch.ones(rows.shape[0], 1, dtype=dtype, device=rows.device)
            made = self._forward(_Scaled.apply(rows, self._ways), expert.unsqueeze(1), ones)
        scaled: Tensor = _Scaled.apply(made, 1 / self._ways)
        return scaled


@contextlib.contextmanager
def _local_parameters(module: nn.Module) -> Iterator[list[Tensor]]:
    """Context in which a module's parameters are plain tensors: this rank's parts of them."""
    parameters: dict[str, Any] = module._parameters
    local: dict[str, Tensor] = {name: _Local.apply(p) for name, p in parameters.items() if isinstance(p, DTensor)}
    module.__dict__.update(local)
    try:
        yield list(local.values())
    finally:
        for name in local:
            del module.__dict__[name]


class _Scaled(torch.autograd.Function):
    """The tensor, whose gradient is multiplied by a factor on its way back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None]:
        return grad_outputs[0] * ctx.factor, None


class _Local(torch.autograd.Function):
    """This rank's part of a DTensor, like its ``to_local()``, but no view: autograd refuses views of memory that was
    written to since, as gathering parameters anew does."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        ctx.mesh, ctx.placements = parameter.device_mesh, parameter.placements
        local = parameter._local_tensor
        alias = local.new_empty(0)
        return alias.set_(local.untyped_storage(), local.storage_offset(), local.shape, local.stride())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> DTensor:
        return DTensor.from_local(grad_outputs[0], ctx.mesh, ctx.placements, run_check=False)
