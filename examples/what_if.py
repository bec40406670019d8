"""Simulates other networks and other plans, on any machine and without torch.

python examples/what_if.py
"""

from __future__ import annotations

from thinwire.sim import Answer, Case, answer

PLANS = ("zero3", "hsdp", "zero1-node", "zeropp", "thinwire")
GBPS = (25, 100, 400, 1600)


def what_if(model: str = "llama-2-7b", gpu: str = "a100-80g", gpus: int = 64) -> dict[tuple[str, int], Answer]:
    """A step under every plan on every network, with four micro-batches of one sequence of 4096 tokens on each GPU."""
    return {
        (plan, gbps): answer(
            Case(model=model, gpu=gpu, gpus=gpus, internode_gbps=gbps, seq=4096, micro_batches=4, plan=plan)
        )
        for plan in PLANS
        for gbps in GBPS
    }


if __name__ == "__main__":
    found = what_if()
    print("seconds of a step (MFU) by Gbit/s of a node's network cards, 64 A100, llama-2-7b")
    print(f"{'':12}", *(f"{gbps:>14}" for gbps in GBPS))
    for plan in PLANS:
        cells = [found[plan, gbps] for gbps in GBPS]
        print(f"{plan:12}", *(f"{cell.simulated.seconds:8.2f} ({cell.mfu:3.0%})" for cell in cells))
