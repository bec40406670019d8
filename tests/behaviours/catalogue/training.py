"""Training loops: schedules of forwards and backwards."""

from __future__ import annotations

from typing import Any

import torch
from tests.behaviours.catalog import behaviour
from tests.behaviours.context import WIDTH, Context
from tests.behaviours.models import VOCABULARY, Block, Language, Stack, next_token_loss
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


@behaviour("FSDP2 TestFullyShard1DTrainingCore::test_train_parity_multi_group", deepspeed="works")
def plain_loop(ctx: Context) -> Any:
    """Train blocks and a head with AdamW of `model.parameters()`."""
    return ctx.fit(Stack)


@behaviour("FSDP2 TestFullyShard1DTrainingCore::test_train_parity_single_group_shard_dim0", deepspeed="works")
def shapes_that_no_rank_divides(ctx: Context) -> Any:
    """Train layers of 7, 15 and 3 features, which no number of ranks divides."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 7), nn.ReLU(), nn.Linear(7, 15), nn.ReLU(), nn.Linear(15, 3))

    return ctx.fit(make)


@behaviour("FSDP2 TestFullyShard1DTrainingCore::test_non_root_forward_backward")
def forward_and_backward_of_a_block_alone(ctx: Context) -> Any:
    """Run forward and backward of one block, outside of the model, then of the model."""
    model = ctx.shard(ctx.build(Stack))
    model.blocks[0](ctx.x(7)).square().mean().backward()
    return ctx.train(model, ctx.adamw(model))


@behaviour("FSDP2 TestFullyShard1DTrainingCore::test_multi_forward_module")
def one_block_called_twice_in_a_forward(ctx: Context) -> Any:
    """Call the same block twice in one forward."""

    class Twice(Stack):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            return super().features(super().features(x))

    return ctx.fit(Twice)


@behaviour("FSDP2 TestFullyShardSharedParams::test_train_parity_with_shared_params")
def tied_embedding_and_head(ctx: Context) -> Any:
    """Train a language model with one weight for embedding and head."""
    model = ctx.shard(ctx.build(Language))
    return ctx.train(model, ctx.adamw(model), loss=lambda step: next_token_loss(model(ctx.ids(step)), ctx.ids(step)))


@behaviour("FSDP2 TestFullyShardSharedParams::test_train_shared_params_uneven_shard")
def tied_weights_without_blocks(ctx: Context) -> Any:
    """Tie an embedding of 17 rows to a head in a model without blocks."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(VOCABULARY, WIDTH)
            self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)
            self.output.weight = self.tokens.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.output(self.tokens(ids))

    model = ctx.shard(ctx.build(Tied))
    return ctx.train(model, ctx.adamw(model), loss=lambda step: next_token_loss(model(ctx.ids(step)), ctx.ids(step)))


class Checkpointed(Stack):
    """Recomputes its blocks in the backward."""

    reentrant = False

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class CheckpointedReentrantly(Checkpointed):
    """The same by torch's older way."""

    reentrant = True


@behaviour("FSDP2 TestFullyShard1DTrainingCompose::test_train_parity_with_activation_checkpointing", deepspeed="works")
def activation_checkpointing(ctx: Context) -> Any:
    """Recompute each block's activations with `checkpoint(block, x, use_reentrant=False)`."""
    return ctx.fit(Checkpointed)


@behaviour("DeepSpeed TestZeroUserBackwardWithCheckpointing::test_checkpointed_scalar_backward", deepspeed="works")
def reentrant_activation_checkpointing(ctx: Context) -> Any:
    """Recompute each block's activations with `use_reentrant=True`."""
    return ctx.fit(CheckpointedReentrantly)


@behaviour("DeepSpeed TestZeroUserBackwardFrozenParamCheckpointing::test_checkpointed_frozen_param", deepspeed="works")
def checkpointing_with_frozen_parameters(ctx: Context) -> Any:
    """Recompute blocks of which half the parameters are frozen."""

    def make() -> nn.Module:
        model = Checkpointed()
        for block in model.blocks:
            block.up.requires_grad_(False)
        return model

    return ctx.fit(make)


@behaviour("DeepSpeed TestZeroUserBackwardWithCheckpointing::test_checkpointed_multiple_backward", deepspeed="works")
def checkpointing_with_several_backwards(ctx: Context) -> Any:
    """Run two forwards and backwards of recomputed blocks before each step."""
    model = ctx.shard(ctx.build(Checkpointed))

    def loss(step: int) -> torch.Tensor:
        model(ctx.x(step, 1)).square().mean().backward()
        return model(ctx.x(step)).square().mean()

    return ctx.train(model, ctx.adamw(model), loss=loss)


@behaviour("FSDP2 TestFullyShardGradientAccumulation::test_gradient_accumulation", deepspeed="works")
def accumulation_with_the_last_micro_batch_named(ctx: Context) -> Any:
    """Accumulate three micro-batches and mark the last one (`tw.micro_batches`, `set_requires_gradient_sync`)."""
    model = ctx.shard(ctx.build(Stack))
    optim, losses = ctx.adamw(model), []
    for step in range(3):
        for micro in ctx.micro_batches(model, range(3)):
            loss = model(ctx.x(step, micro)).square().mean() / 3
            loss.backward()
            losses.append(ctx.mean(loss))
        optim.step()
        optim.zero_grad()
    return losses, ctx.whole(model)


@behaviour("DeepSpeed TestUnmanagedGradientAccumulation::test_unmanaged_varying_backward_count", deepspeed="works")
def accumulation_without_a_word(ctx: Context) -> Any:
    """Call backward several times before a step, a different number in every step."""
    model = ctx.shard(ctx.build(Stack))
    optim = ctx.adamw(model)
    for step in range(3):
        for micro in range(step + 1):
            model(ctx.x(step, micro)).square().mean().backward()
        optim.step()
        optim.zero_grad()
    return ctx.whole(model)


@behaviour("FSDP2 TestFullyShardGradientAccumulation::test_1f1b_microbatching")
def all_forwards_before_all_backwards(ctx: Context) -> Any:
    """Run the forwards of three micro-batches, then their backwards."""
    model = ctx.shard(ctx.build(Stack))
    optim = ctx.adamw(model)
    for step in range(2):
        losses = [model(ctx.x(step, micro)).square().mean() for micro in range(3)]
        for loss in losses:
            loss.backward()
        optim.step()
        optim.zero_grad()
    return ctx.whole(model)


@behaviour("FSDP2 TestFullyShard1DTrainingCore::test_explicit_prefetching")
def deeper_prefetching(ctx: Context) -> Any:
    """Gather two blocks ahead."""
    return ctx.fit(lambda: Stack(4), prefetch=2)


@behaviour("FSDP2 test_double_forward_with_nested_fsdp_and_checkpoint")
def two_forwards_in_one_loss(ctx: Context) -> Any:
    """Compute one loss of two forwards, as DPO does."""
    model = ctx.shard(ctx.build(Checkpointed))

    def loss(step: int) -> torch.Tensor:
        return (model(ctx.x(step)) - model(ctx.x(step, 1))).square().mean()

    return ctx.train(model, ctx.adamw(model), loss=loss)


@behaviour("torch idiom: backward(retain_graph=True)")
def backward_twice_through_one_graph(ctx: Context) -> Any:
    """Keep the graph and run a second backward through it."""
    model = ctx.shard(ctx.build(Stack))

    def loss(step: int) -> torch.Tensor:
        value = model(ctx.x(step)).square().mean()
        value.backward(retain_graph=True)
        return value

    return ctx.train(model, ctx.adamw(model), loss=loss)


@behaviour("DDP test_ddp_create_graph")
def gradient_penalty_on_inputs(ctx: Context) -> Any:
    """Add a penalty on the gradient with respect to inputs, computed with `create_graph=True`."""
    model = ctx.shard(ctx.build(Stack))

    def loss(step: int) -> torch.Tensor:
        # Each sample's gradient is its own, so that the penalty is a mean over samples.
        x = ctx.x(step).requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return gradient.square().mean()

    return ctx.train(model, ctx.adamw(model), loss=loss)


@behaviour("FSDP2 test_partial_group_forward_grad_accum_chunked")
def chunked_loss_of_the_head(ctx: Context) -> Any:
    """Call the head chunk by chunk with a backward for each, then continue the backward into the blocks."""
    model = ctx.shard(ctx.build(lambda: Language(tied=False)), units=["blocks.0", "blocks.1", "head"])
    ctx.register_forward_method(model, "features")
    optim = ctx.adamw(model)
    for step in range(2):
        ids = ctx.ids(step)
        hidden = model.features(ids)
        leaf = hidden.detach().requires_grad_()
        for half in (slice(0, 3), slice(3, 6)):
            (next_token_loss(model.head(leaf[:, half]), ids[:, half]) / 2).backward()
        hidden.backward(leaf.grad)
        optim.step()
        optim.zero_grad()
    return ctx.whole(model)


@behaviour("FSDP2 test_reset_iter_state_after_exception")
def forward_that_raises_and_is_repeated(ctx: Context) -> Any:
    """Catch an exception in the forward of a block, and train on."""

    class Raising(Stack):
        armed = False

        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.blocks[0](self.first(x))
            if self.armed:
                raise ArithmeticError("planted")
            return self.blocks[1](x)

    model = ctx.shard(ctx.build(Raising))
    optim = ctx.adamw(model)
    model.armed = True
    try:
        model(ctx.x(5))
    except ArithmeticError:
        model.armed = False
    return ctx.train(model, optim)


@behaviour("torch idiom: out of memory in the backward, skip the batch")
def backward_that_raises_and_is_skipped(ctx: Context) -> Any:
    """Catch an exception in a backward, drop gradients, and train on."""
    model = ctx.shard(ctx.build(Stack))
    optim = ctx.adamw(model)

    def fail(_gradient: torch.Tensor) -> None:
        raise ArithmeticError("planted")

    output = model(ctx.x(5))
    output.register_hook(fail)
    try:
        output.square().mean().backward()
    except ArithmeticError:
        optim.zero_grad()
    return ctx.train(model, optim)


@behaviour("DDP test_ddp_inference")
def evaluation_between_steps(ctx: Context) -> Any:
    """Evaluate under `no_grad` on every rank between steps."""
    model = ctx.shard(ctx.build(Stack))
    values = []

    def evaluate(step: int) -> None:
        model.eval()
        with torch.no_grad():
            values.append(ctx.mean(model(ctx.x(step, 9)).square().mean()))
        model.train()

    return ctx.train(model, ctx.adamw(model), after_step=evaluate), values


@behaviour("torch idiom: torch.inference_mode")
def evaluation_in_inference_mode(ctx: Context) -> Any:
    """Evaluate under `torch.inference_mode()` between steps."""
    model = ctx.shard(ctx.build(Stack))
    values = []

    def evaluate(step: int) -> None:
        with torch.inference_mode():
            values.append(ctx.mean(model(ctx.x(step, 9)).square().mean().clone()))

    return ctx.train(model, ctx.adamw(model), after_step=evaluate), values


@behaviour("DeepSpeed TestZeroUserBackwardNonScalar::test_non_scalar_backward", deepspeed="works")
def backward_of_a_tensor(ctx: Context) -> Any:
    """Call `output.backward(gradient)` with a gradient of the output's shape."""
    model = ctx.shard(ctx.build(Stack))
    optim = ctx.adamw(model)
    for step in range(2):
        output = model(ctx.x(step))
        output.backward(torch.full_like(output, 1.0 / output.numel()))
        optim.step()
        optim.zero_grad()
    return ctx.whole(model)


@behaviour("DeepSpeed TestZeroUserBackwardSeparateLoss::test_separate_loss_function", deepspeed="works")
def loss_module_with_parameters_outside(ctx: Context) -> Any:
    """Compute the loss in a second module, which is sharded by itself."""
    model, criterion = ctx.shard(ctx.build(Stack)), ctx.shard(ctx.build(lambda: nn.Linear(5, 1), seed=1))
    optims = [ctx.adamw(model), ctx.adamw(criterion)]
    for step in range(3):
        criterion(model(ctx.x(step))).square().mean().backward()
        for optim in optims:
            optim.step()
            optim.zero_grad()
    return ctx.whole(model), ctx.whole(criterion)


@behaviour("DeepSpeed TestZeroUserBackwardMultipleEngines::test_multiple_engines_combined_loss", deepspeed="works")
def two_models_in_one_loss(ctx: Context) -> Any:
    """Train two sharded models with the sum of their losses, as adversarial training and distillation do."""
    models = [ctx.shard(ctx.build(Stack, seed=seed)) for seed in range(2)]
    optims = [ctx.adamw(model) for model in models]
    for step in range(3):
        (models[0](ctx.x(step)) + models[1](ctx.x(step, 1))).square().mean().backward()
        for optim in optims:
            optim.step()
            optim.zero_grad()
    return [ctx.whole(model) for model in models]


@behaviour("torch idiom: generative adversarial networks")
def adversaries_by_turns(ctx: Context) -> Any:
    """Step a discriminator while a generator's forward is in flight, then the generator through the discriminator."""
    generator, judge = (ctx.shard(ctx.build(Stack, seed=0)), ctx.shard(ctx.build(lambda: nn.Linear(5, 1), seed=1)))
    of_generator, of_judge = ctx.adamw(generator), ctx.adamw(judge)
    for step in range(3):
        made = generator(ctx.x(step))
        for fakes, optim in ((made.detach(), of_judge), (made, of_generator)):
            functional.softplus(judge(fakes) if optim is of_judge else -judge(fakes)).mean().backward()
            optim.step()
            of_generator.zero_grad()
            of_judge.zero_grad()
    return ctx.whole(generator), ctx.whole(judge)


@behaviour("torch idiom: one optimizer over two models")
def one_optimizer_of_two_models(ctx: Context) -> Any:
    """Give the parameters of two sharded models to one AdamW."""
    models = [ctx.shard(ctx.build(Stack, seed=seed)) for seed in range(2)]
    optim = torch.optim.AdamW([p for model in models for p in model.parameters()], lr=1e-2, eps=1e-1)
    for step in range(3):
        (models[0](ctx.x(step)) + models[1](ctx.x(step, 1))).square().mean().backward()
        optim.step()
        optim.zero_grad()
    return [ctx.whole(model) for model in models]


@behaviour("distillation idiom: a frozen teacher")
def frozen_teacher_beside_a_student(ctx: Context) -> Any:
    """Shard a frozen teacher as well, and train the student on its outputs."""
    teacher = ctx.build(Stack, seed=3).requires_grad_(False)
    teacher, student = ctx.shard(teacher), ctx.shard(ctx.build(Stack))

    def loss(step: int) -> torch.Tensor:
        with torch.no_grad():
            target = teacher(ctx.x(step))
        return functional.mse_loss(student(ctx.x(step)), target)

    return ctx.train(student, ctx.adamw(student), loss=loss)


@behaviour("DeepSpeed TestTwoOutputModel::test", deepspeed="works")
def several_outputs_and_losses(ctx: Context) -> Any:
    """Weight the losses of two outputs."""

    class Outputs(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            features = self.features(x)
            return self.head(features), features

    model = ctx.shard(ctx.build(Outputs))

    def loss(step: int) -> torch.Tensor:
        output, features = model(ctx.x(step))
        return 0.3 * output.square().mean() + 0.7 * features.abs().mean()

    return ctx.train(model, ctx.adamw(model), loss=loss)


@behaviour("FSDP2 TestFullyShardAutograd::test_unused_forward_output")
def an_output_that_no_loss_uses(ctx: Context) -> Any:
    """Use the second output in some steps only."""

    class Outputs(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            features = self.features(x)
            return self.head(features), features

    model = ctx.shard(ctx.build(Outputs))

    def loss(step: int) -> torch.Tensor:
        output, features = model(ctx.x(step))
        return output.square().mean() + (features.square().mean() if step % 2 else 0.0)

    return ctx.train(model, ctx.adamw(model), loss=loss)


@behaviour("FSDP2 TestFullyShardAutograd::test_unused_forward_module", deepspeed="works")
def a_block_that_no_forward_uses(ctx: Context) -> Any:
    """Train a model with a block that its forward never calls."""

    class Unused(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.ModuleList([Block()])

    return ctx.fit(Unused)


@behaviour("DDP test_ddp_control_flow_same_across_ranks")
def a_branch_taken_in_some_steps(ctx: Context) -> Any:
    """Leave out a block in every second step, on every rank."""

    class Branching(Stack):
        skip = False

        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.blocks[0](self.first(x))
            return x if self.skip else self.blocks[1](x)

    model = ctx.shard(ctx.build(Branching))

    def loss(step: int) -> torch.Tensor:
        model.skip = bool(step % 2)
        return model(ctx.x(step)).square().mean()

    return ctx.train(model, ctx.adamw(model), steps=4, loss=loss)


@behaviour("DeepSpeed TestZero3RepeatForwardLoop::test", deepspeed="works")
def a_block_in_a_loop(ctx: Context) -> Any:
    """Repeat a block four times in a loop inside the forward."""

    class Looping(Stack):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for _ in range(4):
                x = self.blocks[0](x)
            return self.blocks[1](x)

    return ctx.fit(Looping)


@behaviour("DeepSpeed TestZero3SwitchModes::test", deepspeed="works")
def train_and_eval_in_turns(ctx: Context) -> Any:
    """Turn from training to evaluation and back, with a forward in each mode."""
    model = ctx.shard(ctx.build(lambda: nn.Sequential(Stack(), nn.Dropout(0.0))))
    optim, values = ctx.adamw(model), []
    for step in range(3):
        model.train(step != 1)
        with torch.set_grad_enabled(step != 1):
            loss = model(ctx.x(step)).square().mean()
        values.append(ctx.mean(loss))
        if step != 1:
            loss.backward()
            optim.step()
            optim.zero_grad()
    return values, ctx.whole(model)


@behaviour("DDP test_ddp_returns_tensor_with_no_grad")
def an_output_without_a_gradient(ctx: Context) -> Any:
    """Return a detached tensor together with the output."""

    class Detached(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            output = super().forward(x)
            return output, output.detach().abs().mean()

    model = ctx.shard(ctx.build(Detached))
    return ctx.train(model, ctx.adamw(model), loss=lambda step: model(ctx.x(step))[0].square().mean())


@behaviour("DDP test_ddp_new_tensor_in_fwd")
def a_new_tensor_in_the_forward(ctx: Context) -> Any:
    """Make a tensor inside the forward and return it with the output."""

    class Making(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            return {"output": super().forward(x), "ones": [torch.ones(3)]}

    model = ctx.shard(ctx.build(Making))
    return ctx.train(model, ctx.adamw(model), loss=lambda step: model(ctx.x(step))["output"].square().mean())


@behaviour("DDP test_ddp_zero_output_features")
def a_layer_without_outputs(ctx: Context) -> Any:
    """Train a model in which a layer has 0 output features."""

    class Empty(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.none = nn.Linear(WIDTH, 0, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([super().forward(x), self.none(x)], dim=1)

    return ctx.fit(Empty)


@behaviour("FSDP2 TestFullyShardForwardInputs::test_root_no_forward_inputs")
def a_forward_without_inputs(ctx: Context) -> Any:
    """Train a module that has parameters only and takes no inputs."""

    class Only(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self) -> torch.Tensor:
            return self.weight @ self.weight

    model = ctx.shard(ctx.build(Only))
    return ctx.train(model, ctx.adamw(model), loss=lambda _step: model().square().mean())


@behaviour("torch idiom: inputs that require gradients")
def gradients_of_inputs(ctx: Context) -> Any:
    """Read the gradient of an input, as adversarial examples need it."""
    model = ctx.shard(ctx.build(Stack))
    x = ctx.x_of(0).requires_grad_()
    model(x).square().mean().backward()
    return x.grad


@behaviour("DeepSpeed TestEngineTorchFunc::test_grad_through_engine", deepspeed="works")
def torch_func_through_the_model(ctx: Context) -> Any:
    """Differentiate with respect to an input with `torch.func.grad` through the model."""
    model = ctx.shard(ctx.build(Stack))
    return torch.func.grad(lambda x: model(x).square().mean())(ctx.x_of(0))


@behaviour("torch idiom: torch.func between steps")
def torch_func_between_steps(ctx: Context) -> Any:
    """Train, and after each step take `grad`, `vjp`, `jvp` and `jacrev` with respect to an input."""
    model, x = ctx.shard(ctx.build(Stack)), ctx.x_of(0)
    taken = []

    def transform(step: int) -> None:
        output, pull = torch.func.vjp(model, x + step)
        taken.append(
            [
                torch.func.grad(lambda x: model(x).square().mean())(x),
                *pull(torch.ones_like(output)),
                torch.func.jvp(model, (x,), (torch.ones_like(x),))[1],
                torch.func.jacrev(model)(x),
            ]
        )

    return ctx.train(model, ctx.adamw(model), after_step=transform), taken


@behaviour("torch idiom: torch.func.functional_call")
def functional_call_with_other_values(ctx: Context) -> Any:
    """Run the model with other values through `torch.func.functional_call`."""
    model = ctx.shard(ctx.build(Stack))
    values = {name: value.detach() for name, value in ctx.build(Stack, seed=5).named_parameters()}
    with torch.no_grad():
        return torch.func.functional_call(model, values, (ctx.x_of(0),)).detach()


@behaviour("DeepSpeed TestZeroFrozenWeights::test", deepspeed="works")
def half_of_a_model_frozen(ctx: Context) -> Any:
    """Train the head and one block; the rest is frozen before sharding."""

    def make() -> nn.Module:
        model = Stack()
        model.first.requires_grad_(False)
        model.blocks[0].requires_grad_(False)
        return model

    return ctx.fit(make)


@behaviour("FSDP2 TestFullyShardFrozen::test_train_mixed_requires_grad_per_group")
def frozen_and_trained_parameters_in_every_block(ctx: Context) -> Any:
    """Train biases only."""

    def make() -> nn.Module:
        model = Stack()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.endswith("bias"))
        return model

    return ctx.fit(make)


@behaviour("LoRA idiom")
def adapters_beside_frozen_weights(ctx: Context) -> Any:
    """Train low-rank adapters next to frozen weights."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
            self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.up(self.down(x))

    return ctx.fit(lambda: nn.Sequential(*(Adapted() for _ in range(3))))


@behaviour("torch idiom: a step without a backward")
def step_without_gradients(ctx: Context) -> Any:
    """Call `step()` before any backward; nothing may change."""
    model = ctx.shard(ctx.build(Stack))
    optim = ctx.adamw(model)
    optim.step()
    optim.zero_grad()
    return ctx.train(model, optim)


@behaviour("torch idiom: a loss that is constant in some steps")
def steps_with_nothing_to_learn(ctx: Context) -> Any:
    """Multiply the loss by zero in one step; the optimizer still counts it."""
    model = ctx.shard(ctx.build(Stack))
    return ctx.train(
        model, ctx.adamw(model), loss=lambda step: model(ctx.x(step)).square().mean() * (0.0 if step == 1 else 1.0)
    )
