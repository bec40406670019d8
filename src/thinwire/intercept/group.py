"""A process group that encodes the tensors it sends."""

from __future__ import annotations

import datetime
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    ReduceScatterOptions,
)

from thinwire.codecs import Codec
from thinwire.collectives.group import before_shutdown
from thinwire.errors import UsageError, WireError
from thinwire.intercept import encoded
from thinwire.intercept.gate import MIN_NUMEL, AxisCodecs, EncodingGate, scale_of
from thinwire.intercept.members import MemberGroup, MembersAxis
from thinwire.intercept.plain import PlainGroup
from thinwire.intercept.scope import in_backward, is_marked
from thinwire.intercept.works import AllOf, Courier, Promise

__all__ = ["CompressingGroup", "all_groups"]

MESSAGE_TAG, LENGTH_TAG = 1 << 28, 1 << 29
"""Added to the user's tag, so that an encoded message is never taken for a plain one."""

_DEFAULT_TIMEOUT = datetime.timedelta(seconds=300)
_groups: weakref.WeakSet[CompressingGroup] = weakref.WeakSet()


def all_groups() -> list[CompressingGroup]:
    """The groups of this job that are alive, in the order of their creation."""
    return sorted(_groups, key=lambda group: group.order)


class CompressingGroup(PlainGroup):
    """Replaces another group. It encodes floating-point tensors of a training step and forwards everything else.

    It encodes all-reduces and reduce-scatters whose operation is ``SUM`` or ``AVG``, all-gathers, sends and receives,
    including coalesced ones. A tensor is sent unencoded if it is not of a floating-point dtype, has fewer than
    ``min_numel`` values, belongs to no training step (:mod:`thinwire.intercept.scope`), or would not become smaller. An
    all-reduce consists of a reduce-scatter and an all-gather. Sums are computed in fp32.

    Args:
        inner: Group that performs the unencoded operations and carries point-to-point messages; it must have been made
            with a store.
        axis: Name of the axis in reports.
        ranks: Global ranks, in the group's order.
        codecs: Codecs by operation.
        min_numel: Tensors with fewer values are sent unencoded.
        always: Encode outside training steps too, but not inside :func:`~thinwire.exact_scope`.
        owns_inner: Whether this is the only user of ``inner``.
    """

    _order = itertools.count()

    def __init__(
        self,
        inner: dist.ProcessGroup,
        *,
        axis: str,
        ranks: Sequence[int],
        codecs: AxisCodecs,
        min_numel: int = MIN_NUMEL,
        always: bool = False,
        owns_inner: bool = True,
    ) -> None:
        super().__init__(inner, axis=axis, ranks=ranks, owns_inner=owns_inner)
        self.order = next(self._order)
        self._members: MembersAxis | None = None
        self._courier = Courier(f"thinwire-{axis}")
        self._channels: dict[tuple[int, int], Courier] = {}
        self._seeds = itertools.count(inner.rank(), inner.size())
        self.configure(codecs, min_numel=min_numel, always=always)
        _groups.add(self)
        itself = weakref.ref(self)
        before_shutdown(lambda: _shut_down(itself))

    def configure(self, codecs: AxisCodecs, *, min_numel: int = MIN_NUMEL, always: bool = False) -> None:
        """Change the codecs. All ranks must call this at the same point of their program."""
        self._gate = EncodingGate(len(self._ranks), codecs, min_numel, always=always)

    @property
    def codecs(self) -> AxisCodecs:
        """Codecs by operation."""
        return self._gate.codecs

    def shutdown(self) -> None:
        """Finish pending operations and close the connections."""
        for courier in (self._courier, *self._channels.values()):
            courier.close()
        self._channels = {}
        _groups.discard(self)
        if self._members is not None:
            self._members.members.leave()
            self._members = None
        super().shutdown()

    # ------------------------------------------------------------------------------------------------ reductions

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """See :func:`torch.distributed.all_reduce`."""
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        opts = _with_op(AllreduceOptions, opts, timeout)
        if len(tensors) != 1:
            return self._all_reduce_many(tensors, opts, self._inner.allreduce)
        codec, why = self._choose(self._gate.reduce, tensors[0], opts=opts)
        if codec is None:
            return self._pass_one_on("all_reduce", tensors[0], why, self._inner.allreduce, tensors, opts)
        return self._encoded_reduce(tensors[0], codec, opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:
        """Several all-reduces in one call."""
        return self._all_reduce_many(
            tensors, _with_op(AllreduceCoalescedOptions, opts), self._inner.allreduce_coalesced
        )

    def _all_reduce_many(self, tensors: Sequence[torch.Tensor], opts: Any, call: Callable[..., dist.Work]) -> dist.Work:
        def encode(i: int, codec: Codec) -> dist.Work:
            return self._encoded_reduce(tensors[i], codec, opts)

        def pass_on(chosen: Sequence[int], why: Sequence[str]) -> dist.Work:
            rest = [tensors[i] for i in chosen]
            return self._pass_on("all_reduce", rest, call, rest, opts, why=why)

        choices = [self._choose(self._gate.reduce, tensor, opts=opts) for tensor in tensors]
        return _each(choices, encode, pass_on, tensors)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> dist.Work:
        """See :func:`torch.distributed.reduce_scatter_single`."""
        opts = _with_op(ReduceScatterOptions, opts)
        codec, why = self._choose(self._gate.reduce, tensor, opts=opts)
        if codec is None:
            call = self._inner_call("reduce_scatter_single")
            return self._pass_one_on("reduce_scatter", tensor, why, call, output, tensor, opts)
        return self._encoded_scatter(output, [tensor], codec, opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Several such operations in one call."""
        opts = _with_op(ReduceScatterOptions, opts)

        def encode(i: int, codec: Codec) -> dist.Work:
            return self._encoded_scatter(outputs[i], [tensors[i]], codec, opts)

        def pass_on(chosen: Sequence[int], why: Sequence[str]) -> dist.Work:
            outs, ins = [outputs[i] for i in chosen], [tensors[i] for i in chosen]
            call = self._inner_call("reduce_scatter_single_coalesced")
            return self._pass_on("reduce_scatter", ins, call, outs, ins, opts, why=why)

        choices = [self._choose(self._gate.reduce, tensor, opts=opts) for tensor in tensors]
        return _each(choices, encode, pass_on, outputs)

    def reduce_scatter(self, outputs: Any, tensors: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """See :func:`torch.distributed.reduce_scatter`."""
        if isinstance(outputs, torch.Tensor):
            outputs, tensors = [outputs], [tensors]
        opts = _with_op(ReduceScatterOptions, opts, timeout)
        even = all(tensor.numel() == outputs[0].numel() for tensor in tensors[0])
        codec, why = self._choose(self._gate.reduce, outputs[0], len(self._ranks), opts=opts)
        if codec is None or len(outputs) != 1 or not even:
            return self._pass_on(
                "reduce_scatter", tensors, self._inner.reduce_scatter, outputs, tensors, opts, why=[why]
            )
        return self._encoded_scatter(outputs[0], tensors[0], codec, opts)

    # ------------------------------------------------------------------------------------------------ gathers

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> dist.Work:
        """See :func:`torch.distributed.all_gather_single`."""
        opts = _options(AllgatherOptions, opts)
        codec, why = self._choose(self._gate.gather, tensor)
        if codec is None:
            call = self._inner_call("all_gather_single")
            return self._pass_one_on("all_gather", tensor, why, call, output, tensor, opts)
        return self._encoded_gather([output], tensor, codec, opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Several such operations in one call."""
        opts = _options(AllgatherOptions, opts)

        def encode(i: int, codec: Codec) -> dist.Work:
            return self._encoded_gather([outputs[i]], tensors[i], codec, opts)

        def pass_on(chosen: Sequence[int], why: Sequence[str]) -> dist.Work:
            outs, ins = [outputs[i] for i in chosen], [tensors[i] for i in chosen]
            return self._pass_on(
                "all_gather", ins, self._inner_call("all_gather_single_coalesced"), outs, ins, opts, why=why
            )

        choices = [self._choose(self._gate.gather, tensor) for tensor in tensors]
        return _each(choices, encode, pass_on, outputs)

    def allgather(self, outputs: Any, tensors: Any, opts: Any = None, timeout: Any = None) -> dist.Work:  # type: ignore[override]
        """See :func:`torch.distributed.all_gather`."""
        if isinstance(tensors, torch.Tensor):
            outputs, tensors = [outputs], [tensors]
        opts = _options(AllgatherOptions, opts, timeout)
        even = all(output.numel() == tensors[0].numel() for output in outputs[0])
        codec, why = self._choose(self._gate.gather, tensors[0])
        if codec is None or len(tensors) != 1 or not even:
            return self._pass_on("all_gather", tensors, self._inner.allgather, outputs, tensors, opts, why=[why])
        return self._encoded_gather(outputs[0], tensors[0], codec, opts)

    # Older names: without them, torch would bypass this class.

    def _allgather_base(self, *args: Any) -> dist.Work:
        return self.all_gather_single(*args)

    def _reduce_scatter_base(self, *args: Any) -> dist.Work:
        return self.reduce_scatter_single(*args)

    def allgather_into_tensor_coalesced(self, *args: Any) -> dist.Work:
        """An older name of :meth:`all_gather_single_coalesced`."""
        return self.all_gather_single_coalesced(*args)

    def reduce_scatter_tensor_coalesced(self, *args: Any) -> dist.Work:
        """An older name of :meth:`reduce_scatter_single_coalesced`."""
        return self.reduce_scatter_single_coalesced(*args)

    # ------------------------------------------------------------------------------------------ point-to-point

    def send(self, tensors: Sequence[torch.Tensor], dst: int, tag: int = 0) -> dist.Work:
        """See :func:`torch.distributed.isend`; ``dst`` is a rank of the group."""
        (tensor,) = tensors
        codec, why = self._choose(self._gate.send, tensor, tag=tag)
        if codec is None:
            return self._pass_one_on("send", tensor, why, self._inner.send, tensors, dst, tag)
        with self._waiting():
            message = codec.encode(encoded.ready(tensor), seed=self._seed(codec))
        works = []
        sent = message.numel()
        if codec.spec.is_variable_length:
            length = torch.tensor([sent])
            works.append(self._counted(self._inner.send, [length], dst, tag + LENGTH_TAG))
            sent += length.nbytes
        works.append(self._counted(self._inner.send, [message], dst, tag + MESSAGE_TAG))
        self._report("send", str(codec.spec), tensor.nbytes, sent)
        return self._noted(AllOf(works, tensors, held=message))

    def recv(self, tensors: Sequence[torch.Tensor], src: int, tag: int = 0) -> dist.Work:
        """See :func:`torch.distributed.irecv`; ``src`` is a rank of the group."""
        (tensor,) = tensors
        codec, why = self._choose(self._gate.send, tensor, tag=tag)
        if codec is None:
            return self._pass_one_on("recv", tensor, why, self._inner.recv, tensors, src, tag)
        self._report("recv", str(codec.spec), 0, 0)
        room = torch.empty(codec.max_wire_bytes(tensor.numel(), tensor.dtype), dtype=torch.uint8)
        if codec.spec.is_variable_length:
            length = torch.empty(1, dtype=torch.int64)
            first = self._counted(self._inner.recv, [length], src, tag + LENGTH_TAG)
        else:
            first = self._counted(self._inner.recv, [room], src, tag + MESSAGE_TAG)

        def receive() -> None:
            message = room
            first.wait()
            if codec.spec.is_variable_length:
                if not 0 < int(length) <= room.numel():
                    raise WireError(f"axis {self.axis}: a message of {int(length)} bytes, expected 1 to {room.numel()}")
                message = room[: int(length)]
                self._counted(self._inner.recv, [message], src, tag + MESSAGE_TAG).wait()
            encoded.decode(codec, message, tensor)

        # Each pair of ranks and tag has a thread, so that waiting for one message does not delay other channels.
        channel = self._channels.get((src, tag))
        if channel is None:
            channel = self._channels[src, tag] = Courier(f"thinwire-{self.axis}-from-{src}")
        promise = Promise(tensors)
        channel.perform(receive, promise, wait=False)
        return self._noted(promise)

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int = 0) -> dist.Work:
        """See :func:`torch.distributed.irecv` without a source.

        Raises:
            UsageError: The message would be encoded. Its length depends on the sender, which is unknown.
        """
        codec, why = self._choose(self._gate.send, tensors[0], tag=tag)
        if codec is not None:
            raise UsageError(
                f"axis {self.axis} receives with codec {codec.spec}: name the rank that sends, or send and receive "
                "inside thinwire.exact_scope()"
            )
        return self._pass_on("recv", tensors, self._inner.recv_anysource, tensors, tag, why=[why])

    # ------------------------------------------------------------------------------------------------ coalescing

    def _start_coalescing(self, device: torch.device) -> None:
        """Start a coalescing block; an error here would leave torch's block open, and torch would drop collectives."""
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        works, self._coalesced = self._coalesced or [], None
        return self._noted(AllOf(works))

    # ------------------------------------------------------------------------------------------------ encoded

    def _choose(
        self, codec: Codec | None, tensor: torch.Tensor, times: int = 1, opts: Any = None, tag: int = 0
    ) -> tuple[Codec | None, str]:
        """The codec of ``times`` tensors like this one and an empty string, or ``None`` and the reason."""
        if codec is None:
            return None, ""
        if tag >= MESSAGE_TAG:
            return None, "tag"
        if not encoded.is_plain(tensor):
            return None, type(tensor).__name__
        choice = self._gate.choose(codec, tensor, times * tensor.numel(), opts)
        if choice[0] is not None and self._gate.missed_step and in_backward() and not is_marked():
            self._warn_once(
                "encodes what it sends in the backward pass and nothing in the forward pass, because no training step "
                "is marked: call thinwire.mark_steps(model), or put `with thinwire.step_scope():` around the step"
            )
        return choice

    def _encoded_reduce(self, tensor: torch.Tensor, codec: Codec, opts: Any) -> dist.Work:
        scale = self._scale(opts)

        def body(axis: MembersAxis, seed: int | None) -> None:
            encoded.all_reduce(axis, tensor, scale, codec, seed)

        return self._perform("all_reduce", codec, body, [tensor], tensor.nbytes, opts)

    def _encoded_gather(
        self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, codec: Codec, opts: Any
    ) -> dist.Work:
        def body(axis: MembersAxis, seed: int | None) -> None:
            encoded.all_gather(axis, outputs, tensor, codec, seed)

        return self._perform("all_gather", codec, body, outputs, tensor.nbytes, opts)

    def _encoded_scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], codec: Codec, opts: Any
    ) -> dist.Work:
        scale = self._scale(opts)

        def body(axis: MembersAxis, seed: int | None) -> None:
            encoded.reduce_scatter(axis, output, inputs, scale, codec, seed)

        return self._perform("reduce_scatter", codec, body, [output], output.nbytes * len(self._ranks), opts)

    def _perform(
        self,
        op: str,
        codec: Codec,
        body: Callable[[MembersAxis, int | None], None],
        results: Sequence[torch.Tensor],
        nbytes: int,
        opts: Any,
    ) -> dist.Work:
        """Run an encoded operation on the group's thread, or on this one if the caller waits for it anyway."""
        seed = self._seed(codec)

        def task() -> None:
            axis = self._joined_members()
            before = axis.members.sent
            body(axis, seed)
            self._report(op, str(codec.spec), self._plain_bytes(op, nbytes), axis.members.sent - before)

        promise = Promise(results)
        if opts.asyncOp:
            self._courier.perform(task, promise, wait=False)
        else:
            with self._waiting():
                self._courier.perform(task, promise, wait=True)
        return self._noted(promise)

    def _joined_members(self) -> MembersAxis:
        if self._members is None:
            options = getattr(self._backend, "options", None)
            timeout = getattr(options, "_timeout", _DEFAULT_TIMEOUT)
            store = dist.PrefixStore(f"thinwire/encoded/{self.number}", self._store)
            self._members = MembersAxis(MemberGroup(self._ranks, self.rank(), self.axis, store, timeout))
        return self._members

    def _scale(self, opts: Any) -> float:
        scale = scale_of(opts.reduceOp, len(self._ranks))
        assert scale is not None
        return scale

    def _seed(self, codec: Codec) -> int | None:
        """A seed that no other message of any rank has; ``None`` if the codec needs none."""
        return next(self._seeds) if codec.spec.needs_seed else None


def _each(
    choices: Sequence[tuple[Codec | None, str]],
    encode: Callable[[int, Codec], dist.Work],
    pass_on: Callable[[Sequence[int], Sequence[str]], dist.Work],
    results: Sequence[torch.Tensor],
) -> dist.Work:
    """Encode those tensors of a coalesced call that have a codec one by one, and forward the others together."""
    plain = [i for i, (codec, _) in enumerate(choices) if codec is None]
    works = [encode(i, codec) for i, (codec, _) in enumerate(choices) if codec is not None]
    if plain or not choices:
        works.append(pass_on(plain, [choices[i][1] for i in plain]))
    return works[0] if len(works) == 1 else AllOf(works, results)


def _options(kind: Any, opts: Any, timeout: Any = None) -> Any:
    """The options of a call, with defaults if the caller has given none."""
    if isinstance(opts, kind):
        return opts
    made = kind()
    if timeout is not None:
        made.timeout = timeout
    return made


def _with_op(kind: Any, opts: Any, timeout: Any = None) -> Any:
    """The options of a reduction. Callers may pass the operation in their place."""
    made = _options(kind, opts, timeout)
    if opts is not None and made is not opts:
        made.reduceOp = opts
    return made


def _shut_down(reference: weakref.ref[CompressingGroup]) -> None:
    group = reference()
    if group is not None:
        group.shutdown()
