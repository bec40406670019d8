"""The start of a large model without its memory: a Llama of 7B is built on the meta device, lowered and planned.

``python -m thinwire_bench.peers.seven_billion`` prints the seconds of each phase and the most memory, in bytes.
"""

from __future__ import annotations

import json
import resource
import time

MODEL = "llama-2-7b"


def main() -> None:
    """Go through the phases."""
    clocks = [(time.perf_counter(), time.process_time())]

    def lap() -> None:
        clocks.append((time.perf_counter(), time.process_time()))

    import thinwire.plan as planner
    from thinwire.cost import NominalRates
    from thinwire.program import lower
    from thinwire.sharding.build import unit_infos
    from thinwire.sharding.modules.discover import discover
    from thinwire.spec import ClusterSpec, ModelSpec
    from thinwire.spec.recipe import ModelRecipe
    from thinwire.train.models.build import draft

    lap()
    shape = ModelSpec.preset(MODEL)
    drafted = draft(ModelRecipe(preset=MODEL), vocab=shape.vocab, seq=shape.seq, seed=0, recompute=False)
    lap()
    cluster = ClusterSpec.preset("a800-80g", nodes=4, gpus_per_node=8)
    job = planner.TrainingJob(shape, cluster, 4 << 20, shape.seq, rates=NominalRates(cluster, "bfloat16"))
    plan = planner.search(job).candidates[0].plan
    lap()
    modules = discover(drafted.model, None, plan.granularity, lambda name: plan.override(name).granularity)
    program = lower(plan, unit_infos(modules, plan, 0))
    lap()
    phases = ("imports", "built", "planned", "lowered")
    spent = {
        phase: {"seconds": now[0] - before[0], "cpu": now[1] - before[1]}
        for phase, before, now in zip(phases, clocks, clocks[1:], strict=False)
    }
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    parameters = sum(parameter.numel() for parameter in drafted.model.parameters())
    print(json.dumps({"phases": spent, "peak": peak, "parameters": parameters, "operations": len(program.operations)}))


if __name__ == "__main__":
    main()
