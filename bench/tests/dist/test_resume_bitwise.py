"""After kills, stops and losses of power, every preset, codec, schedule and source of data gives the same bits."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from thinwire_bench.chaos.disk import can_mount
from thinwire_bench.chaos.setups import SOURCES, SmallRun, make_corpus, setups
from thinwire_bench.chaos.trial import CampaignSettings, Trial, conduct

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(1200)]

KINDS = ("a rank is killed", "killed in a save", "Ctrl-C or SIGTERM")


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> CampaignSettings:
    made = CampaignSettings(tmp_path_factory.mktemp("resumed"), timeout=60.0, patience=120.0, mounts=can_mount())
    make_corpus(made.corpus)
    return made


def check(setup: SmallRun, settings: CampaignSettings) -> None:
    kinds = (*KINDS, "power is lost") if settings.mounts else KINDS
    said: list[str] = []
    verdict = conduct(Trial(setup, kinds, seed=7), settings, said.append)
    assert [incident.faults for incident in verdict.incidents] == [[]] * len(kinds), said
    assert all(incident.step is not None for incident in verdict.incidents), said
    assert verdict.equal, verdict.about


@pytest.mark.parametrize("setup", setups(), ids=lambda one: f"{one.group}-{one.name}")
def test_every_preset_codec_and_schedule_resumes_bit_by_bit(setup: SmallRun, settings: CampaignSettings) -> None:
    check(setup, settings)


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_of_data_resumes_bit_by_bit(source: str, settings: CampaignSettings, tmp_path: Path) -> None:
    (setup,) = (one for one in setups() if one.name == "zero1")
    alone = dataclasses.replace(setup, name=f"source-{source}", source=source, nodes=1)
    check(alone, settings)
