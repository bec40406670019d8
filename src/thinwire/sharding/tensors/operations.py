"""Performs torch operators on share tensors: on each piece separately, or by combining the ranks' reductions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from thinwire.errors import UsageError
from thinwire.sharding.tensors.spec import NeedsWhole, ShareSpec

aten = torch.ops.aten

Share = Any
"""A share tensor; its class depends on this module."""


def perform(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Perform one operator on share tensors, which are of class ``cls``.

    Raises:
        NeedsWhole: The operator cannot act on pieces.
    """
    special = _SPECIAL.get(func)
    if special is not None:
        return special(cls, func, args, kwargs)
    name = func.overloadpacket.__name__
    if name.startswith(("_foreach_", "_fused_", "_amp_foreach_")):
        return _on_lists(cls, func, name, args, kwargs)
    if torch.Tag.nondeterministic_seeded in func.tags:
        return _random(cls, func, args, kwargs)
    if torch.Tag.pointwise in func.tags or func in _ELEMENTWISE:
        return _elementwise(cls, func, args, kwargs)
    raise NeedsWhole


# -- element by element ----------------------------------------------------------------------------------------


def _elementwise(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    spec = _common_cut(cls, [*args, *kwargs.values()])
    kwargs.pop("memory_format", None)  # pieces are flat
    written = _written(cls, func, args, kwargs)
    with _writing(written):
        results = func(
            *(_piece_of(cls, value, spec) for value in args),
            **{key: _piece_of(cls, value, spec) for key, value in kwargs.items()},
        )
    if written:
        return written[0] if len(written) == 1 else tuple(written)
    return _wrapped(cls, results, spec)


def _common_cut(cls: Any, values: Sequence[Any]) -> ShareSpec:
    """The common cut of all share tensors, which is also the cut of the result."""
    shares = [value for value in values if isinstance(value, cls)]
    spec: ShareSpec = next((share.spec for share in shares if share.spec.shape.numel() != 1), shares[0].spec)
    for value in values:
        if isinstance(value, cls):
            if not spec.same_cut(value.spec):
                raise NeedsWhole
        elif isinstance(value, torch.Tensor) and value.dim() and not _broadcasts_to(value.shape, spec.shape):
            raise NeedsWhole
    return spec


def _broadcasts_to(shape: torch.Size, whole: torch.Size) -> bool:
    return len(shape) <= len(whole) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(whole), strict=False))


def _piece_of(cls: Any, value: Any, spec: ShareSpec) -> Any:
    if isinstance(value, cls):
        return value.piece
    if isinstance(value, torch.Tensor):
        value = _averaged(value, spec)
        return value if value.dim() == 0 else spec.cut(value)
    return value


def _averaged(value: torch.Tensor, spec: ShareSpec) -> torch.Tensor:
    """Average a plain tensor over ranks in a backward. There it is a gradient of this rank's loss, or a factor of such
    a gradient, but the gradient of a share is the mean over ranks."""
    if torch._C._current_graph_task_id() == -1 or not value.is_floating_point():
        return value
    if value.numel() and all(stride == 0 for stride in value.stride()):
        value = value.reshape(-1)[:1]
        return spec.holders.mean(value).reshape(()).expand(value.shape)
    return spec.holders.mean(value)


def _wrapped(cls: Any, results: Any, spec: ShareSpec) -> Any:
    if isinstance(results, tuple | list):
        return type(results)(_wrapped(cls, result, spec) for result in results)
    return cls(results, spec) if isinstance(results, torch.Tensor) else results


def _written(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Share]:
    """The arguments that an operator changes.

    Raises:
        NeedsWhole: The operator would change a plain tensor.
    """
    written = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) and not argument.kwarg_only else kwargs.get(argument.name)
        if value is None:
            continue
        if not isinstance(value, cls):
            raise NeedsWhole
        written.append(value)
    return written


@contextlib.contextmanager
def _writing(shares: Sequence[Share]) -> Iterator[None]:
    """Notify the runtime before and after the pieces of share tensors change."""
    live = [share.live for share in shares if share.live is not None]
    for owner in live:
        owner.before_write()
    yield
    for owner in live:
        owner.after_write()


# -- lists of tensors ------------------------------------------------------------------------------------------


def _on_lists(cls: Any, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if name == "_foreach_norm":
        bound = _bound(func, args, kwargs)
        return [_norm(cls, tensor, bound.get("ord", 2), bound.get("dtype")) for tensor in args[0]]
    if name == "_foreach_max":
        return [tensor.max() for tensor in args[0]]
    if name in ("_foreach_mm", "_foreach_powsum"):
        raise NeedsWhole
    first = next(value for value in args if isinstance(value, list | tuple))
    specs = [tensor.spec if isinstance(tensor, cls) else None for tensor in first]
    lists = [value for value in [*args, *kwargs.values()] if isinstance(value, list | tuple)]
    own = [share for value in lists for share in value if isinstance(share, cls)]
    written = own if name.endswith("_") else []  # schemas do not mark writes to tensors inside lists
    with _writing(written):
        results = func(
            *(_list_pieces(cls, value, specs) for value in args),
            **{key: _list_pieces(cls, value, specs) for key, value in kwargs.items()},
        )
    if name.startswith("_amp_foreach_"):
        _agree_on_overflow(own, args[1])
    if results is None:
        return None
    return [
        result if spec is None else _wrapped(cls, result, spec) for result, spec in zip(results, specs, strict=True)
    ]


def _list_pieces(cls: Any, value: Any, specs: Sequence[ShareSpec | None]) -> Any:
    if not isinstance(value, list | tuple) or len(value) != len(specs):
        return value
    pieces = []
    for item, spec in zip(value, specs, strict=True):
        if isinstance(item, cls) and (spec is None or not spec.same_cut(item.spec)):
            raise NeedsWhole
        pieces.append(item if spec is None else _piece_of(cls, item, spec))
    return pieces


def _agree_on_overflow(shares: Sequence[Share], found_inf: torch.Tensor) -> None:
    """Combine a gradient scaler's overflow flags: an overflow on any rank counts on all ranks."""
    everyone = shares[0].spec.holders.combined(found_inf.detach().double().cpu().reshape(1))
    overflowed = float(everyone.amax())
    found_inf.fill_(overflowed)
    if overflowed:
        for share in shares:
            if share.live is not None:
                share.live.overflowed()


# -- reductions ------------------------------------------------------------------------------------------------


def _norm(cls: Any, tensor: torch.Tensor, order: Any = 2, dtype: torch.dtype | None = None) -> Any:
    """Norm of the whole tensor, 0-D."""
    if not isinstance(tensor, cls):
        return torch.linalg.vector_norm(tensor, order, dtype=dtype)
    share: Share = tensor
    order, result = float(order), dtype or share.dtype
    cached = share.live.norms(order) if share.live is not None else None
    if cached is not None:
        return cached.to(result)
    partial = power_sum(share.piece, order)
    return from_power_sums(share.spec.holders.combined(partial.reshape(1)), order)[0].to(result).to(share.device)


def power_sum(piece: torch.Tensor, order: float) -> torch.Tensor:
    """The contribution of a piece, 1-D, to a norm, whose order may be infinite: float64, 0-D."""
    if piece.numel() == 0:
        return torch.full((), float("inf") if order == float("-inf") else 0.0, dtype=torch.float64, device=piece.device)
    norm = torch.linalg.vector_norm(piece.detach(), order, dtype=torch.promote_types(piece.dtype, torch.float32))
    norm = norm.double()
    return norm if order in (0.0, float("inf"), float("-inf")) else torch.pow(norm, order)


def from_power_sums(everyone: torch.Tensor, order: float) -> torch.Tensor:
    """Compute norms, float64 ``[k]``, from the contributions of all pieces, float64 ``[pieces, k]``."""
    if order == float("inf"):
        return everyone.amax(0)
    if order == float("-inf"):
        return everyone.amin(0)
    total = everyone.sum(0)
    return total if order == 0.0 else torch.pow(total, 1.0 / order)


def _vector_norm(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bound = _bound(func, args, kwargs)
    _over_all(bound)
    order = bound.get("ord", bound.get("p", 2))
    return _norm(cls, bound["self"], 2 if order is None else order, bound.get("dtype"))


def _reduction(
    reduce: Callable[[torch.Tensor], torch.Tensor],
    combine: Callable[[torch.Tensor], torch.Tensor],
    neutral: float,
    result: torch.dtype | None = None,
) -> Callable[..., Any]:
    """Create an operator that reduces a whole tensor to one number: ``reduce`` makes a piece a 0-D tensor (an empty one
    counts as ``neutral``), and ``combine`` makes the results of all pieces, ``[pieces, 1]``, one. It has the dtype of
    ``result``, or of the tensor."""

    def perform_reduction(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bound = _bound(func, args, kwargs)
        _over_all(bound)
        share: Share = bound["self"]
        if not share.spec.shape.numel():
            raise NeedsWhole
        piece, holders = share.piece.detach(), share.spec.holders
        if share.dtype.is_floating_point or share.dtype.is_complex:
            partial = reduce(piece).double().cpu() if piece.numel() else _number(neutral, torch.float64)
            value = combine(holders.combined(partial.reshape(1)))
        else:  # float64, which travels, would round an integer, and holds each half of it
            limits = torch.iinfo(torch.int64)
            least = _number(min(max(neutral, limits.min), limits.max), torch.int64)
            partial = reduce(piece).long().cpu() if piece.numel() else least
            halves = holders.combined(torch.stack([partial >> 32, partial & 0xFFFFFFFF])).long()
            value = combine((halves[:, :1] << 32) + halves[:, 1:])
        dtype = bound.get("dtype") or result or share.dtype
        if reduce is _wide_sum and not dtype.is_floating_point:
            dtype = torch.int64  # as in torch
        return value.reshape(()).to(dtype).to(share.device)

    return perform_reduction


def _mean(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    count = args[0].spec.shape.numel()
    return _reduction(_wide_sum, lambda everyone: everyone.sum(0) / count, 0.0)(cls, func, args, kwargs)


def _number(value: float, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(value, dtype=dtype, device="cpu")


def _wide_sum(piece: torch.Tensor) -> torch.Tensor:
    # Sums of integers are exact, and mps has no float64.
    plain = piece.device.type == "mps" or not piece.is_floating_point()
    return piece.sum() if plain else piece.sum(dtype=torch.float64)


def _equal(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if args[0].shape != args[1].shape:
        return False
    spec = _common_cut(cls, args)
    left, right = (each.piece if isinstance(each, cls) else spec.cut(each) for each in args)
    same = torch.tensor([float(torch.equal(left, right))], dtype=torch.float64, device="cpu")
    return bool(spec.holders.combined(same).amin() > 0)


def _bound(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _over_all(bound: dict[str, Any]) -> None:
    """Accept only reductions over all dimensions.

    Raises:
        NeedsWhole: The reduction keeps dimensions.
    """
    if bound.get("dim") not in (None, [], ()) or bound.get("keepdim"):
        raise NeedsWhole


# -- single operators ------------------------------------------------------------------------------------------


def _alias(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Create another share tensor over the same piece, with the same runtime behind it."""
    share = args[0]
    if func not in (aten.detach.default, aten.alias.default, aten.lift_fresh.default):
        shape = torch.Size(args[1])
        if -1 in shape or shape != share.spec.shape:
            raise NeedsWhole
    return share.alias()


def _copy(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy into a share from another share or a plain tensor; gathers the source if the cuts differ."""
    target, source = args[0], args[1]
    if not isinstance(target, cls):
        raise NeedsWhole
    if isinstance(source, cls) and not target.spec.same_cut(source.spec):
        source = source.full_tensor()
    elif not isinstance(source, cls) and hasattr(source, "full_tensor"):
        source = source.full_tensor()  # a DTensor
    if not isinstance(source, cls) and source.dim() and not _broadcasts_to(source.shape, target.spec.shape):
        raise RuntimeError(f"a tensor of shape {tuple(source.shape)} cannot be copied into {target!r}")
    with _writing([target]):
        target.piece.copy_(source.piece if isinstance(source, cls) else target.spec.cut(source), *args[2:], **kwargs)
    return target


def _random(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw the whole tensor on every rank with the first rank's generator, and keep this rank's piece. The values are
    those that a single process would draw."""
    share = args[0]
    if any(isinstance(value, cls) for value in [*args[1:], *kwargs.values()]):
        raise NeedsWhole
    in_place = bool(_written(cls, func, args, kwargs)) if isinstance(share, cls) else False
    if not in_place and not func.overloadpacket.__name__.endswith("_like"):
        raise NeedsWhole
    spec: ShareSpec = share.spec
    whole = torch.empty(spec.shape, dtype=kwargs.get("dtype") or share.dtype, device=share.device)
    with first_generator(spec, share.device, kwargs.get("generator")):
        drawn = func(whole, *args[1:], **kwargs)
    if not in_place:
        return cls(spec.cut(drawn).clone(), spec)
    with _writing([share]):
        share.piece.copy_(spec.cut(drawn))
    return share


@contextlib.contextmanager
def first_generator(spec: ShareSpec, device: torch.device, given: torch.Generator | None) -> Iterator[None]:
    """Use the state of the first rank's generator. Afterwards, only the first rank's generator has advanced."""
    if spec.pieces == 1 and spec.length == 0:
        yield
        return
    if given is None:
        given = _generator_of(device)
    own = given.get_state()
    first = spec.holders.first(own)
    if torch.equal(own, first):
        yield
        return
    given.set_state(first)
    try:
        yield
    finally:
        given.set_state(own)


def _generator_of(device: torch.device) -> torch.Generator:
    """The generator that torch draws with on a device; one without a number is the current card."""
    if device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def _refused(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = args[0].spec.name if hasattr(args[0], "spec") else "a parameter"
    raise UsageError(
        f"{func.overloadpacket.__name__} would replace the memory of {name}, which the runtime would miss: use copy_()"
    )


def _item(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args[0].spec.shape.numel() != 1:
        raise NeedsWhole
    return args[0].full_tensor().item()


_ELEMENTWISE = {
    aten._to_copy.default,
    aten.copysign_.Tensor,
    aten.empty_like.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.full_like.default,
    aten.masked_fill_.Scalar,
    aten.masked_fill_.Tensor,
    aten.ones_like.default,
    aten.zero_.default,
    aten.zeros_like.default,
}
"""Operators that act element by element but lack the ``pointwise`` tag."""

_SPECIAL: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.lift_fresh.default: _alias,
    aten.view.default: _alias,
    aten._unsafe_view.default: _alias,
    aten.expand.default: _alias,
    aten.copy_.default: _copy,
    aten.set_.source_Storage: _refused,
    aten.set_.source_Tensor: _refused,
    aten.resize_.default: _refused,
    aten._local_scalar_dense.default: _item,
    aten.equal.default: _equal,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.norm.Scalar: _vector_norm,
    aten.norm.ScalarOpt_dtype: _vector_norm,
    aten.sum.default: _reduction(_wide_sum, lambda everyone: everyone.sum(0), 0.0),
    aten.sum.dim_IntList: _reduction(_wide_sum, lambda everyone: everyone.sum(0), 0.0),
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.max.default: _reduction(torch.amax, lambda everyone: everyone.amax(0), float("-inf")),
    aten.amax.default: _reduction(torch.amax, lambda everyone: everyone.amax(0), float("-inf")),
    aten.min.default: _reduction(torch.amin, lambda everyone: everyone.amin(0), float("inf")),
    aten.amin.default: _reduction(torch.amin, lambda everyone: everyone.amin(0), float("inf")),
    aten.all.default: _reduction(torch.all, lambda everyone: everyone.amin(0), 1.0, torch.bool),
    aten.any.default: _reduction(torch.any, lambda everyone: everyone.amax(0), 0.0, torch.bool),
    aten.count_nonzero.dim_IntList: _reduction(torch.count_nonzero, lambda everyone: everyone.sum(0), 0.0, torch.int64),
}
