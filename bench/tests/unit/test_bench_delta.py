"""The bench of deltas: its bits and speeds, on few weights."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("zstandard")

from thinwire_bench.codecs import deltas


def test_a_row_has_everybodys_bits_and_speeds() -> None:
    row = deltas._row("synthetic", 1e-5, deltas.synthetic(1 << 17, 1e-5), rounds=2)
    assert 0.05 < row.changed < 0.2
    assert row.given_exponent < row.entropy < min(row.others.values())
    assert row.bits < 1.08 * row.given_exponent
    assert row.others["verl"] == pytest.approx(48 * row.changed)
    assert set(row.others) == set(deltas.OTHERS)
    assert min(row.gb_per_s.values()) > 0
    bits, speeds = deltas.sheets([row])
    assert [len(bits.rows[0]), len(speeds.rows[0])] == [len(bits.columns), len(speeds.columns)]


def test_nothing_changes_at_a_rate_of_zero() -> None:
    old, new = deltas.synthetic(1 << 12, 0.0)
    assert torch.equal(old, new)
