"""Seconds of kernels by shape: what can be worked out by hand, and how they grow."""

from __future__ import annotations

import itertools

import pytest

from thinwire.cost import parts
from thinwire.cost.blocks import ModelPart
from thinwire.cost.kernels import Kernels
from thinwire.spec import ModelSpec

PEAK, MEMORY = 312e12, 1.4e12


def kernels(*, attention: float | None = 0.35, passes: float = 1.0) -> Kernels:
    return Kernels(PEAK, 0.85, MEMORY, attention, passes)


def blocks(name: str) -> ModelPart:
    return next(part for part in parts(ModelSpec.preset(name), "block") if part.kind == "block")


def share(name: str, tokens: int, seq: int) -> float:
    """Share of the peak that a block's matrix products and attention reach in the forward."""
    part = blocks(name)
    return part.forward_flops(tokens, seq) / PEAK / kernels().computing(part, tokens // seq, seq)[0]


def test_a_large_product_reaches_the_share_of_the_peak() -> None:
    part = ModelPart("m", "block", 1, (), matrices=((1 << 16, 1 << 16),))
    assert kernels().computing(part, 1, 1 << 16)[0] == pytest.approx(2 * 2**48 / (0.85 * PEAK), rel=0.01)
    assert kernels().computing(part, 1, 1 << 16)[1] == pytest.approx(
        2 * kernels().computing(part, 1, 1 << 16)[0], rel=0.01
    )


def test_a_product_of_few_tokens_takes_as_long_as_reading_the_matrix() -> None:
    part = ModelPart("m", "block", 1, (), matrices=((8192, 8192),))
    assert kernels().computing(part, 1, 1)[0] >= 2 * 8192**2 / MEMORY


def test_a_part_without_matrices_is_bound_by_memory() -> None:
    norm = ModelPart("n", "rest", 1, (), whole_values=2 * 4096)
    assert kernels().computing(norm, 2, 512)[0] == pytest.approx(1024 * 2 * 4096 * 2 / MEMORY)
    assert kernels(passes=3.0).computing(norm, 2, 512)[0] == pytest.approx(3 * kernels().computing(norm, 2, 512)[0])


def test_the_share_of_the_peak_grows_with_width_and_tokens() -> None:
    widths = [share(name, 4096, 4096) for name in ("llama-7b", "llama-13b", "llama-30b-amsp", "llama-65b")]
    assert all(1.0 < after / before < 1.05 for before, after in itertools.pairwise(widths))
    batches = [share("llama-7b", tokens, 1024) for tokens in (1024, 2048, 4096, 16384)]
    assert all(before < after for before, after in itertools.pairwise(batches))


def test_scores_pass_through_memory_unless_attention_is_fused() -> None:
    part = blocks("gpt-18b")
    fused, unfused = kernels(), kernels(attention=None)
    growth = [kernel.computing(part, 1, 4096)[0] / kernel.computing(part, 4, 1024)[0] for kernel in (fused, unfused)]
    assert 1 < growth[0] < growth[1]


def test_a_part_of_modules_takes_as_long_as_its_modules() -> None:
    model = ModelSpec.preset("llama-7b")
    modules = [part for part in parts(model, "module") if part.block == 1 and part.kind == "block"]
    whole = kernels().computing(blocks("llama-7b"), 1, 2048)[1]
    assert whole == pytest.approx(sum(kernels().computing(part, 1, 2048)[1] for part in modules))
