"""Hosts with links of unlike bandwidth: what they reach, and what the simulator predicts for them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.support.cluster import needs_lab

from thinwire.cost import nominal_rates
from thinwire.errors import SpecError
from thinwire.lab import Lab, LabSpec
from thinwire.lab.job import Job
from thinwire.plan import TrainingJob, candidate
from thinwire.spec import ClusterSpec, ModelSpec, Plan

FAST, SLOW = 200e6, 40e6
MODEL = ModelSpec(name="wide", layers=1, hidden=256, heads=4, ffn=512, vocab=512, seq=32)

STEPS = """
import json, sys, time
import torch, torch.distributed as dist
import thinwire as tw
from thinwire.train.models.llama import Llama, LlamaConfig
dist.init_process_group("gloo")
plan = tw.Plan.load(sys.argv[1])
model = Llama(LlamaConfig(vocab=512, hidden=256, layers=1, heads=4, kv_heads=4, ffn=512, seq=32))
model = tw.shard(model, plan)
optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-3)
times = []
for step in range(6):
    begin = time.perf_counter()
    ids = torch.randint(512, (1, 33))
    model(ids[:, :-1], labels=ids[:, 1:]).loss.backward()
    optim.step(); optim.zero_grad()
    times.append(time.perf_counter() - begin)
if dist.get_rank() == 0:
    open(sys.argv[2], "w").write(json.dumps(sorted(times[1:])[2]))
dist.barrier()
"""


def test_a_lab_names_a_link_for_every_host() -> None:
    spec = LabSpec(nodes=2, host_bandwidths=(FAST, SLOW))
    assert (spec.bandwidth, spec.bandwidth_of(0), spec.bandwidth_of(1)) == (SLOW, FAST, SLOW)
    with pytest.raises(SpecError, match="bandwidth names 1 links, and there are 2 hosts"):
        LabSpec(nodes=2, host_bandwidths=(FAST,))


def predicted(*rates: float) -> float:
    """Milliseconds of a step of transfers, which this one is."""
    groups = [{"nodes": 1, "nic": {"bandwidth": rate}} for rate in rates]
    machine = ClusterSpec.parse(
        {
            "gpus_per_node": 1,
            "memory": "4GiB",
            "peak_flops": {"float32": 1e13, "bfloat16": 1e13},
            "links": {"inside": {"bandwidth": "10gbit"}},
            "groups": groups,
        }
    )
    job = TrainingJob(MODEL, machine, 2 * MODEL.seq, MODEL.seq, rates=nominal_rates(machine))
    return candidate(job, Plan.preset("zero3", nodes=2, local=1)).seconds


def measured(directory: Path, *rates: float) -> float:
    plan, script, out = directory / "plan.toml", directory / "steps.py", directory / "seconds.json"
    Plan.preset("zero3", nodes=2, local=1).save(plan)
    script.write_text(STEPS)
    with Lab(LabSpec(nodes=2, ranks=1, host_bandwidths=rates)) as lab:
        outcome = Job(lab, [sys.executable, str(script), str(plan), str(out)], "rank", grace=20.0, logs=directory).run()
    assert outcome.status == 0, outcome.failure
    return float(json.loads(out.read_text()))


@needs_lab
@pytest.mark.slow
def test_a_step_between_unlike_hosts_is_that_of_the_slower_link(tmp_path: Path) -> None:
    """The simulator says that one slow link of two makes a step as slow as two do; so do real links."""
    assert predicted(FAST, SLOW) == pytest.approx(predicted(SLOW, SLOW), rel=1e-9)
    unlike, slow, fast = (measured(tmp_path, *rates) for rates in ((FAST, SLOW), (SLOW, SLOW), (FAST, FAST)))
    assert unlike == pytest.approx(slow, rel=0.15)
    assert fast < 0.6 * unlike
