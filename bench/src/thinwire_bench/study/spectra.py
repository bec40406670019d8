"""How fast singular values fall, and the errors of codecs: figures of one matrix, and summaries of many.

arXiv 2409.02423 gives gradients few bits as they are close to low rank, and everything else more as it is dense. These
numbers say how far that holds of tensors at hand, and whether it is what decides about a codec.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from thinwire import codecs
from thinwire.report import Sheet
from thinwire_bench.codecs.accuracy import signal_to_noise
from thinwire_bench.study.crossings import KINDS

__all__ = [
    "CODECS",
    "TensorSpectrum",
    "Summary",
    "Trends",
    "crest_factors",
    "rank_correlation",
    "sheets",
    "singular_values",
    "spectrum",
    "summarise",
    "trends",
]

CODECS: Final = ("zfp:8", "zfp:16", "int8:256", "int6:256,hadamard", "int4:256")
"""What the policies give gradients and dense tensors, and the codec of ZeRO++'s gradients."""

_BLOCK: Final = 256
_TOP: Final = (1, 5, 10)
"""Percent of the singular values."""
_ENERGY: Final = (90, 99)
"""Percent of the sum of squares."""
_POINTS: Final = 65
"""Number of points of a curve."""


@dataclass(frozen=True)
class TensorSpectrum:
    """One tensor.

    Attributes:
        step: Number of the update that it belongs to, from 1.
        kind: A key of :data:`~thinwire_bench.study.crossings.KINDS`.
        part: Part of the model that it belongs to.
        numbers: The figures that :func:`spectrum` returns, by name.
        curve: Singular values over the largest one, at even distances from the first to the last.
    """

    step: int
    kind: str
    part: str
    numbers: Mapping[str, float]
    curve: tuple[float, ...]


@dataclass(frozen=True)
class Summary:
    """Tensors of a kind at a step.

    Attributes:
        step: Number of the update, from 1.
        kind: A key of :data:`~thinwire_bench.study.crossings.KINDS`.
        part: Part of the model; empty for all parts together.
        tensors: Number of tensors.
        quartiles: Lower quartile, median and upper quartile of each figure.
        curve: Median of the curves, point by point.
    """

    step: int
    kind: str
    part: str
    tensors: int
    quartiles: Mapping[str, tuple[float, float, float]]
    curve: tuple[float, ...]

    def median(self, name: str) -> float:
        """The median of a figure."""
        return self.quartiles[name][1]

    def plain(self) -> dict[str, Any]:
        """The summary as JSON, to five digits: quartiles and the curve of a kind, or medians of a part."""
        head = {"step": self.step, "axis": KINDS[self.kind].axis, "kind": self.kind, "tensors": self.tensors}
        if self.part:
            return head | {"part": self.part} | {name: _rounded(self.median(name)) for name in self.quartiles}
        quartiles = {name: [_rounded(value) for value in values] for name, values in self.quartiles.items()}
        return head | quartiles | {"curve": [_rounded(value) for value in self.curve]}


@dataclass(frozen=True)
class Trends:
    """Rank correlations (Spearman) of a codec's SNR with other figures, over tensors.

    Attributes:
        codec: The codec.
        effective_rank: Correlation of its SNR with the effective rank.
        crest: Correlation of its SNR with the crest factor.
    """

    codec: str
    effective_rank: float
    crest: float


def singular_values(matrix: Tensor) -> Tensor:
    """Singular values, largest first, scaled to a sum of squares of 1.

    Args:
        matrix: 2-D matrix of any float dtype, not all zeros.

    Returns:
        fp64 on CPU, as many as the smaller dimension. From the eigenvalues of the smaller Gram matrix: exact to 1e-8
        of the largest, which fp32 values are not.
    """
    matrix = matrix.detach().double().cpu()
    gram = matrix @ matrix.T if matrix.shape[0] < matrix.shape[1] else matrix.T @ matrix
    squares = torch.linalg.eigvalsh(gram).flip(0).clamp_min(0)
    values: Tensor = (squares / squares.sum()).sqrt()
    return values


def spectrum(matrix: Tensor) -> tuple[dict[str, float], tuple[float, ...]]:
    """The numbers of one matrix, and its curve.

    - ``effective_rank``: exp of the entropy of the squared singular values (Roy and Vetterli, 2007), as a share of all;
      ``gaussian_rank``: the same of independent normal values in a matrix of this shape;
    - ``stable_rank``: sum of squares over the largest square;
    - ``top1``, ``top5``, ``top10``: share of energy in the largest 1, 5 and 10 % of the singular values, rounded up;
    - ``rank90``, ``rank99``: share of the singular values that hold 90 and 99 % of the energy;
    - ``crest``, ``crest99``: median and 99th percentile of :func:`crest_factors`;
    - ``snr CODEC``: in dB, encoded and decoded as one message.

    Args:
        matrix: 2-D matrix in fp32, not all zeros.

    Returns:
        Numbers by name, and singular values over the largest at even distances.
    """
    values = singular_values(matrix)
    energy, size = values.square(), len(values)
    held = energy.cumsum(0)
    numbers = {
        "effective_rank": _effective_rank(energy) / size,
        "gaussian_rank": _gaussian_rank(*matrix.shape),
        "stable_rank": 1 / float(energy[0]),
    }
    numbers |= {f"top{share}": float(held[-(-size * share // 100) - 1]) for share in _TOP}
    numbers |= {f"rank{share}": int((held < share / 100).sum() + 1) / size for share in _ENERGY}
    crest = crest_factors(matrix)
    numbers |= {"crest": float(crest.median()), "crest99": float(crest.quantile(0.99))}
    for name in CODECS:
        codec = codecs.get(name)
        decoded = codec.decode(codec.encode(matrix), matrix.numel(), torch.float32)
        numbers[f"snr {name}"] = signal_to_noise(matrix.flatten(), decoded) or float("inf")
    at = torch.linspace(0, size - 1, _POINTS).round().long()
    return numbers, tuple((values[at] / values[0]).tolist())


def crest_factors(x: Tensor) -> Tensor:
    """Largest magnitude over the root mean square, of every block of 256 values that is not all 0.

    Args:
        x: Tensor of any shape, with at least one block of values.

    Returns:
        1-D: 1 where all magnitudes are equal, 16 where a block has one value; about 2.9 of normal values.
    """
    blocks = x.detach().flatten()[: x.numel() // _BLOCK * _BLOCK].view(-1, _BLOCK)
    blocks = blocks[blocks.any(1)]
    return blocks.abs().amax(1) / blocks.square().mean(1).sqrt()


def summarise(measured: Iterable[TensorSpectrum]) -> list[Summary]:
    """All tensors of a kind at a step together, then those of each part of the model."""
    groups: dict[tuple[int, str, str], list[TensorSpectrum]] = {}
    for each in measured:
        for part in ("", each.part):
            groups.setdefault((each.step, each.kind, part), []).append(each)
    summaries = []
    for (step, kind, part), group in groups.items():
        columns = {name: [each.numbers[name] for each in group] for name in group[0].numbers}
        quartiles = {name: _quartiles(values) for name, values in columns.items()}
        curve = tuple(map(statistics.median, zip(*(each.curve for each in group), strict=True)))
        summaries.append(Summary(step, kind, part, len(group), quartiles, curve))
    return sorted(summaries, key=lambda each: (each.part != "", each.step, list(KINDS).index(each.kind)))


def trends(measured: Sequence[TensorSpectrum]) -> list[Trends]:
    """The rank correlations of the SNR of each codec."""

    def column(name: str) -> list[float]:
        return [each.numbers[name] for each in measured]

    ranks, crests = column("effective_rank"), column("crest")
    signals = {name: column(f"snr {name}") for name in CODECS}
    return [Trends(name, rank_correlation(ranks, snr), rank_correlation(crests, snr)) for name, snr in signals.items()]


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's, from -1 to 1; equal values keep their order."""
    order = [torch.tensor(values, dtype=torch.float64).argsort(stable=True).argsort() for values in (first, second)]
    return float(torch.corrcoef(torch.stack(order).double())[0, 1])


def sheets(summaries: Sequence[Summary], trends: Sequence[Trends]) -> list[Sheet]:
    """Tables: singular values at the last step, effective ranks over steps, codecs at the last step, trends."""
    whole = [each for each in summaries if not each.part]
    steps = sorted({each.step for each in whole})
    last = [each for each in whole if each.step == steps[-1]]
    by_step = {(each.step, each.kind): each for each in whole}
    shares = ["effective_rank", "gaussian_rank", *(f"top{x}" for x in _TOP), *(f"rank{x}" for x in _ENERGY)]
    return [
        Sheet(
            f"Singular values at step {steps[-1]}: medians; ranks in % of the full rank, energy in %",
            ["axis", "what crosses", "tensors", "effective rank", "of noise", "energy in top 1 %", "5 %", "10 %",
             "rank for 90 %", "99 %", "stable rank"],
            2,
            [[*_words(each), str(each.tensors), *(f"{100 * each.median(name):.0f}" for name in shares),
              f"{each.median('stable_rank'):.1f}"] for each in last],
        ),
        Sheet(
            "Effective rank in % of the full rank over training: medians",
            ["axis", "what crosses", *(f"step {step}" for step in steps)],
            2,
            [[*_words(each), *(f"{100 * by_step[step, each.kind].median('effective_rank'):.0f}" for step in steps)]
             for each in last],
        ),
        Sheet(
            f"Codecs at step {steps[-1]}: crest factor of blocks of {_BLOCK}, SNR in dB; medians",
            ["axis", "what crosses", "crest", "99th percentile", *CODECS],
            2,
            [[*_words(each), *(f"{each.median(name):.1f}" for name in ("crest", "crest99")),
              *(f"{each.median(f'snr {name}'):.1f}" for name in CODECS)] for each in last],
        ),
        Sheet(
            f"Rank correlation of the SNR over all tensors at step {steps[-1]}",
            ["codec", "with effective rank", "with crest factor"],
            1,
            [[each.codec, f"{each.effective_rank:+.2f}", f"{each.crest:+.2f}"] for each in trends],
        ),
    ]  # fmt: skip


def _words(summary: Summary) -> tuple[str, str]:
    return KINDS[summary.kind].axis, summary.kind


def _effective_rank(energy: Tensor) -> float:
    return float(torch.special.entr(energy / energy.sum()).sum().exp())


@functools.cache
def _gaussian_rank(rows: int, columns: int) -> float:
    noise = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    return _effective_rank(singular_values(noise).square()) / min(rows, columns)


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    low, middle, high = torch.tensor(values, dtype=torch.float64).quantile(
        torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    )
    return float(low), float(middle), float(high)


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")
