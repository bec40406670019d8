"""Pipeline parallelism: stages of consecutive blocks, run by torch's 1F1B and interleaved schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from thinwire.sharding.runtime.runtime import runtime_of
from thinwire.sharding.step.loss_scale import LossScale
from thinwire.spec import Plan

Loss = Callable[[Tensor, Tensor], Tensor]


class Pipeline:
    """This rank's stages and the order in which their micro-batches run.

    Args:
        chunks: Sharded modules of this rank's stages, in order.
        plan: Plan with the schedule and the number of micro-batches.
        group: Group of the pipeline's ranks.
        device: Device of this rank.
        loss: Mean loss of a micro-batch, from logits and labels.
        sequence_ways: Number of tensor-parallel ranks that share the tokens of hidden states.
        width: Width of hidden states, D.
        vocabulary: Size of the vocabulary of one rank's logits.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        plan: Plan,
        group: dist.ProcessGroup,
        device: torch.device,
        loss: Loss,
        *,
        sequence_ways: int,
        width: int,
        vocabulary: int,
    ) -> None:
        self._chunks, self._plan, self._group, self._device = tuple(chunks), plan, group, device
        self._sequence_ways, self._width, self._vocabulary, self._loss = sequence_ways, width, vocabulary, loss
        self._schedules: dict[tuple[int, int, int, bool], Any] = {}
        self._loss_scale: LossScale | None = None  # of the step under way
        self.holds_last = group.rank() == group.size() - 1
        """Whether this rank has the last stage, which knows the loss."""

    def step(self, ids: Tensor, labels: Tensor, loss_scale: LossScale | None = None) -> Tensor:
        """Forward and backward of a step's micro-batches.

        Args:
            ids: Token ids, int64, ``(M * B, T)``.
            labels: Labels, int64, ``(M * B, T)``.
            loss_scale: Factor of the losses in the backward; ``None``: 1.

        Returns:
            Mean loss, fp32; zero if this rank does not have the last stage.
        """
        count = self._plan.micro_batches
        schedule = self._schedule(count, ids.shape[0] // count, ids.shape[1], training=True)
        self._loss_scale = loss_scale
        if loss_scale is None:
            return self._run(schedule.step, ids, labels)
        loss_scale.applied = True  # on the last stage, whose messages carry the scale to the others
        return self._run(schedule.step, ids, labels) / loss_scale.value

    @torch.no_grad()
    def evaluate(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Mean loss of one micro-batch, ``(B, T)``; zero if this rank does not have the last stage."""
        return self._run(self._schedule(1, *ids.shape, training=False).eval, ids, labels)

    def _run(self, run: Callable[..., Any], ids: Tensor, labels: Tensor) -> Tensor:
        losses: list[Tensor] = []
        first = (ids,) if self._group.rank() == 0 else ()
        last = {"target": labels, "losses": losses} if self.holds_last else {}
        run(*first, return_outputs=False, **last)  # otherwise, it would keep all logits of the step
        if not losses:
            return torch.zeros((), dtype=torch.float32, device=self._device)
        return torch.stack([loss.detach() for loss in losses]).sum()

    def _schedule(self, count: int, sequences: int, tokens: int, *, training: bool) -> Any:
        key = (count, sequences, tokens, training)
        if key not in self._schedules:
            stages = self._stages(sequences, tokens)

            def loss(logits: Tensor, labels: Tensor) -> Tensor:
                mean = self._loss(logits, labels) / count
                return self._loss_scale.scale(mean) if training and self._loss_scale is not None else mean

            options: dict[str, Any] = {"n_microbatches": count, "loss_fn": loss, "scale_grads": False}
            if len(stages) > 1:
                self._schedules[key] = ScheduleInterleaved1F1B(list(stages), **options)
            else:
                kind = Schedule1F1B if training else ScheduleGPipe
                self._schedules[key] = kind(stages[0], **options)
        return self._schedules[key]

    def _stages(self, sequences: int, tokens: int) -> list[PipelineStage]:
        num_stages = self._group.size() * len(self._chunks)
        # Messages between stages: of hidden states and logits, in the compute dtype.
        message = partial(
            torch.empty, dtype=getattr(torch, self._plan.compute_dtype), device="meta", requires_grad=True
        )
        hidden = message(sequences, tokens // self._sequence_ways, self._width)
        logits = message(sequences, tokens, self._vocabulary)
        ids = torch.empty(sequences, tokens, dtype=torch.int64, device="meta")
        stages: list[PipelineStage] = []
        for number, chunk in enumerate(self._chunks):
            index = number * self._group.size() + self._group.rank()
            # Given, because torch would otherwise find them by a trial backward, which would count as part of the step.
            stages.append(
                _Stage(
                    chunk,
                    index,
                    num_stages,
                    self._device,
                    input_args=ids if index == 0 else hidden,
                    output_args=logits if index == num_stages - 1 else hidden,
                    group=self._group,
                )
            )
        return stages


class _Stage(PipelineStage):
    """A stage that tells its runtime the number of the current micro-batch."""

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run one micro-batch; returns hidden states or logits."""
        output: Any = self.submod(*args, **kwargs)
        found: Tensor = output if isinstance(output, Tensor) else output.logits
        return found

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """See torch's ``PipelineStage``."""
        runtime_of(self.submod).select_micro_batch(fwd_chunk_id, last=False)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """See torch's ``PipelineStage``."""
        runtime = runtime_of(self.submod)
        runtime.select_micro_batch(bwd_chunk_id, last=last_backward)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if last_backward:
            runtime.select_micro_batch(0, last=True)
