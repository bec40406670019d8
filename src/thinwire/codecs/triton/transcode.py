# mypy: disable-error-code="no-untyped-def,no-any-return,untyped-decorator"
"""One kernel for every codec that treats values alike: a tensor or the sum of messages comes in, a tensor or messages
go out, and what is between stays in registers.

Shapes: R rows of V values are a program's tile, G = V / 8. A row is a block of the message that is made, if it has
blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.codecs.triton.launch import ceil_div, launch, power_of_two
from thinwire.codecs.triton.quantize import INF_BITS, key_of, quantize, rotated, slice_seed
from thinwire.codecs.triton.slices import Slices, slice_of
from thinwire.codecs.triton.tiles import (
    butterflies,
    flip_signs,
    groups,
    load,
    load_codes,
    narrow,
    places,
    store,
    store_codes,
    widen,
)
from thinwire.spec import CodecSpec

__all__ = ["Form", "largest_keys", "transcode"]

TILE = 2048
"""Values of a tile, unless a block is longer: 16 for each of 128 threads."""
LARGE_TILE = 4096
"""Tiles of this size take twice the threads."""
PARTIALS = 256
"""Partial maxima of a message with one scale."""


@dataclass(frozen=True, slots=True)
class Form:
    """How values lie in memory: the name of a dtype, or ``int`` with the parameters of a block codec."""

    kind: str
    bits: int = 0
    block: int = 0
    """Values per scale; 0 with one scale for all."""
    hadamard: bool = False
    stochastic: bool = False
    searches: bool = False

    @classmethod
    def of_tensor(cls, dtype: torch.dtype) -> Form:
        """Values of a dtype one after the other."""
        return cls(str(dtype).removeprefix("torch."))

    @classmethod
    def of_message(cls, spec: CodecSpec, encoded: torch.dtype) -> Form:
        """A codec's message of a tensor of a dtype."""
        if spec.family == "int":
            assert spec.bits is not None
            hadamard, stochastic = "hadamard" in spec.options, "stochastic" in spec.options
            return cls("int", spec.bits, spec.block or 0, hadamard, stochastic, spec.searches_clip)
        return cls.of_tensor({"bf16": torch.bfloat16, "fp16": torch.float16}.get(spec.family, encoded))

    @property
    def element(self) -> torch.dtype:
        """What the kernel's pointer points to."""
        if self.kind == "int":
            return {8: torch.int8, 4: torch.int32, 2: torch.int16}.get(self.bits, torch.uint8)
        # bf16 by its bits, see tiles.py.
        return {"float32": torch.float32, "bfloat16": torch.int16, "float16": torch.float16}[self.kind]

    def view(self, x: Tensor) -> Tensor:
        """A tensor, or messages, as the kernel takes them."""
        return x.view(self.element)


def transcode(
    source: Tensor,
    source_form: Form,
    target: Tensor,
    target_form: Form,
    numel: int,
    *,
    bounds: Sequence[tuple[int, int]] | None = None,
    keys: Tensor | None = None,
    scale: float = 1.0,
    seed: int = 0,
    add: bool = False,
    raw: bool = False,
) -> None:
    """Read values and write them.

    Args:
        source: a 1-D tensor; or messages, uint8 (k, bytes) with rows that start at multiples of 16 bytes.
        source_form: its form.
        target: a 1-D tensor; or messages, as for ``source``.
        target_form: its form.
        numel: values in each message, or in the longest slice.
        bounds: the slices of ``source`` that become messages; all of it if not given.
        keys: of :func:`largest_keys`, for one scale per message.
        scale: factor of the sum.
        seed: folded, for stochastic rounding.
        add: to what is in ``target``.
        raw: words of ``target``'s size are copied as they are.
    """
    num_slices = 1 if bounds is None else len(bounds)
    slices = Slices.of(bounds, source)
    rows, columns, block = _tile(source_form, target_form)
    grid = (ceil_div(numel, rows * block), num_slices)
    # Distances between rows in units of 16 bytes: so the compiler knows that rows are aligned.
    target_step = target.stride(0) * target.element_size() // 16 if target.dim() == 2 else 0
    launch(
        _transcode,
        grid,
        source_form.view(source),
        source.view(torch.int32) if source_form.kind == "int" else source,
        source.stride(0) // 16 if source.dim() == 2 and len(source) > 1 else 0,
        target_form.view(target),
        target.view(torch.int32) if target_form.kind == "int" else target,
        target,
        target_step,
        target if keys is None else keys,
        slices.table,
        numel,
        slices.start,
        slices.step,
        scale,
        seed - (1 << 32) if seed >= 1 << 31 else seed,
        SOURCE_KIND=source_form.kind,
        SOURCE_BITS=source_form.bits,
        SOURCE_BLOCK=source_form.block,
        SOURCE_HADAMARD=source_form.hadamard,
        SOURCE_UNIT=16 // source_form.element.itemsize,
        TARGET_KIND=target_form.kind,
        TARGET_BITS=target_form.bits,
        TARGET_BLOCK=target_form.block,
        TARGET_HADAMARD=target_form.hadamard,
        TARGET_UNIT=16 // target_form.element.itemsize,
        SEARCH=target_form.searches,
        STOCHASTIC=target_form.stochastic,
        COUNT=len(source) if source.dim() == 2 else 1,
        SLICES=slices.mode,
        PARTIALS=0 if keys is None else PARTIALS,
        ADD=add,
        RAW=raw,
        R=rows,
        V=columns,
        BLOCK=block,
        num_warps=8 if rows * columns >= LARGE_TILE else 4,
    )


def _tile(source: Form, target: Form) -> tuple[int, int, int]:
    """R, V, and how many of V are used. A rotated source needs its blocks whole, and all of V used."""
    least = max(TILE, source.block if source.hadamard else 0)
    block = target.block or least
    columns = power_of_two(block)
    assert block == columns or not source.hadamard
    return max(least // columns, 1), columns, block


# ------------------------------------------------------------------------------------------------------ device


# Whole tiles are read and written without masks, so that kernels are no better for knowing anything of the lengths.
@triton.jit(do_not_specialize=["source_step", "target_step", "numel", "seed"])
def _transcode(
    source,
    source_words,
    source_step,
    target,
    target_words,
    target_bytes,
    target_step,
    keys,
    table,
    numel,
    start,
    step,
    scale,
    seed,
    SOURCE_KIND: tl.constexpr,
    SOURCE_BITS: tl.constexpr,
    SOURCE_BLOCK: tl.constexpr,
    SOURCE_HADAMARD: tl.constexpr,
    SOURCE_UNIT: tl.constexpr,
    TARGET_KIND: tl.constexpr,
    TARGET_BITS: tl.constexpr,
    TARGET_BLOCK: tl.constexpr,
    TARGET_HADAMARD: tl.constexpr,
    TARGET_UNIT: tl.constexpr,
    SEARCH: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    COUNT: tl.constexpr,
    SLICES: tl.constexpr,
    PARTIALS: tl.constexpr,
    ADD: tl.constexpr,
    RAW: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    base = tl.program_id(0).to(tl.int64) * (R * BLOCK)
    # In 64 bits: numbers of bits are computed from it.
    offset, numel = slice_of(table, numel, start, step, row, SLICES)
    if base >= numel:
        return
    source += offset
    rem = tl.minimum(numel - base, R * BLOCK).to(tl.int32)
    target_at = row * target_step
    if RAW:
        store(target + target_at * TARGET_UNIT + base, load(source + base, rem, R, V, BLOCK), rem, R, V, BLOCK)
    else:
        x_RV = _values(
            source, source_words, numel, base, rem,
            SOURCE_KIND, SOURCE_BITS, SOURCE_BLOCK, SOURCE_HADAMARD, R, V, BLOCK,
        )  # fmt: skip
        source_at = row * 0
        for _ in range(1, COUNT):
            source_at += source_step
            x_RV += _values(
                source + source_at * SOURCE_UNIT, source_words + source_at * 4, numel, base, rem,
                SOURCE_KIND, SOURCE_BITS, SOURCE_BLOCK, SOURCE_HADAMARD, R, V, BLOCK,
            )  # fmt: skip
        x_RV *= scale
        target += target_at * TARGET_UNIT
        if TARGET_KIND == "int":
            if SLICES != "same":
                seed = slice_seed(seed, row)
            _encode(
                target, target_words + target_at * 4, target_bytes + target_at * 16, x_RV, keys, numel, base, rem, seed,
                TARGET_BITS, TARGET_BLOCK, TARGET_HADAMARD, SEARCH, STOCHASTIC, PARTIALS, R, V, BLOCK,
            )  # fmt: skip
        else:
            if ADD:
                x_RV = load(target + base, rem, R, V, BLOCK) + x_RV
            store(target + base, narrow(x_RV, TARGET_KIND), rem, R, V, BLOCK)


@triton.jit
def _values(
    source,
    words,
    numel,
    base,
    rem,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    SCALED: tl.constexpr,
    HADAMARD: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A tile of a tensor or message. SCALED: values per scale, which need not be the tile's BLOCK."""
    if KIND == "int":
        code = load_codes(source, base, rem, R, V, BLOCK, BITS)
        if HADAMARD:
            # Rows of the tile are as long as they are wide, and it holds whole blocks: see _tile.
            ROWS: tl.constexpr = R * V // SCALED
            code_RV = tl.reshape(code, (ROWS, SCALED))
            turned_RV = flip_signs(butterflies(code_RV, ROWS, SCALED), SCALED)
            whole_R = (tl.arange(0, ROWS) + 1) * SCALED <= rem
            code = tl.reshape(tl.where(whole_R[:, None], turned_RV, code_RV), (R, V // 8, 8))
        words += _scales_at(numel, BITS)
        if SCALED == 0:
            x_RV = tl.reshape(code * tl.load(words).to(tl.float32, bitcast=True), (R, V))
        else:
            group_RG, inside_RG = groups(rem, R, V, BLOCK)
            words += base // SCALED
            scale_RG = (group_RG * 8 + (base % SCALED).to(tl.int32)) // SCALED
            scale_RG = tl.load(words + scale_RG, mask=inside_RG, other=0).to(tl.float32, bitcast=True)
            x_RV = tl.reshape(code * scale_RG[:, :, None], (R, V))
    else:
        x_RV = widen(load(source + base, rem, R, V, BLOCK), KIND)
    return x_RV


@triton.jit
def _encode(
    codes,
    words,
    data,
    x_RV,
    keys,
    numel,
    base,
    rem,
    seed,
    BITS: tl.constexpr,
    SCALED: tl.constexpr,
    HADAMARD: tl.constexpr,
    SEARCH: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    PARTIALS: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A tile's part of a block codec's message."""
    if HADAMARD:
        x_RV, poisoned_R = rotated(x_RV, rem, R, V)
        key_R = tl.max(key_of(x_RV), axis=1)
    else:
        if PARTIALS > 0:
            partial = tl.load(keys + tl.arange(0, PARTIALS)).to(tl.uint32, bitcast=True)
            key_R = tl.max(partial[None, :], axis=1)
        else:
            key_R = tl.max(key_of(x_RV), axis=1)
        poisoned_R = (key_R >> 1) >= INF_BITS
    local_RV, _ = places(R, V, BLOCK)
    position_RV = local_RV.to(tl.uint32) + base.to(tl.uint32)
    f_RV, scale_R = quantize(x_RV, key_R, poisoned_R, position_RV, seed, R, V, BITS, SEARCH, STOCHASTIC)
    store_codes(codes, base, f_RV, rem, R, V, BLOCK, BITS)
    scales_at = _scales_at(numel, BITS)
    row_R = tl.arange(0, R)
    if SCALED == 0:
        tl.store(words + scales_at + row_R, scale_R, mask=row_R < tl.where(base == 0, 1, 0))
        end = scales_at * 4 + 4
    else:
        tl.store(words + scales_at + base // SCALED + row_R, scale_R, mask=row_R * BLOCK < rem)
        end = scales_at * 4 + (numel + SCALED - 1) // SCALED * 4
    if base + rem == numel:
        # Zeros after the codes and after the scales.
        i = tl.arange(0, 16)
        code_end = (numel * BITS + 7) // 8
        zero = tl.zeros((16,), tl.uint8)
        tl.store(data + code_end + i, zero, mask=code_end + i < scales_at * 4)
        tl.store(data + end + i, zero, mask=end + i < (end + 15) // 16 * 16)


@triton.jit
def _scales_at(numel, BITS: tl.constexpr):
    """Where a message's scales start, in words."""
    return ((numel * BITS + 7) // 8 + 15) // 16 * 4


@triton.jit(do_not_specialize=["numel"])
def _largest_keys(x, keys, numel, KIND: tl.constexpr, SIZE: tl.constexpr):
    """The largest key of every tile whose number is the program's, or the program's and a multiple of their number."""
    best = tl.zeros((1,), tl.uint32)
    base = tl.program_id(0).to(tl.int64) * SIZE
    while base < numel:
        rem = tl.minimum(numel - base, SIZE).to(tl.int32)
        tile = widen(load(x + base, rem, 1, SIZE, SIZE), KIND)
        best = tl.maximum(best, tl.max(key_of(tile), axis=1))
        base += tl.num_programs(0).to(tl.int64) * SIZE
    tl.store(keys + tl.program_id(0) + tl.arange(0, 1), best.to(tl.int32, bitcast=True))


def largest_keys(x: Tensor) -> Tensor:
    """Partial maxima of a tensor, for one scale per message."""
    form = Form.of_tensor(x.dtype)
    # Programs that have no tile leave 0, the least key.
    keys = torch.zeros(PARTIALS, dtype=torch.int32, device=x.device)
    grid = (min(PARTIALS, ceil_div(x.numel(), LARGE_TILE)),)
    launch(_largest_keys, grid, form.view(x), keys, x.numel(), KIND=form.kind, SIZE=LARGE_TILE)
    return keys
