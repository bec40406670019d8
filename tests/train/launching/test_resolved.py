"""What is refused before a run starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinwire.errors import SpecError
from thinwire.spec.recipe import Recipe
from thinwire.train.directory import RunDirectory
from thinwire.train.environment import Hardware
from thinwire.train.launching.resolved import resolve_run


@pytest.mark.parametrize("where", ["recipe", "environment"])
def test_elastic_islands_refuse_keys(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = {"island": 0, "lighthouse": "10.0.0.1:29510", "device": "cpu"}
    if where == "recipe":
        cluster["keys"] = "keys"
    else:
        monkeypatch.setenv("THINWIRE_KEYS", "keys")
    plan = {"preset": "zero1", "micro_batch": 1, "islands": {"count": 2, "elastic": True}}
    recipe = {"plan": plan, "model": {"layers": 1, "hidden": 16, "heads": 2}, "train": {"steps": 5}, "cluster": cluster}
    run = Recipe.parse(recipe), RunDirectory(tmp_path), None
    with pytest.raises(SpecError, match=r"cluster.keys or THINWIRE_KEYS with islands.elastic = true: .* use a VPN"):
        resolve_run(*run, Hardware(0, "float32"), resume=False, stream="none")
