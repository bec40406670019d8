"""A run as tables: the same ones for a terminal and for a page of the documentation."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.report import Sheet
from thinwire.units import format_bytes
from thinwire_bench.codecs.data import DATA_SETS
from thinwire_bench.codecs.jobs import DIRECTIONS, FUSED
from thinwire_bench.codecs.speeds import COPY, CodecSpeed
from thinwire_bench.codecs.study import CodecStudy
from thinwire_bench.pages import markdown_table


def sheets(study: CodecStudy) -> list[Sheet]:
    """The tables of a run, in the order in which one reads them; without any row a table is left out."""
    made = [*_error_sheets(study), *_speed_sheets(study), _fused_sheet(study), *_target_sheets(study)]
    return [sheet for sheet in [*made, _blocking_sheet(study), _peer_sheet(study), _goal_sheet(study)] if sheet.rows]


def markdown(study: CodecStudy) -> str:
    """The tables as Markdown, with what a reader needs to judge them."""
    versions = study.environment["versions"]
    backend = f"`{study.backend}`"
    backend += f" with {study.environment['target']}" if "target" in study.environment else ""
    lines = [
        f"{study.device}, {study.environment['cores']} cores, {study.threads} "
        f"{'thread' if study.threads == 1 else 'threads'}; backend {backend}; median of {study.rounds} "
        f"rounds; torch {versions['torch']}, thinwire {versions['thinwire']}; {study.environment['date'][:10]}.",
        "",
        f"    {study.command}",
        "",
    ]
    lines += [f"- {note}" for note in study.notes] + ([""] if study.notes else [])
    for sheet in sheets(study):
        lines += markdown_table(sheet)
    return "\n".join(lines)


def _error_sheets(study: CodecStudy) -> list[Sheet]:
    """Signal-to-noise ratio by codec and data set, a table for each dtype."""
    made = []
    named = {each.data for each in study.accuracies}
    data = [name for name in DATA_SETS if name in named]
    for dtype in dict.fromkeys(each.dtype for each in study.accuracies):
        by_subject = {(each.subject, each.data): each for each in study.accuracies if each.dtype == dtype}
        rows = []
        # Codecs as they were named, then peers.
        for subject in dict.fromkeys([*study.codecs, *(peer.name for peer in study.peers)]):
            if not any(subject == other for other, _ in by_subject):
                continue
            measured = [by_subject[subject, name] for name in data]
            decibels = ("exact" if each.snr_db is None else f"{each.snr_db:.1f}" for each in measured)
            rows.append([subject, _bits([each.wire_bits for each in measured]), *decibels])
        title = f"{dtype}: signal to noise in dB"
        made.append(Sheet(title, ["codec", "bits", *data], 1, rows, _faint(study, rows)))
    return made


def _faint(study: CodecStudy, rows: Sequence[Sequence[str]]) -> frozenset[int]:
    """Rows that are not of codecs: peers and memcpy."""
    return frozenset(index for index, row in enumerate(rows) if row[0] not in study.codecs)


def _speed_sheets(study: CodecStudy) -> list[Sheet]:
    """GB/s and share of memcpy, a table for each dtype and size."""
    made = []
    for dtype, size in dict.fromkeys((each.dtype, each.size) for each in study.speeds):
        here = [each for each in study.speeds if (each.dtype, each.size) == (dtype, size)]
        by_key = {(each.subject, each.direction): each for each in here}
        copy = by_key[COPY, "copy"]
        rows = [[COPY, "", f"{copy.gb_per_s:.1f} ({copy.gb_per_s_min:.1f} to {copy.gb_per_s_max:.1f})", "", ""]]
        for subject in dict.fromkeys(each.subject for each in here if each.subject != COPY):
            cells = [_speed(by_key.get((subject, direction))) for direction in DIRECTIONS]
            rows.append([subject, f"{by_key[subject, 'encode'].wire_bits:.2f}", *cells])
        title = f"{dtype}, {format_bytes(size)}: GB/s of the tensor (share of memcpy, range over rounds)"
        made.append(Sheet(title, ["codec", "bits", *DIRECTIONS], 1, rows, _faint(study, rows)))
    return made


def _fused_sheet(study: CodecStudy) -> Sheet:
    by_key = {(each.subject, each.dtype, each.size, each.direction): each for each in study.speeds}
    keys = dict.fromkeys(key[:3] for key in by_key if key[3] in FUSED)
    rows = [
        [subject, dtype, format_bytes(size), *(_speed(by_key.get((subject, dtype, size, way))) for way in FUSED)]
        for subject, dtype, size in keys
    ]
    title = "fused forms, of 4 slices or 4 messages: GB/s of all tensors (share of memcpy, range over rounds)"
    return Sheet(title, ["codec", "dtype", "size", *FUSED], 3, rows)


def _target_sheets(study: CodecStudy) -> list[Sheet]:
    """Share of memcpy with every instruction set that was forced, a table for each dtype and size."""
    made = []
    for dtype, size in dict.fromkeys((each.dtype, each.size) for each in study.target_speeds):
        here = [each for each in study.target_speeds if (each.dtype, each.size) == (dtype, size)]
        by_key = {(each.subject, each.direction, each.target): each.share for each in here}
        targets = list(dict.fromkeys(each.target for each in here if each.target is not None))
        rows = [
            [subject, direction, *(f"{100 * by_key[subject, direction, target]:.0f}%" for target in targets)]
            for subject, direction in dict.fromkeys(key[:2] for key in by_key if key[0] != COPY)
        ]
        title = f"{dtype}, {format_bytes(size)}: share of memcpy with each instruction set"
        made.append(Sheet(title, ["codec", "direction", *targets], 2, rows))
    return made


def _blocking_sheet(study: CodecStudy) -> Sheet:
    ratios = {(each.unblocked, each.blocked, each.dtype, each.data): each.ratio for each in study.blockings}
    named = {each.data for each in study.blockings}
    data = [name for name in DATA_SETS if name in named]
    rows = [
        [unblocked, blocked, dtype, *(f"{ratios[unblocked, blocked, dtype, name]:.1f}" for name in data)]
        for unblocked, blocked, dtype in dict.fromkeys(key[:3] for key in ratios)
    ]
    title = "one scale for everything: RMS error over that with blocks (the ZeRO++ paper says 3)"
    return Sheet(title, ["unblocked", "blocked", "dtype", *data], 3, rows)


def _peer_sheet(study: CodecStudy) -> Sheet:
    rows = [
        [peer.name, peer.summary, peer.package or "torch", peer.version or "", peer.absent or "measured"]
        for peer in study.peers
    ]
    return Sheet("peers", ["name", "what it is", "package", "version", ""], 5, rows)


def _goal_sheet(study: CodecStudy) -> Sheet:
    rows = []
    for goal in study.goals:
        percent = "share" in goal.goal
        figures = (f"{100 * value:.0f}%" if percent else f"{value:.1f}" for value in (goal.measured, goal.wanted))
        rows.append([goal.goal, goal.subject, *figures, "met" if goal.met else "missed"])
    return Sheet("goals", ["goal", "of", "measured", "wanted", ""], 2, rows)


def _speed(speed: CodecSpeed | None) -> str:
    if speed is None:
        return ""
    spread = f"{100 * speed.share:.0f}%, {100 * speed.share_min:.0f} to {100 * speed.share_max:.0f}"
    return f"{speed.gb_per_s:.{1 if speed.gb_per_s >= 1 else 2}f} ({spread})"


def _bits(bits_per_value: Sequence[float]) -> str:
    low, high = min(bits_per_value), max(bits_per_value)
    return f"{low:.2f}" if high - low < 0.005 else f"{low:.2f} to {high:.2f}"
