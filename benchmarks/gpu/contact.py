"""Part: first contact. Everything once, small: what fails here fails everywhere."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import torch
from benchmarks.gpu.case import Case, Report
from benchmarks.gpu.gpu_tests import pytest
from benchmarks.gpu.outcome import Check, Outcome
from benchmarks.gpu.scale import Scale
from benchmarks.gpu.step import joined
from benchmarks.gpu.training import small_llama

__all__ = ["cases"]

_STEPS = 3
_VALUES = (1 << 18) + 77
"""1 MiB of fp32 and a tail."""


def cases(scale: Scale, stack: ExitStack) -> list[Case]:
    """Imports, one step under each way to send, every codec on 1 MiB."""
    del stack
    presets = ("zero3", "zero1-node", "zeropp", "thinwire") if scale.is_whole else ("zero3",)
    return [
        Case("native module", _native, 3),
        *(Case(f"steps of {preset}", partial(_steps, scale, preset), 8) for preset in presets),
        *([Case("NCCL", _nccl, 15)] if scale.device == "cuda" else []),
        Case("codecs on 1 MiB", partial(_codecs, scale), 40),
    ]


def _native(report: Report) -> Outcome:
    """The C++ codecs, on this processor."""
    report("loading the native module")
    from thinwire.codecs import get
    from thinwire.codecs.cpp import _native

    x = torch.randn(_VALUES)
    same = torch.equal(get("int8:256", backend="cpp").encode(x), get("int8:256", backend="reference").encode(x))
    check = Check("int8:256 in C++", "equal" if same else "differs", "equal to the reference backend", same)
    return Outcome(checks=(check,), data={"target": _native.target()})


def _steps(scale: Scale, preset: str, report: Report) -> Outcome:
    """A few steps in a world of one, over NCCL; the loss falls."""
    import thinwire as tw
    from thinwire.spec import Plan

    report(preset)
    with joined(scale.device):
        model = tw.shard(small_llama().to(scale.device), Plan.preset(preset, nodes=1, local=1))
        optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-2, fused=True)
        ids = torch.randint(0, 128, (4, 33), generator=torch.Generator().manual_seed(1)).to(scale.device)
        losses = []
        for _ in range(_STEPS):
            loss = model(ids[:, :-1], labels=ids[:, 1:]).loss
            loss.backward()
            tw.clip_grad_norm_(model, 1.0)
            optim.step()
            optim.zero_grad()
            losses.append(float(loss))
    falls = losses[-1] < losses[0]
    text = " to ".join(f"{loss:.4f}" for loss in (losses[0], losses[-1]))
    return Outcome(
        checks=(Check(f"{preset}: loss over {_STEPS} steps", text, "falls", falls),), data={"losses": losses}
    )


def _nccl(report: Report) -> Outcome:
    """Every call on a communicator of one rank."""
    report("NCCL with one rank")
    return pytest(["tests/gpu/test_nccl.py"], 1)


def _codecs(scale: Scale, report: Report) -> Outcome:
    """Every codec's message, made on the card, beside the C++ codec's."""
    from thinwire.codecs import get
    from thinwire.spec import CodecSpec
    from thinwire.spec.codec import encodable_dtypes
    from thinwire_bench.codecs.bench import CODECS
    from thinwire_bench.codecs.soundness import SEED

    checks = []
    for name in CODECS if scale.is_whole else ("int8:256", "exp3"):
        dtype = getattr(torch, encodable_dtypes(CodecSpec(name))[0])
        report(f"{name}, {dtype}")
        native, codec = get(name, backend="cpp"), get(name, device=scale.device)
        x = torch.randn(_VALUES, generator=torch.Generator().manual_seed(2)).to(dtype)
        seed = SEED if codec.spec.needs_seed else None
        wanted = native.encode(x, seed=seed)
        wire = codec.encode(x.to(scale.device), seed=seed)
        values = codec.decode(wire, x.numel(), dtype).cpu()
        same = torch.equal(wire.cpu(), wanted) and torch.equal(values, native.decode(wanted, x.numel(), dtype))
        checks.append(Check(f"{name}, {dtype}", "equal" if same else "differs", "equal to the C++ backend", same))
    return Outcome(checks=tuple(checks))
