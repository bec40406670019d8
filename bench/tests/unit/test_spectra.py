"""Singular values of known matrices, and the tensors that are taken from a training step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from thinwire.cli.main import app
from thinwire.errors import UsageError
from thinwire.train.data.samples import Batch
from thinwire.train.models.llama import Llama
from thinwire_bench.study.crossings import KINDS, Moment, Training, observe
from thinwire_bench.study.spectra import (
    CODECS,
    TensorSpectrum,
    crest_factors,
    rank_correlation,
    sheets,
    singular_values,
    spectrum,
    summarise,
    trends,
)
from thinwire_bench.study.spectra_chart import draw


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def measured(moment: Moment) -> list[TensorSpectrum]:
    return [TensorSpectrum(moment.step, kind, part, *spectrum(tensor)) for kind, part, tensor in moment.crossings]


@pytest.fixture(scope="module")
def moment() -> Moment:
    """Of a step of two ranks with random tokens."""
    model = Llama(Training(layers=2, hidden=64, seq=16).config(vocab=96))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 96, (2, 2, 17), generator=torch.Generator().manual_seed(0))
    return observe(model, optimizer, [Batch(tokens[:, :-1], tokens[:, 1:]) for tokens in ids], step=3)


@pytest.mark.parametrize("shape", [(40, 100), (100, 40), (64, 64)])
def test_singular_values_are_those_of_torch(shape: tuple[int, int]) -> None:
    matrix = normal(*shape)
    exact = torch.linalg.svdvals(matrix.double())
    torch.testing.assert_close(singular_values(matrix), exact / exact.norm(), rtol=0, atol=1e-8)


def test_a_matrix_of_rank_one() -> None:
    numbers, curve = spectrum(normal(100, 1) @ normal(1, 50, seed=1))
    assert numbers["effective_rank"] == pytest.approx(1 / 50, rel=1e-3)
    assert numbers["stable_rank"] == pytest.approx(1)
    assert numbers["rank90"] == numbers["rank99"] == 1 / 50
    assert numbers["top1"] == pytest.approx(1)
    assert curve[0] == 1
    assert max(curve[2:]) < 1e-3


def test_a_matrix_of_rank_four_in_a_hundred() -> None:
    left, right = (torch.linalg.qr(normal(100, 4, seed=seed)).Q for seed in (0, 1))
    numbers, _ = spectrum(left @ right.T)
    assert numbers["effective_rank"] == pytest.approx(0.04, rel=1e-3)
    assert numbers["stable_rank"] == pytest.approx(4, rel=1e-3)
    assert (numbers["rank90"], numbers["rank99"]) == (0.04, 0.04)
    assert (numbers["top1"], numbers["top5"]) == (pytest.approx(0.25), pytest.approx(1))


def test_dense_matrices() -> None:
    numbers, curve = spectrum(torch.linalg.qr(normal(100, 100)).Q)
    assert numbers["effective_rank"] == pytest.approx(1)
    assert (numbers["top10"], numbers["rank90"], numbers["rank99"]) == (pytest.approx(0.1), 0.9, 0.99)
    assert min(curve) == pytest.approx(1, abs=1e-5)
    noise, _ = spectrum(normal(200, 100, seed=3))
    assert noise["effective_rank"] == pytest.approx(noise["gaussian_rank"], rel=0.02)
    assert 0.7 < noise["gaussian_rank"] < 1


def test_codecs_do_not_see_the_rank() -> None:
    """Rank one and full rank, of values alike: the same SNR, which is what the codecs' page says of N(0, 1)."""
    signs = torch.where(normal(256, 1) > 0, 1.0, -1.0)
    low, _ = spectrum(signs * normal(1, 256, seed=1))
    full, _ = spectrum(normal(256, 256))
    assert low["effective_rank"] < 0.01 < 0.5 < full["effective_rank"]
    for name in CODECS:
        assert low[f"snr {name}"] == pytest.approx(full[f"snr {name}"], abs=1.5), name
    assert full["snr zfp:8"] == pytest.approx(25, abs=1)
    assert full["snr int8:256"] == pytest.approx(43, abs=1)


def test_crest_factors() -> None:
    assert crest_factors(torch.where(normal(512) > 0, 2.0, -2.0)).tolist() == [1, 1]
    one = torch.zeros(2, 256)
    one[1, 7] = -3
    assert crest_factors(one).tolist() == [16]
    assert float(crest_factors(normal(1 << 16)).median()) == pytest.approx(2.9, abs=0.2)


def test_rank_correlation() -> None:
    assert rank_correlation([1, 2, 3, 9], [2, 4, 5, 6]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3, 9], [6, 5, 4, 2]) == pytest.approx(-1)


def test_every_kind_is_taken_from_a_step(moment: Moment) -> None:
    counts = {kind: sum(crossing.kind == kind for crossing in moment.crossings) for kind in KINDS}
    assert counts == {
        "gradients of a rank": 16,
        "mean gradients": 16,
        "forward sums": 4,
        "backward sums": 4,
        "forward messages": 1,
        "backward messages": 1,
        "parameters": 16,
        "changes of a step": 16,
    }
    shapes = {crossing.kind: tuple(crossing.tensor.shape) for crossing in moment.crossings}
    assert {shapes[kind] for kind, (axis, _) in KINDS.items() if axis in ("tp", "pp")} == {(32, 64)}


def test_observed_tensors_match_their_names(moment: Moment) -> None:
    config = Training(layers=2, hidden=64, seq=16).config(vocab=96)
    model = Llama(config)
    ids = torch.randint(0, 96, (2, 2, 17), generator=torch.Generator().manual_seed(0))
    streams: list[torch.Tensor] = []
    model.layers[0].register_forward_hook(lambda _module, _inputs, output: streams.append(output))
    loss = model(ids[0, :, :-1], labels=ids[0, :, 1:]).loss
    streams[0].retain_grad()
    (loss / 2).backward()
    taken = {(each.kind, each.part): each.tensor for each in moment.crossings}
    assert streams[0].grad is not None
    torch.testing.assert_close(taken["forward messages", "block"], streams[0].detach().flatten(0, 1))
    torch.testing.assert_close(taken["backward messages", "block"], streams[0].grad.flatten(0, 1))
    torch.testing.assert_close(taken["gradients of a rank", "lm_head"], model.lm_head.weight.grad)
    model(ids[1, :, :-1], labels=ids[1, :, 1:]).loss.div(2).backward()
    torch.testing.assert_close(taken["mean gradients", "lm_head"], model.lm_head.weight.grad)
    before = model.lm_head.weight.detach()
    torch.testing.assert_close(taken["parameters", "lm_head"] - taken["changes of a step", "lm_head"], before)


def test_summaries_tables_and_picture(moment: Moment, tmp_path: Path) -> None:
    measurements = measured(moment)
    summaries = summarise(measurements)
    whole = [summary for summary in summaries if not summary.part]
    assert [summary.kind for summary in whole] == list(KINDS)
    ranks = sorted(summary.numbers["effective_rank"] for summary in measurements if summary.kind == "forward sums")
    assert whole[2].median("effective_rank") == pytest.approx((ranks[1] + ranks[2]) / 2)
    assert {summary.part for summary in summaries if summary.kind == "backward sums"} == {"", "self_attn", "mlp"}
    tables = sheets(summaries, trends(measurements))
    assert [len(table.rows) for table in tables] == [8, 8, 8, len(CODECS)]
    assert all(len(row) == len(table.columns) for table in tables for row in table.rows)
    json.dumps([summary.plain() for summary in summaries], allow_nan=False)
    draw(summaries, tmp_path / "spectra.png")
    assert (tmp_path / "spectra.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"at": ()}, "rising steps"),
        ({"at": (10, 5)}, "rising steps"),
        ({"at": (0, 5)}, "rising steps"),
        ({"layers": 1}, "at least 2"),
        ({"hidden": 100}, "multiple of 64"),
    ],
)
def test_a_training_that_cannot_be_is_refused(fields: dict[str, object], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        Training(**fields)  # type: ignore[arg-type]


def test_steps_are_numbers() -> None:
    result = CliRunner().invoke(app, ["bench", "spectra", "--at", "1,x"])
    assert result.exit_code != 0
    assert "is not a list of steps" in result.output


@pytest.mark.slow
def test_the_command_writes_what_it_found(tmp_path: Path) -> None:
    page, results = tmp_path / "page.md", tmp_path / "spectra.json"
    page.write_text("<!-- results: begin (written by `thinwire bench spectra --page`) -->\n<!-- results: end -->\n")
    arguments = ["bench", "spectra", "--at", "1,3", "--layers", "2", "--hidden", "64", "--seq", "32", "--page"]
    result = CliRunner().invoke(app, [*arguments, str(page), "--json", str(results)])
    assert result.exit_code == 0, result.output
    content = json.loads(results.read_text())
    assert list(content["loss"]) == ["1", "3"]
    assert {summary["step"] for summary in content["summaries"]} == {1, 3}
    assert "gradients of a rank" in page.read_text()
