"""A process group that encodes the tensors it sends."""

from __future__ import annotations

import contextlib
import datetime
import functools
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
from thinwire.collectives.links.nccl import Membership
from thinwire.collectives.links.streams import streams_of
from thinwire.errors import UsageError, WireError
from thinwire.intercept import encoded
from thinwire.intercept.channels import Channels
from thinwire.intercept.gate import MIN_NUMEL, AxisCodecs, EncodingGate, Operation, scale_of
from thinwire.intercept.members import MembersAxis, check_nodes, count_nodes
from thinwire.intercept.plain import PlainGroup, options, reduction_options
from thinwire.intercept.queued import StreamQueue
from thinwire.intercept.scope import in_backward, is_marked
from thinwire.intercept.works import AllOf, Courier, Promise

MESSAGE_TAG, LENGTH_TAG = 1 << 28, 1 << 29
"""Added to the user's tag, so that an encoded message is never taken for a plain one."""

_MANY = 1 << 40
"""Times that a tensor counts where its number of values must not matter."""

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
        self._members: dict[tuple[torch.device, int], MembersAxis] = {}
        self._courier = Courier(f"thinwire-{axis}")
        self._receivers: dict[tuple[int, int], Courier] = {}
        self._queues: dict[torch.device, StreamQueue] = {}
        self._channels: dict[torch.device, Channels] = {}
        self._seeds = itertools.count(inner.rank(), inner.size())
        self.configure(codecs, min_numel=min_numel, always=always)
        _groups.add(self)
        before_shutdown(self.shutdown)

    def configure(
        self, codecs: AxisCodecs, *, min_numel: int = MIN_NUMEL, always: bool = False, nodes: int | None = 1
    ) -> None:
        """Change the codecs. All ranks must call this at the same point of their program.

        Args:
            codecs: Codecs by operation.
            min_numel: Tensors with fewer values are sent unencoded.
            always: Encode outside training steps too.
            nodes: Number of nodes that the group spans. Encoded reductions and gathers take one hop inside nodes and
                one across, so that a byte crosses nodes once. ``None`` derives the number from ``LOCAL_WORLD_SIZE``.

        Raises:
            UsageError: Nodes have different numbers of members.
        """
        counted = count_nodes(self._ranks, nodes, self.axis)
        self._gate = EncodingGate(len(self._ranks), codecs, min_numel, always=always, nodes=counted)

    @property
    def codecs(self) -> AxisCodecs:
        """Codecs by operation."""
        return self._gate.codecs

    def shutdown(self) -> None:
        """Finish pending operations and close the connections."""
        for courier in (self._courier, *self._receivers.values()):
            courier.close()
        for axis in self._members.values():
            axis.leave()
        for channels in self._channels.values():
            channels.leave()
        self._receivers, self._queues, self._members, self._channels = {}, {}, {}, {}
        _groups.discard(self)
        super().shutdown()

    # ------------------------------------------------------------------------------------------------ reductions

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        opts = reduction_options(AllreduceOptions, opts, timeout)
        if len(tensors) != 1:
            return self._all_reduce_many(tensors, opts, self._inner.allreduce)
        codec, why = self._choose("reduce", tensors[0], opts=opts)
        if codec is None:
            return self._pass_one_on("all_reduce", tensors[0], why, self._inner.allreduce, tensors, opts)
        return self._encoded_reduce(tensors[0], codec, opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:
        """Several all-reduces in one call."""
        opts = reduction_options(AllreduceCoalescedOptions, opts)
        return self._all_reduce_many(tensors, opts, self._inner.allreduce_coalesced)

    def _all_reduce_many(self, tensors: Sequence[torch.Tensor], opts: Any, call: Callable[..., dist.Work]) -> dist.Work:
        return self._each("reduce", self._encoded_reduce, "all_reduce", call, [tensors], opts)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> dist.Work:
        opts = reduction_options(ReduceScatterOptions, opts)
        codec, why = self._choose("reduce", tensor, opts=opts)
        if codec is None:
            call = self._inner_call("reduce_scatter_single")
            return self._pass_one_on("reduce_scatter", tensor, why, call, output, tensor, opts)
        return self._encoded_scatter(output, tensor, codec, opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Several such operations in one call."""
        opts = reduction_options(ReduceScatterOptions, opts)
        call = self._inner_call("reduce_scatter_single_coalesced")
        return self._each("reduce", self._encoded_scatter, "reduce_scatter", call, [outputs, tensors], opts)

    def reduce_scatter(self, outputs: Any, tensors: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        if isinstance(outputs, torch.Tensor):
            outputs, tensors = [outputs], [tensors]
        opts = reduction_options(ReduceScatterOptions, opts, timeout)
        even = all(tensor.numel() == outputs[0].numel() for tensor in tensors[0])
        codec, why = self._choose("reduce", outputs[0], len(self._ranks), opts=opts)
        if codec is None or len(outputs) != 1 or not even:
            call = self._inner.reduce_scatter
            return self._pass_on("reduce_scatter", tensors, call, outputs, tensors, opts, why=[why])
        return self._encoded_scatter(outputs[0], tensors[0], codec, opts)

    # ------------------------------------------------------------------------------------------------ gathers

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> dist.Work:
        opts = options(AllgatherOptions, opts)
        codec, why = self._choose("gather", tensor)
        if codec is None:
            call = self._inner_call("all_gather_single")
            return self._pass_one_on("all_gather", tensor, why, call, output, tensor, opts)
        return self._encoded_gather(output, tensor, codec, opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Several such operations in one call."""
        opts = options(AllgatherOptions, opts)
        call = self._inner_call("all_gather_single_coalesced")
        return self._each("gather", self._encoded_gather, "all_gather", call, [outputs, tensors], opts)

    def allgather(self, outputs: Any, tensors: Any, opts: Any = None, timeout: Any = None) -> dist.Work:  # type: ignore[override]
        if isinstance(tensors, torch.Tensor):
            outputs, tensors = [outputs], [tensors]
        opts = options(AllgatherOptions, opts, timeout)
        even = all(output.numel() == tensors[0].numel() for output in outputs[0])
        codec, why = self._choose("gather", tensors[0])
        if codec is None or len(tensors) != 1 or not even:
            return self._pass_on("all_gather", tensors, self._inner.allgather, outputs, tensors, opts, why=[why])
        return self._encoded_gather(outputs[0], tensors[0], codec, opts)

    # Older names: without them, torch would bypass this class.
    _allgather_base: Any = all_gather_single
    allgather_into_tensor_coalesced: Any = all_gather_single_coalesced
    _reduce_scatter_base: Any = reduce_scatter_single
    reduce_scatter_tensor_coalesced: Any = reduce_scatter_single_coalesced

    # -------------------------------------------------------------------------------------------- all-to-alls

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        received: Sequence[int] | None = None,
        sent: Sequence[int] | None = None,
        *rest: Any,
    ) -> dist.Work:
        """See :func:`torch.distributed.all_to_all_single`. Each rank's piece is encoded by itself, as a message that is
        sent; what a rank keeps is not encoded."""
        # Pieces have different sizes, of which no rank knows all: whether any may be encoded must not depend on them.
        chosen, why = self._choose("send", tensor, times=_MANY)
        to_ranks, from_ranks = self._pieces(tensor, sent, chosen), self._pieces(output, received, chosen)
        plain = [numel * tensor.itemsize for numel in to_ranks.numels]
        if chosen is None:
            call = self._inner_call("all_to_all_single")
            self._report_exchange("none", plain, plain, why)
            return self._noted(self._counted(call, output, tensor, received or [], sent or [], *rest), tensor.device)

        def body() -> None:
            members = self._joined_members(output.device, 1).inside
            lengths = encoded.all_to_all(members, output, tensor, from_ranks, to_ranks, self._seed)
            self._report_exchange(str(chosen.spec), plain, lengths)

        (output,), (tensor,) = encoded.arrived([output]), encoded.arrived([tensor])
        return self._run(body, [output], [tensor], waits=not getattr(rest[0] if rest else None, "asyncOp", True))

    alltoall_base: Any = all_to_all_single  # an older name

    def _pieces(self, tensor: torch.Tensor, rows: Sequence[int] | None, chosen: Codec | None) -> encoded.RankPieces:
        """The pieces of a tensor, and the codecs of those that other ranks have or get."""
        numels = encoded.numels(tensor, rows, len(self._ranks))
        codecs = [None if chosen is None else self._gate.choose("send", tensor, numel)[0] for numel in numels]
        codecs[self.rank()] = None
        return encoded.RankPieces(numels, tuple(codecs), tensor.dtype)

    def _report_exchange(self, codec: str, plain: Sequence[int], sent: Sequence[int], why: str = "") -> None:
        """Count what other ranks get, in bytes by rank."""
        mine = self.rank()
        local = len(sent) // self._gate.nodes  # ranks of a node, which are consecutive
        first = mine // local * local
        across = sum(sent) - sum(sent[first : first + local])
        self._ledger.add("all_to_all", codec, sum(plain) - plain[mine], sum(sent) - sent[mine], across=across, why=why)

    # ------------------------------------------------------------------------------------------ point-to-point

    def send(self, tensors: Sequence[torch.Tensor], dst: int, tag: int = 0) -> dist.Work:
        """See :func:`torch.distributed.isend`; ``dst`` is a rank of the group."""
        (tensor,) = tensors
        codec, why = self._choose("send", tensor, tag=tag)
        if encoded.is_plain(tensor) and streams_of(tensor.device) is not None:
            channels, seed = self._channels_of(tensor.device), None if codec is None else self._seed(codec)
            plain = self._plain_bytes("send", tensor.nbytes)
            work, sent = channels.send(tensor, dst, codec, seed)
            self._ledger.add("send", _name(codec), plain, sent, why=why)
            return self._noted(work, tensor.device)
        if codec is None:
            return self._pass_one_on("send", tensor, why, self._inner.send, tensors, dst, tag)
        with self._waiting(tensor.device):
            message = codec.encode(encoded.ready(tensor), seed=self._seed(codec))
        works = []
        sent = message.numel()
        if codec.spec.is_variable_length:
            length = torch.tensor([sent], device="cpu")
            works.append(self._counted(self._inner.send, [length], dst, tag + LENGTH_TAG))
            sent += length.nbytes
        works.append(self._counted(self._inner.send, [message], dst, tag + MESSAGE_TAG))
        self._ledger.add("send", str(codec.spec), tensor.nbytes, sent)
        return self._noted(AllOf(works, tensors, held=message), tensor.device)

    def recv(self, tensors: Sequence[torch.Tensor], src: int, tag: int = 0) -> dist.Work:
        """See :func:`torch.distributed.irecv`; ``src`` is a rank of the group."""
        (tensor,) = tensors
        codec, why = self._choose("send", tensor, tag=tag)
        if encoded.is_plain(tensor) and streams_of(tensor.device) is not None:
            self._ledger.add("recv", _name(codec), 0, 0, why=why)
            return self._noted(self._channels_of(tensor.device).receive(tensor, src, codec), tensor.device)
        if codec is None:
            return self._pass_one_on("recv", tensor, why, self._inner.recv, tensors, src, tag)
        self._ledger.add("recv", str(codec.spec), 0, 0)
        return self._noted(self._receive(tensor, src, tag, codec), tensor.device)

    def _receive(self, tensor: torch.Tensor, src: int, tag: int, codec: Codec) -> dist.Work:
        """Receive an encoded message over the inner group, and decode it on a thread."""
        room = torch.empty(codec.max_wire_bytes(tensor.numel(), tensor.dtype), dtype=torch.uint8, device="cpu")
        if codec.spec.is_variable_length:
            length = torch.empty(1, dtype=torch.int64, device="cpu")
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
        receiver = self._receivers.get((src, tag))
        if receiver is None:
            receiver = self._receivers[src, tag] = Courier(f"thinwire-{self.axis}-from-{src}")
        promise = Promise([tensor])
        receiver.perform(receive, promise, wait=False)
        return promise

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int = 0) -> dist.Work:
        """See :func:`torch.distributed.irecv` without a source.

        Raises:
            UsageError: The message would be encoded. Its length depends on the sender, which is unknown.
        """
        codec, why = self._choose("send", tensors[0], tag=tag)
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
        return self._noted(AllOf(works), device)

    # ------------------------------------------------------------------------------------------------ encoded

    def _choose(
        self, operation: Operation, tensor: torch.Tensor, times: int = 1, opts: Any = None, tag: int = 0
    ) -> tuple[Codec | None, str]:
        """The codec of ``times`` tensors like this one and an empty string, or ``None`` and the reason."""
        if not self._gate.encodes(operation):
            return None, ""
        if tag >= MESSAGE_TAG:
            return None, "tag"
        if not encoded.is_plain(tensor):
            return None, type(tensor).__name__
        choice = self._gate.choose(operation, tensor, times * tensor.numel(), opts)
        if choice[0] is not None and self._gate.missed_step and in_backward() and not is_marked():
            self._warn_once(
                "encodes what it sends in the backward pass and nothing in the forward pass, because no training step "
                "is marked: call thinwire.mark_steps(model), or put `with thinwire.step_scope():` around the step"
            )
        return choice

    def _each(
        self,
        operation: Operation,
        encode: Callable[..., dist.Work],
        name: str,
        call: Callable[..., dist.Work],
        lists: Sequence[Sequence[torch.Tensor]],
        opts: Any,
    ) -> dist.Work:
        """Perform a coalesced call with lists of results and of tensors to send, or one list of both: those that have a
        codec are encoded one by one, and the others forwarded together."""
        reduces = opts if operation == "reduce" else None
        choices = [self._choose(operation, tensor, opts=reduces) for tensor in lists[-1]]
        rows = zip(*lists, strict=True)
        works = [encode(*row, codec, opts) for row, (codec, _) in zip(rows, choices, strict=True) if codec is not None]
        plain = [i for i, (codec, _) in enumerate(choices) if codec is None]
        if plain or not choices:
            rest = [[tensors[i] for i in plain] for tensors in lists]
            works.append(self._pass_on(name, rest[-1], call, *rest, opts, why=[choices[i][1] for i in plain]))
        return works[0] if len(works) == 1 else AllOf(works, lists[0])

    def _encoded_reduce(self, tensor: torch.Tensor, codec: Codec, opts: Any) -> dist.Work:
        scale, codecs = self._scale(opts), self._gate.hops(codec, tensor, tensor.numel())
        (tensor,) = encoded.arrived([tensor])
        body = functools.partial(encoded.all_reduce, tensor=tensor, scale=scale, codecs=codecs)
        return self._perform("all_reduce", codec, body, [tensor], [], tensor.nbytes, opts)

    def _encoded_gather(
        self, output: torch.Tensor | Sequence[torch.Tensor], tensor: torch.Tensor, codec: Codec, opts: Any
    ) -> dist.Work:
        """Gather into one tensor, or one for each rank."""
        outputs = encoded.arrived([output] if isinstance(output, torch.Tensor) else output)
        (tensor,) = encoded.arrived([tensor])
        body = functools.partial(encoded.all_gather, outputs=outputs, tensor=tensor, codec=codec)
        return self._perform("all_gather", codec, body, outputs, [tensor], tensor.nbytes, opts)

    def _encoded_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor | Sequence[torch.Tensor], codec: Codec, opts: Any
    ) -> dist.Work:
        """Reduce one tensor, or one for each rank."""
        nbytes = output.nbytes * len(self._ranks)
        scale, codecs = self._scale(opts), self._gate.hops(codec, output, output.numel() * len(self._ranks))
        (output,) = encoded.arrived([output])
        inputs = encoded.arrived([tensor] if isinstance(tensor, torch.Tensor) else tensor)
        body = functools.partial(encoded.reduce_scatter, output=output, inputs=inputs, scale=scale, codecs=codecs)
        return self._perform("reduce_scatter", codec, body, [output], inputs, nbytes, opts)

    def _perform(
        self,
        operation: str,
        codec: Codec,
        call: Callable[..., None],
        results: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        nbytes: int,
        opts: Any,
    ) -> dist.Work:
        """Perform an encoded operation, which takes an axis and a ``seed``, of a tensor of ``nbytes``: on a stream of
        the group; or without streams on its thread, or on this one if the caller waits for it anyway."""
        seed, device, nodes = self._seed(codec), results[0].device, self._gate.nodes

        def body() -> None:
            axis = self._joined_members(device, nodes)
            inside, across = axis.inside.sent, axis.across.sent
            call(axis, seed=seed)
            inside, across = axis.inside.sent - inside, axis.across.sent - across
            plain = self._plain_bytes(operation, nbytes)
            self._ledger.add(operation, str(codec.spec), plain, inside + across, across=across)

        return self._run(body, results, inputs, waits=not opts.asyncOp)

    def _run(
        self, body: Callable[[], None], results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], *, waits: bool
    ) -> dist.Work:
        """Run the body of an operation; ``waits``: whether the caller waits for it anyway."""
        device = results[0].device
        streams = streams_of(device)
        if streams is not None and device not in self._queues:
            self._queues[device] = StreamQueue(streams, device)
        with self._waiting(device) if waits else contextlib.nullcontext():
            if streams is not None:
                return self._noted(self._queues[device].perform(body, results, inputs, wait=waits), device)
            promise = Promise(results)
            self._courier.perform(body, promise, wait=waits)
            return self._noted(promise, device)

    def _joined_members(self, device: torch.device, nodes: int) -> MembersAxis:
        if (device, nodes) not in self._members:
            membership = self._membership(device, f"encoded/{nodes}")
            check_nodes(dist.PrefixStore(f"thinwire/{self.number}", self._store), nodes, self.axis)
            self._members[device, nodes] = MembersAxis.join(membership, self.axis, nodes)
        return self._members[device, nodes]

    def _channels_of(self, device: torch.device) -> Channels:
        if device not in self._channels:
            self._channels[device] = Channels(self._membership(device, "channels"), self.axis)
        return self._channels[device]

    def _membership(self, device: torch.device, what: str) -> Membership:
        """The members of this group, with a part of the store for one use of them."""
        options = getattr(self._inner._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", _DEFAULT_TIMEOUT)
        name = f"thinwire/{what}/{device.type}/{self.number}"
        return Membership(name, self._ranks, self.rank(), dist.PrefixStore(name, self._store), timeout, device)

    def _scale(self, opts: Any) -> float:
        scale = scale_of(opts.reduceOp, len(self._ranks))
        assert scale is not None
        return scale

    def _seed(self, codec: Codec) -> int | None:
        """A seed that no other message of any rank has; ``None`` if the codec needs none."""
        return next(self._seeds) if codec.spec.needs_seed else None


def _name(codec: Codec | None) -> str:
    return "none" if codec is None else str(codec.spec)
