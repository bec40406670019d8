"""The GPU check: its records, its verdicts, its page, and a rehearsal of its parts on CPU."""

from __future__ import annotations

import time
import warnings
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.codecs import LARGE, speed_checks
from benchmarks.gpu.gpu_tests import outcome_of
from benchmarks.gpu.large import _fields, _layers, _predicted
from benchmarks.gpu.outcome import (
    CUT,
    FAILED,
    MISSED,
    PASSED,
    SKIPPED,
    CaseRecord,
    Check,
    Outcome,
    Record,
    read,
    read_cards,
    write,
)  # fmt: skip
from benchmarks.gpu.page import NO_CARD, REHEARSED, markdown, update
from benchmarks.gpu.parts import PARTS, part_named
from benchmarks.gpu.runner import Request, perform, run
from benchmarks.gpu.scale import CARD
from benchmarks.gpu.step import layers_that_fit, loss_checks, time_checks
from benchmarks.gpu.streams import reports_of
from benchmarks.gpu.systems import FSDP2, OURS, PLAIN
from benchmarks.gpu.waits import watched
from tests.support.paths import ROOT

from thinwire.errors import UsageError
from thinwire.report.sheet import Sheet
from thinwire_bench.codecs.speeds import CodecSpeed

NAMES = tuple(part.name for part in PARTS)
OUTCOME = Outcome(
    (Sheet("steps", ("system", "ms"), 1, [["ours", "1.25"]]),),
    (Check("ours / theirs", "1.25", "at most 1.03", False), Check("losses", "0", "at most 1", True)),
    ("Numbers are of one card.",),
    {"seconds": [0.5, 0.25]},
)

# ---------------------------------------------------------------------------------------------------------- records


CARD_NAME = "NVIDIA H100 80GB HBM3"


def measured(device: str = "cuda", *cases: tuple[str, CaseRecord]) -> Record:
    record = Record("step", device, "cpu" if device == "cpu" else CARD_NAME)
    for name, case in cases or (("steps", CaseRecord.of(OUTCOME, 90.0)),):
        record = record.having(name, case)
    return record


def test_a_record_comes_back_as_it_was_written(tmp_path: Path) -> None:
    record = measured()
    write(record, tmp_path)
    (directory,) = tmp_path.iterdir()
    assert directory.name == "nvidia-h100-80gb-hbm3", "results of two cards are never mixed"
    assert [path.name for path in directory.iterdir()] == ["step.json"], "nothing partial is left"
    again = read("step", tmp_path, CARD_NAME)
    assert again is not None
    assert again.checks == OUTCOME.checks
    assert again.data("seconds") == [0.5, 0.25]
    assert read("step", tmp_path, "NVIDIA H200") is None
    cards = read_cards(NAMES, tmp_path)
    assert markdown(cards) == markdown({CARD_NAME: {"step": record}})


def test_a_part_is_as_good_as_its_worst_case() -> None:
    good, bad = CaseRecord.of(Outcome(), 1.0), CaseRecord.without_outcome(FAILED, "KernelError: no")
    missed, absent = CaseRecord.of(OUTCOME, 1.0), CaseRecord.without_outcome(SKIPPED, "no tc")
    assert measured("cuda", ("a", good), ("b", missed), ("c", bad)).status == FAILED
    assert measured("cuda", ("a", good), ("b", missed), ("c", absent)).status == MISSED
    assert measured("cuda", ("a", good), ("c", absent)).status == PASSED
    assert measured("cuda", ("c", absent)).status == SKIPPED
    cut = replace(measured("cuda", ("a", good)), left=("b",))
    assert cut.status == CUT
    assert cut.having("b", good).status == PASSED


def test_a_file_that_is_no_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "step.json").write_text('{"part": "step"}')
    with pytest.raises(UsageError, match=r"step\.json is no record of the GPU check .* run the part again"):
        read("step", tmp_path, "cpu")


# --------------------------------------------------------------------------------------------------------- verdicts


def speed(subject: str, share: float, size: int) -> CodecSpeed:
    return CodecSpeed(subject, "encode", "bfloat16", size, size, 8.0, 1.0, 1.0, 1.0, share, share, share, (1.0,))


def test_codecs_have_goals_for_large_tensors() -> None:
    large = LARGE
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
    assert outcome.data["counts"] == {"passed": 1, "failed": 1, "skipped": 0}
    assert not outcome.met
    assert outcome.sheets[0].rows == [["a::bad", "failed", "x \\| y"]]
    assert outcome_of(f"<testsuite>{case.format('good', '')}</testsuite>").met
    skipped = case.format("absent", '<skipped message="no card"/>')
    assert not outcome_of(f"<testsuite>{skipped}</testsuite>").met, "nothing ran"


def test_a_host_wait_is_charged_to_the_line_that_made_it() -> None:
    with watched() as places:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
        warnings.warn("a prototype feature does not yet detect all synchronizing operations", stacklevel=1)
    ((place, count),) = places.items()
    assert count == 1
    assert place.startswith("tests/tools/test_gpu_check.py:")


def test_a_sanitizer_that_watched_nothing_has_not_passed() -> None:
    assert reports_of("========= ERROR SUMMARY: 0 errors") == 0
    assert reports_of("========= RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)") == 3
    with pytest.raises(RuntimeError, match="no summary"):
        reports_of("20 codecs ran")


# ------------------------------------------------------------------------------------------------------------- page


def test_the_page_is_rendered_from_the_committed_results() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    text = markdown(read_cards(NAMES, ROOT / "docs" / "results" / "gpu"))
    assert text.strip() in page, "run `python -m benchmarks.gpu render ...`, see the page"


def test_the_page_says_what_ran_where() -> None:
    assert markdown({}).startswith(NO_CARD)
    text = markdown({CARD_NAME: {"step": replace(measured(), left=("the rest",))}})
    assert text.startswith(f"### {CARD_NAME}")
    assert REHEARSED not in text
    assert "| `step` | " in text
    assert "| missed | 1.5 |" in text
    assert "| ours / theirs | 1.25 | at most 1.03 | missed |" in text
    assert "Numbers are of one card." in text
    assert "Not run yet: the rest." in text
    rehearsed = markdown({"cpu": {"step": measured("cpu")}})
    assert REHEARSED in rehearsed
    assert "| missed (rehearsal) |" in rehearsed
    failed = measured("cuda", ("int8", CaseRecord.without_outcome(FAILED, "KernelError: out of registers")))
    assert "KernelError: out of registers" in markdown({CARD_NAME: {"step": failed}})


def test_tables_of_cases_become_one() -> None:
    two = measured("cuda", ("a", CaseRecord.of(OUTCOME, 1.0)), ("b", CaseRecord.of(OUTCOME, 1.0)))
    text = markdown({CARD_NAME: {"step": two}})
    assert text.count("**steps**") == 1
    assert text.count("| ours | 1.25 |") == 2
    assert text.count("Numbers are of one card.") == 1


# ------------------------------------------------------------------------------------------------------------- runs


@pytest.mark.slow
def test_codecs_rehearsed_on_cpu_give_a_page_with_a_picture(tmp_path: Path) -> None:
    assert perform("codecs", Request("cpu", tmp_path)) == 0
    record = read("codecs", tmp_path, "cpu")
    assert record is not None
    assert record.status == PASSED, record.cases
    assert {row[0] for row in record.cases["bf16, float32"].outcome.sheets[0].rows} == {"bf16"}
    page = tmp_path / "gpu.md"
    page.write_text((ROOT / "docs" / "gpu.md").read_text(encoding="utf-8"), encoding="utf-8")
    update(page, {"cpu": {"codecs": record}})
    assert "](results/gpu/cpu/codecs.png)" in page.read_text(encoding="utf-8")
    assert (tmp_path / "results" / "gpu" / "cpu" / "codecs.png").stat().st_size > 5000
    dates = [case.date for case in record.cases.values()]
    assert perform("codecs", Request("cpu", tmp_path)) == 0
    again = read("codecs", tmp_path, "cpu")
    assert again is not None
    assert [case.date for case in again.cases.values()] == dates, "what has passed is not run again"


@pytest.mark.slow
def test_a_part_ends_where_time_does(tmp_path: Path) -> None:
    perform("codecs", Request("cpu", tmp_path, deadline=time.time() + 3))
    record = read("codecs", tmp_path, "cpu")
    assert record is not None
    assert record.status == CUT
    assert {name.endswith("smaller") for name in record.cases} == {True}, "a case takes 4 s, or 2 with smaller tensors"
    assert all(name in record.left for name in ("int8:256, float32", "int4:256, float32", "bf16, float32"))


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_card_the_check_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--results", str(tmp_path)]) == 2
    assert "finds no CUDA device on this machine; rehearse with --device cpu" in capsys.readouterr().err


@pytest.mark.slow
def test_every_part_rehearses_on_cpu(tmp_path: Path) -> None:
    request = Request("cpu", tmp_path)
    records = {record.part: record for record in run(PARTS, request)}
    assert tuple(records) == NAMES
    problems = {name: record.cases for name, record in records.items() if record.status != PASSED and name != "nodes"}
    assert problems == {}
    assert records["nodes"].status == SKIPPED
    assert len(list((tmp_path / "traces").iterdir())) == 4


# -------------------------------------------------------------------------------------------------------- on a card


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch says of a card that is not there."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: CARD_NAME)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: SimpleNamespace(total_memory=80 << 30))


@pytest.mark.usefixtures("h100")
def test_cases_fit_a_short_lease_and_a_card_of_80_gigabytes() -> None:
    for part in PARTS:
        with ExitStack() as stack:
            cases = part.cases(CARD, stack)
        assert len({case.name for case in cases}) == len(cases)
        assert all(case.needs <= 79 << 30 for case in cases)
        assert all(case.seconds <= 150 for case in cases if part.cards == 1)


@pytest.mark.usefixtures("h100")
def test_models_are_the_largest_that_fit() -> None:
    assert layers_that_fit(79 << 30) < layers_that_fit(139 << 30) == CARD.model["layers"]
    assert layers_that_fit(38 << 30) >= 4
    small, large = (_layers(replace(CARD, memory=memory << 30)) for memory in (79, 139))
    assert 18 <= small < large
    predicted = _predicted(CARD, _fields(CARD, small), None)
    assert 0.65 * (79 << 30) < predicted["bytes"] <= 0.75 * (79 << 30)


def test_a_card_measures_every_preset_and_codec() -> None:
    """What `make gpu-check` promises."""
    from thinwire.spec import ModelSpec, Plan
    from thinwire.spec.codec import FAMILIES, CodecSpec

    def names(part: str) -> list[str]:
        with ExitStack() as stack:
            return [case.name for case in part_named(part).cases(CARD, stack)]

    assert names("presets") == names("waits") == list(Plan.preset_names(islands=False))
    timed = {name.rpartition(", ")[0] for name in names("codecs") if not name.endswith("smaller")}
    assert {CodecSpec(name).family for name in timed} == set(FAMILIES) - {"none"}
    assert CARD.sizes == tuple(mib << 20 for mib in (256, 64, 16, 1))
    assert 0.95e9 < ModelSpec.parse(dict(CARD.model)).parameters < 1.1e9
