"""The GPU check: its records, its verdicts, its page, and a rehearsal of its parts on CPU."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.codecs import speed_checks
from benchmarks.gpu.gpu_tests import outcome_of
from benchmarks.gpu.outcome import DONE, FAILED, MISSED, SKIPPED, Check, Outcome, Record, read, read_all, write
from benchmarks.gpu.page import NO_CARD, REHEARSED, markdown, update
from benchmarks.gpu.parts import PARTS, part_named
from benchmarks.gpu.runner import perform, run
from benchmarks.gpu.scale import CARD
from benchmarks.gpu.step import loss_checks, time_checks
from benchmarks.gpu.systems import FSDP2, OURS, PLAIN
from benchmarks.gpu.waits import watched

from thinwire.errors import UsageError
from thinwire.report.sheet import Sheet
from thinwire_bench.codecs.speeds import CodecSpeed

ROOT = Path(__file__).parents[2]
NAMES = tuple(part.name for part in PARTS)
OUTCOME = Outcome(
    (Sheet("steps", ("system", "ms"), 1, [["ours", "1.25"]]),),
    (Check("ours / theirs", "1.25", "at most 1.03", False), Check("losses", "0", "at most 1", True)),
    ("Numbers are of one card.",),
    {"seconds": [0.5, 0.25]},
)

# ---------------------------------------------------------------------------------------------------------- records


def test_a_record_comes_back_as_it_was_written(tmp_path: Path) -> None:
    record = Record.of("step", "cuda", OUTCOME, 3.5)
    write(record, tmp_path)
    assert record.status == MISSED
    assert [path.name for path in tmp_path.iterdir()] == ["step.json"], "nothing partial is left"
    again = read("step", tmp_path)
    assert again is not None
    assert again.outcome.checks == OUTCOME.checks
    assert again.outcome.data == OUTCOME.data
    assert markdown({"step": again}, None) == markdown({"step": record}, None)
    assert list(read_all(NAMES, tmp_path)) == ["step"]


def test_a_file_that_is_no_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "step.json").write_text('{"part": "step"}')
    with pytest.raises(UsageError, match=r"step\.json is no record of the GPU check .* run the part again"):
        read("step", tmp_path)


# --------------------------------------------------------------------------------------------------------- verdicts


def speed(subject: str, share: float, size: int) -> CodecSpeed:
    return CodecSpeed(subject, "encode", "bfloat16", size, size, 8.0, 1.0, 1.0, 1.0, share, share, share, (1.0,))


def test_codecs_have_goals_for_large_tensors() -> None:
    large = 64 << 20
    rows = [speed("int8:256", 0.79, large), speed("int8:256", 0.81, large), speed("int4:256", 0.61, large)]
    assert [check.met for check in speed_checks(rows)] == [False, True, True]
    assert speed_checks([speed("int8:256", 0.1, 1 << 20), speed("zfp:8", 0.1, large)]) == []


def test_a_step_is_held_against_the_faster_pytorch_and_fsdp2() -> None:
    seconds = {PLAIN[0]: [1.2, 1.2], PLAIN[1]: [1.0, 1.0], OURS: [1.04, 1.04], FSDP2: [1.1, 1.1]}
    assert [check.met for check in time_checks(seconds)] == [False, True]
    assert [check.met for check in time_checks(seconds | {OURS: [1.02, 1.02]})] == [True, True]
    assert [check.met for check in time_checks(seconds | {FSDP2: [1.0, 1.0]})] == [False, False]


def test_losses_of_the_timed_systems_must_agree() -> None:
    losses = {PLAIN[0]: [4.0, 3.0], PLAIN[1]: [4.0, 3.01], OURS: [4.0, 3.1], FSDP2: [4.0, 3.0]}
    assert [check.met for check in loss_checks(losses)] == [True, True, False]


def test_junit_becomes_counts_and_problems() -> None:
    case = '<testcase classname="a" name="{}">{}</testcase>'
    cases = case.format("good", "") + case.format("bad", '<failure message="x | y"/>')
    outcome = outcome_of(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    assert outcome.data == {"passed": 1, "failed": 1, "skipped": 0}
    assert not outcome.met
    assert outcome.sheets[0].rows == [["a::bad", "failed", "x \\| y"]]
    assert outcome_of(f"<testsuite>{case.format('good', '')}</testsuite>").met
    skipped = case.format("absent", '<skipped message="no card"/>')
    assert not outcome_of(f"<testsuite>{skipped}</testsuite>").met, "nothing ran"


def test_a_host_wait_is_charged_to_the_line_that_made_it() -> None:
    with watched() as places:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    ((place, count),) = places.items()
    assert count == 1
    assert place.startswith("tests/unit/test_gpu_check.py:")


# ------------------------------------------------------------------------------------------------------------- page


def test_the_page_is_rendered_from_the_committed_results() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    records = read_all(NAMES, ROOT / "docs" / "results" / "gpu")
    picture = "results/gpu-codecs.png" if "codecs" in records else None
    assert markdown(records, picture).strip() in page, "run `python -m benchmarks.gpu render ...`, see the page"


def test_the_page_says_what_ran_where() -> None:
    assert markdown({}, None).startswith(NO_CARD)
    measured = Record.of("step", "cuda", OUTCOME, 90.0)
    text = markdown({"step": measured}, None)
    assert NO_CARD not in text
    assert REHEARSED not in text
    assert "| `step` | " in text
    assert "| missed | 4 | 1.5 |" in text
    assert "| ours / theirs | 1.25 | at most 1.03 | missed |" in text
    assert "Numbers are of one card." in text
    rehearsed = markdown({"step": replace(measured, device="cpu")}, None)
    assert rehearsed.startswith(REHEARSED)
    assert "| missed (rehearsal) |" in rehearsed
    failed = Record.without_outcome("codecs", "cuda", FAILED, "KernelError: out of registers")
    assert "KernelError: out of registers" in markdown({"codecs": failed}, None)


# ------------------------------------------------------------------------------------------------------------- runs


def test_codecs_rehearsed_on_cpu_give_a_page_with_a_picture(tmp_path: Path) -> None:
    perform("codecs", "cpu", tmp_path)
    record = read("codecs", tmp_path)
    assert record is not None
    assert record.status == DONE, record.error
    assert {row[0] for row in record.outcome.sheets[0].rows} == {"int8:256", "int4:256", "bf16"}
    page = tmp_path / "gpu.md"
    page.write_text((ROOT / "docs" / "gpu.md").read_text(encoding="utf-8"), encoding="utf-8")
    update(page, {"codecs": record})
    assert "](results/gpu-codecs.png)" in page.read_text(encoding="utf-8")
    assert (tmp_path / "results" / "gpu-codecs.png").stat().st_size > 5000


def test_an_error_becomes_the_record(tmp_path: Path) -> None:
    perform("environment", "tpu", tmp_path)
    record = read("environment", tmp_path)
    assert record is not None
    assert (record.status, record.error) == (FAILED, "KeyError: 'tpu'")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_card_parts_fail_or_are_skipped_one_after_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = run([part_named("environment"), part_named("cards")], "cuda", tmp_path, again=False)
    assert [record.status for record in records] == [FAILED, SKIPPED]
    assert "PyTorch finds no CUDA device on this machine; rehearse with --device cpu" in records[0].error
    assert records[1].error == "it needs 2 cards, and this machine has 0"
    assert list(read_all(NAMES, tmp_path)) == ["environment", "cards"]
    assert main(["run", "--results", str(tmp_path)]) == 2
    assert "finds no CUDA device" in capsys.readouterr().err


@pytest.mark.slow
def test_every_part_rehearses_on_cpu(tmp_path: Path) -> None:
    records = {record.part: record for record in run(PARTS, "cpu", tmp_path, again=False)}
    assert tuple(records) == NAMES
    assert {name: record.error for name, record in records.items() if record.status != DONE and name != "nodes"} == {}
    assert records["nodes"].status == SKIPPED
    assert all(record.outcome.sheets for name, record in records.items() if name not in {"nodes", "tests"})
    assert len(list((tmp_path / "traces").iterdir())) == 4
    (tmp_path / "waits.json").unlink()
    again = run(PARTS[:6], "cpu", tmp_path, again=False)
    assert [record.date for record in again[:5]] == [records[name].date for name in NAMES[:5]], "they are kept"
    assert again[5].status == DONE


def test_a_card_measures_every_preset_and_codec() -> None:
    """What `make gpu-check` promises, and about a billion parameters."""
    from thinwire.spec import ModelSpec, Plan
    from thinwire.spec.codec import FAMILIES, CodecSpec

    assert CARD.presets == Plan.preset_names(islands=False)
    assert {CodecSpec(name).family for name in CARD.codecs} == set(FAMILIES) - {"none"}
    assert CARD.sizes == tuple(mib << 20 for mib in (1, 16, 64, 256))
    assert 0.95e9 < ModelSpec.parse(dict(CARD.model)).parameters < 1.1e9
    assert sum(part.minutes for part in PARTS if part.cards == 1) <= 30
    assert all(part.limit < 10 for part in PARTS if part.cards == 1)
