"""What the commands that measure a machine share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from tests.support.ranks import on_ranks

from thinwire.cli.measuring.ranks import check_outputs
from thinwire.errors import UsageError
from thinwire.train.environment import Started

pytestmark = pytest.mark.ranks


@on_ranks(2)
def test_a_file_that_rank_0_cannot_write_is_refused_on_every_rank(tmp_path: Path) -> None:
    rank = dist.get_rank()
    ranks = Started(by="torchrun", rank=rank, world=2, local_rank=rank, local_world=2)
    (tmp_path / "hosts").write_text("kept")
    check_outputs(ranks, {"HOSTS": tmp_path / "hosts", "--plot": None, "--out": tmp_path / "new"})
    assert (tmp_path / "hosts").read_text() == "kept"
    assert not (tmp_path / "new").exists()
    with pytest.raises(UsageError, match=r"--plot .*hosts.png cannot be written: No such file or directory; name"):
        check_outputs(ranks, {"HOSTS": tmp_path / "hosts", "--plot": tmp_path / "absent" / "hosts.png"})
