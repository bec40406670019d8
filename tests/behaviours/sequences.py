"""Random sequences of ordinary actions on a model, and what one process on plain torch makes of them.

An action is a name and a number that its choices follow from, so that a sequence stays itself when actions are taken
out of it. What plain torch refuses is no part of a sequence.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tests.behaviours.context import Alone, Context
from tests.behaviours.models import Block, Stack
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["ACTIONS", "Action", "Flexible", "begun", "drawn", "valid"]

Action = tuple[str, int]
"""Name of an action, and the seed of its choices."""


@dataclass
class Subject:
    """A model in training, and what a sequence remembers of it.

    Attributes:
        ctx: Where it runs.
        make: Makes the model and its optimizer.
        frozen: Whether some of its layers are frozen at first.
        model: The model.
        optim: Its optimizer.
        step: Number of batches so far.
        loss: Loss of a graph that was retained, with its input; ``None`` without one.
        repointed: Whether a parameter got other memory since. In one process, that graph keeps the old values. Ranks
            have none to keep, and torch says so.
        kept: Parameters that the user has kept.
        log: All values that must be equal.
    """

    ctx: Context
    make: Callable[[], tuple[nn.Module, torch.optim.Optimizer]]
    frozen: bool
    model: nn.Module = field(init=False)
    optim: torch.optim.Optimizer = field(init=False)
    step: int = 0
    loss: tuple[torch.Tensor, torch.Tensor] | None = None
    repointed: bool = False
    kept: list[torch.Tensor] = field(default_factory=list)
    log: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model, self.optim = self.make()

    def x(self) -> torch.Tensor:
        """The next batch."""
        self.step += 1
        return self.ctx.x(self.step)

    def parameter(self, rng: random.Random) -> torch.Tensor:
        """Some parameter."""
        return rng.choice(list(self.model.parameters()))

    def note(self, value: torch.Tensor) -> None:
        """Compare a value that is the same on all ranks."""
        self.log.append(self.ctx.full(value.detach()))

    def note_mean(self, value: torch.Tensor) -> None:
        """Compare the mean over ranks of a value."""
        self.log.append(self.ctx.mean(value.detach()))


TRAITS = (
    "tied",
    "shared",
    "twice",
    "checkpointed",
    "reentrant",
    "nested",
    "scalar",
    "unused",
    "counted",
    "hooked",
    "normed",
)
"""What a model of random structure may have: tied weights, a layer of two blocks, a block that runs twice, blocks whose
activations are computed again, blocks that take dicts, a parameter without dimensions, one without use, a buffer that
changes, hooks on gradients, a parametrization."""


class Nested(Block):
    """A block that takes and returns a dict, or a tensor."""

    def forward(self, x: Any) -> Any:
        return {"number": 1, "x": super().forward(x["x"])} if isinstance(x, dict) else super().forward(x)


class Flexible(Stack):
    """A model whose forward can list its parameters, raise, and leave out a block. It has some of ``TRAITS``."""

    listing = raising = False
    skipped = -1

    def __init__(self, traits: Sequence[str] = ()) -> None:
        super().__init__()
        self.traits = tuple(traits)
        if "nested" in traits:
            self.blocks = nn.ModuleList(Nested() for _ in self.blocks)
        first, last = self.blocks
        if "normed" in traits:
            nn.utils.parametrizations.weight_norm(first.down)
        if "tied" in traits:
            last.up.weight = first.up.weight
        if "shared" in traits:
            last.norm = first.norm
        if "scalar" in traits:
            self.scale = nn.Parameter(torch.tensor(1.5))
        if "unused" in traits:
            last.spare = nn.Parameter(torch.ones(3))
        if "counted" in traits:
            self.register_buffer("seen", torch.zeros(()))

    def hook(self) -> None:
        """Let hooks change gradients."""
        self.blocks[0].up.weight.register_hook(lambda grad: 0.5 * grad)
        self.first.bias.register_hook(lambda grad: grad + 0.01)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        order = [number for number in (0, 1) if number != self.skipped]
        for number in [*order, 0] if "twice" in self.traits else order:
            x = self._through(self.blocks[number], x)
        return x

    def _through(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if "reentrant" in self.traits:
            return checkpoint(block, x, use_reentrant=True)
        call = partial(checkpoint, block, use_reentrant=False) if "checkpointed" in self.traits else block
        return call({"x": x})["x"] if "nested" in self.traits else call(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        penalty = sum(p.square().mean() for p in self.parameters()) if self.listing else 0.0
        x = self.features(x)
        if self.raising:
            raise ArithmeticError("the forward raises")
        if "scalar" in self.traits:
            x = x * self.scale
        if "counted" in self.traits:
            self.seen += 1
            x = x * (1 + 0.1 * torch.cos(self.seen))
        return self.head(x) + 0.1 * penalty


ACTIONS: dict[str, tuple[Callable[[Subject, random.Random], None], int]] = {}
"""Actions with their weights."""


def action(weight: int = 2) -> Callable[[Callable[[Subject, random.Random], None]], Any]:
    """Add an action."""

    def add(function: Callable[[Subject, random.Random], None]) -> Any:
        ACTIONS[function.__name__] = function, weight
        return function

    return add


# -- forward and backward --------------------------------------------------------------------------------------


def loss_of(it: Subject, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = it.model(x).square().mean()
    it.note_mean(loss)
    return loss


@action(8)
def trains(it: Subject, _rng: random.Random) -> None:
    loss_of(it, it.x()).backward()
    it.optim.step()
    it.optim.zero_grad()


@action(4)
def goes_backward(it: Subject, _rng: random.Random) -> None:
    loss_of(it, it.x()).backward()


@action(3)
def accumulates(it: Subject, rng: random.Random) -> None:
    for _ in it.ctx.micro_batches(it.model, range(rng.choice((1, 2, 3)))):
        loss_of(it, it.x()).backward()


@action()
def keeps_a_graph(it: Subject, _rng: random.Random) -> None:
    x = it.x().requires_grad_()
    it.loss, it.repointed = (loss_of(it, x), x), False


@action(4)
def goes_back_over_the_graph(it: Subject, rng: random.Random) -> None:
    if it.loss is None:
        return
    loss, x = it.loss
    way = rng.choice(("all", "input", "parameters", "grad", "last"))
    some = rng.sample(list(it.model.parameters()), 2)
    if way in ("all", "last"):
        loss.backward(retain_graph=way == "all")
    elif way == "input":
        loss.backward(inputs=[x], retain_graph=True)
    elif way == "parameters":
        loss.backward(inputs=some, retain_graph=True)
    else:
        torch.autograd.grad(loss, [*some, x], retain_graph=True, allow_unused=True)
    if way == "last":
        it.loss = None


@action()
def runs_a_part(it: Subject, rng: random.Random) -> None:
    out = rng.choice([it.model.blocks[0], it.model.blocks[1], it.model.first])(it.x()).square().mean()
    it.note_mean(out)
    if rng.random() < 0.7:
        out.backward()


@action()
def evaluates(it: Subject, rng: random.Random) -> None:
    with torch.inference_mode() if rng.random() < 0.3 else torch.no_grad():
        it.model.eval()
        it.note_mean(it.model(it.x()).mean())
        it.model.train()


@action()
def forgets_a_forward(it: Subject, _rng: random.Random) -> None:
    it.note_mean(it.model(it.x()).mean())


@action()
def lists_in_the_forward(it: Subject, rng: random.Random) -> None:
    it.model.listing = rng.random() < 0.6


@action(1)
def skips_a_block(it: Subject, rng: random.Random) -> None:
    it.model.skipped = rng.choice((-1, 0, 1))


@action(1)
def adds_a_penalty_outside(it: Subject, rng: random.Random) -> None:
    parameter = it.parameter(rng)
    (loss_of(it, it.x()) + 0.1 * parameter.square().sum()).backward()


@action(1)
def penalizes_gradients(it: Subject, _rng: random.Random) -> None:
    x = it.x().requires_grad_()
    out = it.model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    loss = out.square().mean() + slope.square().mean()
    it.note_mean(loss)
    loss.backward()


@action(1)
def calls_functionally(it: Subject, rng: random.Random) -> None:
    if "shared" in it.model.traits:
        return  # torch leaves what it has put into such a module
    name = rng.choice([name for name, _ in it.model.named_parameters()])
    with torch.no_grad():
        with it.ctx.full_parameters(it.model):
            other = {name: dict(it.model.named_parameters())[name] * 0.5}
        it.note_mean(torch.func.functional_call(it.model, other, (it.x(),)).mean())


# -- exceptions ------------------------------------------------------------------------------------------------


@action(1)
def fails_in_the_forward(it: Subject, rng: random.Random) -> None:
    it.model.raising = True
    with contextlib.suppress(ArithmeticError), torch.set_grad_enabled(rng.random() < 0.7):
        it.model(it.x())
    it.model.raising = False


@action(1)
def fails_in_the_backward(it: Subject, _rng: random.Random) -> None:
    def fail(_grad: torch.Tensor) -> None:
        raise ArithmeticError("a hook raises")

    it.optim.zero_grad()
    x = it.x()

    def hook(_module: nn.Module, _args: Any, out: Any) -> None:
        (out["x"] if isinstance(out, dict) else out).register_hook(fail)

    handle = it.model.blocks[0].register_forward_hook(hook)
    with contextlib.suppress(ArithmeticError):
        it.model(x).square().mean().backward()
    handle.remove()
    it.optim.zero_grad()


# -- gradients -------------------------------------------------------------------------------------------------


def shown(it: Subject) -> list[torch.Tensor]:
    return [parameter for group in it.optim.param_groups for parameter in group["params"]]


@action(4)
def steps(it: Subject, _rng: random.Random) -> None:
    it.optim.step()


@action(1)
def steps_with_a_closure(it: Subject, _rng: random.Random) -> None:
    x = it.x()

    def closure() -> torch.Tensor:
        it.optim.zero_grad()
        loss = loss_of(it, x)
        loss.backward()
        return loss

    it.note_mean(it.optim.step(closure))


@action(4)
def forgets_gradients(it: Subject, rng: random.Random) -> None:
    (it.optim if rng.random() < 0.7 else it.model).zero_grad(set_to_none=rng.random() < 0.7)


def trained(it: Subject) -> list[Any]:
    return [p for p in it.model.parameters() if p.requires_grad]


@action(3)
def clips(it: Subject, rng: random.Random) -> None:
    way = rng.choice(("library", "parameters", "groups", "some", "value"))
    if way == "library":
        it.note(it.ctx.clip(it.model, 0.1))
    elif way == "value":
        nn.utils.clip_grad_value_(it.model.parameters(), 0.01)
    else:
        some = {"parameters": list(it.model.parameters()), "groups": shown(it), "some": trained(it)[2:5]}[way]
        it.note(nn.utils.clip_grad_norm_(some, 0.1, rng.choice((2.0, 1.0, float("inf")))))


@action(3)
def reads_gradients(it: Subject, rng: random.Random) -> None:
    parameter = it.parameter(rng)
    it.log.append(None if parameter.grad is None else it.ctx.full(parameter.grad))


@action()
def changes_a_gradient(it: Subject, rng: random.Random) -> None:
    parameter, way = it.parameter(rng), rng.choice(("scale", "none", "zero", "new"))
    if way == "none":
        parameter.grad = None
    elif parameter.grad is not None and way in ("scale", "zero"):
        parameter.grad.mul_(0.5 if way == "scale" else 0.0)
    elif way == "new":
        parameter.grad = torch.full_like(parameter, 0.01)


# -- parameters ------------------------------------------------------------------------------------------------


@action(3)
def reads_a_parameter(it: Subject, rng: random.Random) -> None:
    parameter = it.parameter(rng).detach()
    it.note(rng.choice((torch.sum, torch.norm, torch.max, lambda p: p.reshape(-1)[0], lambda p: p * 2.0))(parameter))


@action()
def keeps_a_parameter(it: Subject, rng: random.Random) -> None:
    if rng.random() < 0.5:
        it.kept.append(it.parameter(rng))
        return
    with it.ctx.full_parameters(it.model):
        it.kept.append(it.model.blocks[0].up.weight)


@action()
def reads_what_it_kept(it: Subject, _rng: random.Random) -> None:
    for parameter in it.kept:
        it.note(parameter.detach().square().sum())


@action(3)
@torch.no_grad()
def writes_a_parameter(it: Subject, rng: random.Random) -> None:
    parameter, way = it.parameter(rng), rng.choice(("scale", "add", "data", "row", "copy", "full"))
    if way == "scale":
        parameter.mul_(0.9)
    elif way == "add":
        parameter.add_(torch.linspace(-0.1, 0.1, parameter.numel()).view(parameter.shape))
    elif way == "data":
        parameter.data = parameter.data * 0.95
        it.repointed = True
    elif way == "row":
        parameter[0] = 0.05
    elif way == "copy":
        parameter.copy_(torch.linspace(-0.2, 0.2, parameter.numel()).view(parameter.shape))
    else:
        with it.ctx.full_parameters(it.model, write=True):
            it.model.head.bias.mul_(0.5)


@action()
@torch.no_grad()
def follows(it: Subject, rng: random.Random) -> None:
    """A block as its teacher or an average would: towards the other block."""
    pair = list(zip(it.model.blocks[0].parameters(), it.model.blocks[1].parameters(), strict=True))
    way, pair = rng.choice(("lerp", "add", "each", "copy")), pair if rng.random() < 0.5 else [rng.choice(pair)]
    for mine, other in pair:
        other = other.to(mine.dtype)
        if way == "lerp":
            mine.lerp_(other, 0.1)
        elif way == "add":
            mine.mul_(0.9).add_(other, alpha=0.1)
        elif way == "each":
            torch._foreach_lerp_([mine], [other], 0.1)
        else:
            mine.copy_(0.9 * mine + 0.1 * other)


@action(1)
def freezes(it: Subject, rng: random.Random) -> None:
    it.parameter(rng).requires_grad_(rng.random() < 0.4)


@action(2)
def unfreezes_a_layer(it: Subject, rng: random.Random) -> None:
    rng.choice([it.model.first, *it.model.blocks, *it.model.blocks[0].children(), it.model.head]).requires_grad_(True)


@action(1)
def looks_inside_full_parameters(it: Subject, rng: random.Random) -> None:
    with it.ctx.full_parameters(it.model), torch.no_grad():
        it.note(it.model.first.weight.sum())
        for _ in range(rng.choice((0, 1, 2))):
            it.note_mean(it.model(it.x()).mean())


@action(1)
@torch.no_grad()
def goes_through_a_vector(it: Subject, rng: random.Random) -> None:
    vector = nn.utils.parameters_to_vector(it.model.parameters())
    it.note(vector.square().sum())
    if rng.random() < 0.5:
        nn.utils.vector_to_parameters(it.ctx.full(vector) * 0.98, it.model.parameters())
        it.repointed = True


@action(1)
def fills_a_layer(it: Subject, rng: random.Random) -> None:
    layer = rng.choice([it.model.first, it.model.blocks[1].up, it.model.head])
    rng.choice((nn.init.ones_, nn.init.zeros_))(layer.bias)
    rng.choice((nn.init.eye_, partial(nn.init.constant_, val=0.03)))(layer.weight)


# -- the optimizer and states ----------------------------------------------------------------------------------


@action()
def changes_a_group(it: Subject, rng: random.Random) -> None:
    for group in it.optim.param_groups:
        group["lr"] = rng.choice((1e-3, 1e-2, 0.0))
        if not it.frozen:  # tw.optimizer takes no frozen ones
            it.log.append(len(group["params"]))


@action(1)
def restores_a_state(it: Subject, rng: random.Random) -> None:
    whole = it.ctx.whole(it.model) | dict(it.model.named_buffers())
    if rng.random() < 0.5:
        trains(it, rng)
    it.model.load_state_dict(whole)


@action(1)
def rewinds(it: Subject, rng: random.Random) -> None:
    """To before a step, model and optimizer."""
    it.optim.zero_grad()
    weights = it.ctx.whole(it.model)
    with it.ctx.full_parameters(it.model):
        buffers = {name: buffer.clone() for name, buffer in it.model.named_buffers()}
    state = copy.deepcopy(it.optim.state_dict())
    trains(it, rng)
    it.model.load_state_dict(weights | buffers)
    it.optim.load_state_dict(state)


@action(1)
def goes_on_from_a_checkpoint(it: Subject, rng: random.Random) -> None:
    """In a model made anew, of which the same parameters are trained, but perhaps only after it is sharded."""
    it.optim.zero_grad()
    it.loss, it.repointed = None, False
    it.kept.clear()
    if it.ctx.alone:
        return
    old, was = it.model, it.optim
    folder = it.ctx.folder / str(rng.randrange(1 << 30))
    it.ctx.save(old, was, folder)
    it.model, it.optim = it.make()
    it.model.listing, it.model.skipped = old.listing, old.skipped
    for now, then in zip(it.model.parameters(), old.parameters(), strict=True):
        now.requires_grad_(then.requires_grad)
    it.ctx.load(it.model, it.optim, folder)


@action(1)
def copies_the_model(it: Subject, rng: random.Random) -> None:
    twin = copy.deepcopy(it.model)
    if rng.random() < 0.5:
        twin(it.x()).square().mean().backward()
    it.log.append(it.ctx.whole(twin))


# -- sequences -------------------------------------------------------------------------------------------------


FROZEN = "frozen"
"""The beginning of a sequence whose model has frozen layers."""
SHAPED = "shaped"
"""The beginning of one whose model, and optimizer, are of a random kind."""


def drawn(seed: int) -> list[Action]:
    """A sequence. Every third begins with a model of which some layers are frozen, and another third with one of random
    structure."""
    rng = random.Random(seed)
    names, weights = list(ACTIONS), [weight for _, weight in ACTIONS.values()]
    beginning = (FROZEN, SHAPED, "")[seed % 3]
    return [
        (beginning, rng.randrange(1 << 30)),
        *((n, rng.randrange(1 << 30)) for n in rng.choices(names, weights, k=9)),
    ]


def begun(ctx: Context, beginning: Action) -> Subject:
    """The model in training that a sequence begins with."""
    name, seed = beginning
    rng = random.Random(seed)
    kind, options = rng.choice(
        ((torch.optim.AdamW, {"lr": 1e-2, "eps": 1e-1}), (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}))
    )
    fast = rng.random() < 0.5
    shape = random.Random(seed)
    traits = shape.sample(TRAITS, shape.choice((1, 2, 3, 5))) if name == SHAPED else []
    grouped = name == SHAPED and shape.random() < 0.5

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = ctx.build(lambda: Flexible(traits))
        if name == FROZEN:
            layers = [model.first, *(layer for block in model.blocks for layer in block.children())]
            for layer in random.Random(seed).sample(layers, 4):
                layer.requires_grad_(False)
        model = ctx.shard(model)
        if "hooked" in traits:
            model.hook()
        if fast and not grouped:
            return model, ctx.fast_optimizer(model, kind, **options)
        return model, kind(_groups(model) if grouped else model.parameters(), **options)

    return Subject(ctx, make, name == FROZEN)


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    rest = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    return [{"params": vectors, "weight_decay": 0.0, "lr": 2e-2}, {"params": rest, "weight_decay": 0.1}]


def valid(sequence: Sequence[Action], world: int) -> tuple[list[Action], list[Any]]:
    """The actions that plain torch performs in one process, and what must be equal after each."""
    torch.set_num_threads(1)  # tensors are tiny
    beginning, *rest = sequence
    it = begun(Alone(world, Path()), beginning)
    kept: list[Action] = [sequence[0]]
    logs: list[Any] = [None]
    for name, number in rest:
        before = len(it.log)
        try:
            ACTIONS[name][0](it, random.Random(number))
        except (RuntimeError, IndexError, TypeError, ValueError):
            return valid(kept, world)  # once more: the model may be half changed
        kept.append((name, number))
        logs.append(it.log[before:])
    return kept, [*logs, it.ctx.whole(it.model)]
