"""SLURM's notations: lists of hosts, and the switches of ``topology.conf`` and ``scontrol show topology``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from thinwire.errors import SpecError

_START = re.compile(r"^\s*(?:SwitchName|BlockName|BlockSizes|AggregatedBlock)\s*=", re.IGNORECASE | re.MULTILINE)
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand_hosts(text: str) -> tuple[str, ...]:
    """The hosts of a list in SLURM's notation.

    Args:
        text: Names with commas between them, where brackets hold numbers and ranges: ``node[01-03,20],gpu-a[1-2]``.
            Several pairs of brackets in a name combine, the last one fastest. The first number of a range sets the
            width to which numbers are filled up with zeros.

    Returns:
        The names in their order, each as often as it is listed.

    Raises:
        SpecError: Brackets or ranges are malformed.
    """
    return tuple(host for name in _split(text) for host in _expanded(name, text))


def _split(text: str) -> Iterator[str]:
    """The parts between the commas that stand outside brackets."""
    depth, start = 0, 0
    for place, letter in enumerate(text):
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if depth not in (0, 1):
            raise _malformed(text, "its brackets do not match")
        if letter == "," and depth == 0:
            yield text[start:place].strip()
            start = place + 1
    if depth:
        raise _malformed(text, "its brackets do not match")
    yield text[start:].strip()


def _expanded(name: str, text: str) -> Iterator[str]:
    before, bracket, rest = name.partition("[")
    if not bracket:
        if name:
            yield name
        return
    inside, _, after = rest.partition("]")
    for part in inside.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise _malformed(text, f"{part!r} is neither a number nor a range")
        first, last = match[1], match[2] or match[1]
        if int(first) > int(last):
            raise _malformed(text, f"the range {part} runs backwards")
        for number in range(int(first), int(last) + 1):
            for tail in _expanded(after, text) if after else ("",):
                yield f"{before}{number:0{len(first)}d}{tail}"


def _malformed(text: str, why: str) -> SpecError:
    return SpecError("hosts", f"{text!r} is no list of hosts such as node[01-03,20],gpu-a[1-2]: {why}")


def is_slurm(text: str) -> bool:
    """Whether a text looks like ``topology.conf`` or the output of ``scontrol show topology``."""
    return _START.search(text) is not None


def slurm_switches(text: str, source: str) -> dict[str, tuple[str, ...]]:
    """The switches above every host, the leaf first.

    Of the tree plugin, lines with ``SwitchName`` and ``Nodes`` are leaves, and those with ``Switches`` join switches
    or leaves. Of the block plugin, blocks are leaves, and each of ``BlockSizes`` joins as many consecutive blocks as it
    is larger than the first one.

    Args:
        text: ``topology.conf``, or the output of ``scontrol show topology``.
        source: Name of the text in messages.

    Returns:
        Switches by host, from the leaf upwards. Hosts stand in the order of the tree: those below one switch, of any
        level, follow each other.

    Raises:
        SpecError: The text describes no switches, or a list of hosts in it is malformed.
    """
    logical = text.replace("\\\n", " ").splitlines()  # a backslash at the end of a line continues it
    lines = [fields for line in logical if (fields := _fields(line.partition("#")[0]))]
    blocks = [fields for fields in lines if "blockname" in fields]
    switches = _blocks(blocks, lines, source) if blocks else _tree(lines)
    if not switches:
        raise SpecError(source, "names no switch or block with nodes below it (SwitchName=... Nodes=...)")
    return switches


def _fields(line: str) -> dict[str, str]:
    pairs = (word.partition("=") for word in line.split())
    return {key.lower(): value for key, equals, value in pairs if equals and value != "(null)"}


def _tree(lines: Sequence[Mapping[str, str]]) -> dict[str, tuple[str, ...]]:
    hosts: dict[str, tuple[str, ...]] = {}
    below: dict[str, tuple[str, ...]] = {}
    for fields in lines:
        name = fields.get("switchname")
        if name is None:
            continue
        # scontrol lists the nodes of upper switches as well; these are not leaves.
        if "switches" in fields:
            below[name] = expand_hosts(fields["switches"])
        elif "nodes" in fields:
            hosts[name] = expand_hosts(fields["nodes"])
    children = {child for names in below.values() for child in names}
    found: dict[str, tuple[str, ...]] = {}

    def descend(name: str, above: tuple[str, ...]) -> None:
        path = (name, *above)
        for host in hosts.get(name, ()):
            found.setdefault(host, path)
        for child in below.get(name, ()):
            if child not in path:  # a circle has no leaf
                descend(child, path)

    for name in [*below, *hosts]:
        if name not in children:
            descend(name, ())
    return found


def _blocks(
    blocks: Sequence[Mapping[str, str]], lines: Sequence[Mapping[str, str]], source: str
) -> dict[str, tuple[str, ...]]:
    sizes = next((fields["blocksizes"] for fields in lines if "blocksizes" in fields), "")
    try:
        base, *larger = sorted({int(size) for size in sizes.split(",") if size}) or [1]
    except ValueError:
        raise SpecError(source, f"BlockSizes = {sizes!r} should be numbers with commas between them") from None
    joined: dict[str, tuple[str, ...]] = {}  # of scontrol, which lists larger blocks by themselves
    for fields in lines:
        if "aggregatedblock" in fields:
            for block in expand_hosts(fields["aggregatedblock"]):
                joined[block] = (*joined.get(block, ()), fields["aggregatedblock"])
    found: dict[str, tuple[str, ...]] = {}
    for number, fields in enumerate(blocks):
        name = fields["blockname"]
        above = joined.get(name) or tuple(f"{size}:{number // (size // base)}" for size in larger)
        for host in expand_hosts(fields.get("nodes", "")):
            found.setdefault(host, (name, *above))
    return found
