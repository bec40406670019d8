"""Other implementations, each called as its authors intend. All of them are optional.

A peer allocates its results, because none of them accepts buffers. Where a peer has options, the fastest are used:
zfpy's rate mode without a header, ZipNN with its bf16 byte layout and one thread.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from thinwire.errors import SpecError
from thinwire_bench.codecs.accuracy import Accuracy, accuracy, signal_to_noise
from thinwire_bench.codecs.data import normal
from thinwire_bench.codecs.soundness import same_bits
from thinwire_bench.codecs.speeds import TimedCall
from thinwire_bench.environment import installed

_BLOCK = 256
_TRIAL = 1 << 14


@dataclass(frozen=True)
class CodecPeer:
    """Another implementation.

    Attributes:
        name: Name in the table.
        summary: Description of the peer.
        encode: Encodes a tensor into the peer's own representation.
        decode: Decodes the representation; gets the original tensor as well, for its shape and dtype.
        num_bytes: Bytes of the representation.
        package: Package that it needs besides torch, if any.
        dtypes: Dtypes that it accepts.
        on_cuda: Whether it accepts a tensor on a GPU.
        timed: Whether its speed is meaningful.
        lossless: Whether it must return exactly its input.
    """

    name: str
    summary: str
    encode: Callable[[Tensor], Any]
    decode: Callable[[Any, Tensor], Tensor]
    num_bytes: Callable[[Any], int]
    package: str | None = None
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    on_cuda: bool = True
    timed: bool = True
    lossless: bool = False


@dataclass(frozen=True)
class PeerStatus:
    """Whether a peer took part: the version of its package (torch's if it needs none), or why it is absent."""

    name: str
    summary: str
    package: str | None
    version: str | None
    absent: str | None


def choose(groups: Sequence[str], device: torch.device) -> tuple[list[CodecPeer], list[PeerStatus]]:
    """The peers of some groups that work here, and how all of them fared.

    Raises:
        SpecError: there is no such group.
    """
    unknown = [group for group in groups if group not in GROUPS]
    if unknown:
        raise SpecError("--peers", [f"there is no peer {group!r}; valid are {', '.join(GROUPS)}" for group in unknown])
    working, statuses = [], []
    for group in groups:
        for peer in GROUPS[group]():
            absent = _absent(peer, device)
            package = peer.package or "torch"
            version = installed([package]).get(package)
            statuses.append(PeerStatus(peer.name, peer.summary, peer.package, version, absent))
            if absent is None:
                working.append(peer)
    return working, statuses


def jobs_of(peer: CodecPeer, x: Tensor) -> tuple[list[TimedCall], float]:
    """Both directions of a peer on a tensor, and the bits of its message for each value."""
    size = x.numel() * x.element_size()
    kept = peer.encode(x)
    jobs = [
        TimedCall(peer.name, "encode", size, lambda: peer.encode(x)),
        TimedCall(peer.name, "decode", size, lambda: peer.decode(kept, x)),
    ]
    return jobs, 8 * peer.num_bytes(kept) / x.numel()


def accuracy_of(peer: CodecPeer, data: str, x: Tensor) -> Accuracy:
    """The error of a peer on a data set, whose tail is left out where the peer takes whole blocks only."""
    x = x[: x.numel() // 2048 * 2048]
    kept = peer.encode(x)
    return accuracy(peer.name, data, x, peer.decode(kept, x).view(-1), peer.num_bytes(kept))


def _absent(peer: CodecPeer, device: torch.device) -> str | None:
    if peer.package is not None and importlib.util.find_spec(peer.package) is None:
        return "not installed"
    if device.type != "cpu" and not peer.on_cuda:
        return "works on CPU only"
    x = normal(_TRIAL).to(device)
    for dtype in peer.dtypes:
        # A failure in another project's code is reported; it must not stop this benchmark or the other peers.
        try:
            values = x.to(dtype)
            decoded = peer.decode(peer.encode(values), values).view(-1)
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            return f"failed: {type(error).__name__}: {lines[0][:200]}"
        if peer.lossless and not same_bits(decoded, values):
            return f"failed: it does not return {dtype} as it was"
        snr = signal_to_noise(values, decoded)
        if snr is not None and not snr > 0:
            return f"failed: its error on {dtype} is as large as the values"
    return None


def _tensor_bytes(kept: Iterable[Any]) -> int:
    return sum(item.numel() * item.element_size() for item in kept if isinstance(item, Tensor))


# ------------------------------------------------------------------------------------------------ torch itself


def _quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """INT8 by block, as one writes it down: the largest magnitude becomes 127."""
    values = x.view(-1, _BLOCK).float()
    scale = values.abs().amax(1, keepdim=True) / 127
    return torch.round(values / scale).clamp(-127, 127).to(torch.int8), scale


def _dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (codes.float() * scale).to(dtype)


def _int8(*, compiled: bool) -> CodecPeer:
    """These operations as they are, or compiled."""
    name, summary = "torch eager int8:256", "block quantisation in plain torch operations"
    quantize, dequantize = _quantize, _dequantize
    if compiled:
        name, summary = "torch.compile int8:256", "the same operations, compiled by inductor"
        quantize, dequantize = torch.compile(_quantize, dynamic=False), torch.compile(_dequantize, dynamic=False)
    return CodecPeer(name, summary, quantize, lambda kept, x: dequantize(kept[0], kept[1], x.dtype), _tensor_bytes)


def _deepspeed_form() -> CodecPeer:
    """DeepSpeed's quantiser for its quantised gradients, written again: scale = max / 2^(N-1), clamped above."""
    block = 2048

    def encode(x: Tensor) -> tuple[Tensor, Tensor]:
        values = x.view(-1, block).float()
        largest = values.abs().amax(1, keepdim=True)
        scale = torch.where(largest == 0, 1.0, largest / 8)
        return torch.round(values / scale).clamp(-8, 7), scale

    return CodecPeer(
        "INT4 b2048, clamp at +7 with scale max/8",
        "how DeepSpeed quantises, restated in torch; for its error alone",
        encode=encode,
        decode=lambda kept, x: (kept[0] * kept[1]).to(x.dtype),
        num_bytes=lambda kept: kept[0].numel() // 2 + 4 * kept[1].numel(),
        timed=False,
    )


# ------------------------------------------------------------------------------------------------ packages


def _zfpy(rate: int) -> CodecPeer:
    def encode(x: Tensor) -> bytes:
        stream: bytes = _module("zfpy").compress_numpy(x.numpy(), rate=rate, write_header=False)
        return stream

    def decode(kept: bytes, x: Tensor) -> Tensor:
        zfpy, values = _module("zfpy"), x.numpy()
        kind = zfpy.dtype_to_ztype(values.dtype)
        return torch.from_numpy(zfpy._decompress(kept, kind, values.shape, rate=rate))

    return CodecPeer(
        f"zfpy rate {rate}",
        "libzfp by its own Python binding",
        encode=encode,
        decode=decode,
        num_bytes=len,
        package="zfpy",
        dtypes=(torch.float32,),
        on_cuda=False,
    )


def _torchao(bits: int) -> CodecPeer:
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    block = (1, _BLOCK)

    def encode(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        torchao = _module("torchao.quantization.quant_primitives")
        values = x.view(-1, _BLOCK)
        scale, zero = torchao.choose_qparams_affine(
            values, torchao.MappingType.SYMMETRIC, block, torch.int8, low, high, scale_dtype=torch.float32
        )
        return torchao.quantize_affine(values, block, scale, zero, torch.int8, low, high), scale, zero

    def decode(kept: tuple[Tensor, Tensor, Tensor], x: Tensor) -> Tensor:
        torchao = _module("torchao.quantization.quant_primitives")
        codes, scale, zero = kept
        decoded: Tensor = torchao.dequantize_affine(
            codes, block, scale, zero, torch.int8, low, high, output_dtype=x.dtype
        )
        return decoded

    return CodecPeer(
        f"torchao int{bits}:256",
        "affine quantisation primitives" + (", which keep a byte for each code" if bits < 8 else ""),
        encode=encode,
        decode=decode,
        num_bytes=lambda kept: _tensor_bytes(kept[:2]),
        package="torchao",
    )


def _bitsandbytes() -> list[CodecPeer]:
    def functional() -> Any:
        return _module("bitsandbytes.functional")

    def num_bytes(kept: Any) -> int:
        return _tensor_bytes((kept[0], kept[1].absmax))

    return [
        CodecPeer(
            "bitsandbytes 8-bit b256",
            "quantize_blockwise, dynamic 8-bit codes",
            encode=lambda x: functional().quantize_blockwise(x, blocksize=_BLOCK),
            decode=lambda kept, x: functional().dequantize_blockwise(*kept),
            num_bytes=num_bytes,
            package="bitsandbytes",
        ),
        CodecPeer(
            "bitsandbytes nf4 b256",
            "quantize_4bit, codes for normal values",
            encode=lambda x: functional().quantize_4bit(x, blocksize=_BLOCK, quant_type="nf4"),
            decode=lambda kept, x: functional().dequantize_4bit(*kept),
            num_bytes=num_bytes,
            package="bitsandbytes",
        ),
    ]


def _zipnn() -> CodecPeer:
    def coder() -> Any:
        return _module("zipnn").ZipNN(bytearray_dtype="bfloat16", input_format="byte", threads=1)

    def encode(x: Tensor) -> bytes:
        # It works in place, so the input has to be a copy.
        compressed: bytes = coder().compress(bytearray(x.view(torch.uint8).numpy()))
        return compressed

    def decode(kept: bytes, x: Tensor) -> Tensor:
        return torch.frombuffer(bytearray(coder().decompress(kept)), dtype=x.dtype)

    return CodecPeer(
        "ZipNN",
        "lossless: byte groups and Huffman codes",
        encode=encode,
        decode=decode,
        num_bytes=len,
        package="zipnn",
        dtypes=(torch.bfloat16,),
        on_cuda=False,
        lossless=True,
    )


def _module(name: str) -> Any:
    """A peer's module, imported on first use; it may bring no types."""
    return importlib.import_module(name)


GROUPS: Final[dict[str, Callable[[], list[CodecPeer]]]] = {
    "zfpy": lambda: [_zfpy(rate) for rate in (8, 16, 24)],
    "eager": lambda: [_int8(compiled=False)],
    "compile": lambda: [_int8(compiled=True)],
    "torchao": lambda: [_torchao(bits) for bits in (8, 4)],
    "bitsandbytes": _bitsandbytes,
    "zipnn": lambda: [_zipnn()],
    "deepspeed-form": lambda: [_deepspeed_form()],
}
"""The groups of peers that the command line can name."""
