"""Looks up the pinned packages in a copy of the OSV database of vulnerabilities, without a network.

    python tools/audit.py all.zip constraints.txt locked.txt

The copy is ``all.zip`` of OSV's ecosystem PyPI: one JSON file per vulnerability, in the format of
https://ossf.github.io/osv-schema/. The exit status is 1 if a pinned release is affected, and 2 if a file cannot be
read.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

LARGEST: Final = 16 << 20
"""Bytes of the largest entry that is read; OSV's have a few hundred kilobytes at most."""

_PIN: Final = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;\\]+)", re.MULTILINE)


class UnreadableError(Exception):
    """A file is not what it should be."""


@dataclass(frozen=True, order=True)
class Finding:
    """A vulnerability of a pinned release.

    Attributes:
        package: Name of the package.
        version: The pinned release.
        identifier: Name of the vulnerability in OSV.
        aliases: Its other names, for example a CVE number.
        fixed: Releases that are not affected any more.
        summary: What it is, in a sentence.
    """

    package: str
    version: str
    identifier: str
    aliases: tuple[str, ...]
    fixed: tuple[str, ...]
    summary: str

    def __str__(self) -> str:
        names = ", ".join((self.identifier, *self.aliases))
        remedy = f"fixed in {', '.join(self.fixed)}" if self.fixed else "no release fixes it"
        return f"{self.package} {self.version}: {names}: {self.summary or 'no summary'}; {remedy}"


def pins(files: Sequence[Path]) -> dict[str, set[str]]:
    """The pinned releases by name of the package.

    Args:
        files: Files of requirements with lines such as ``name==1.0``.

    Raises:
        UnreadableError: A file is missing or pins nothing.
    """
    found: dict[str, set[str]] = {}
    for file in files:
        try:
            lines = _PIN.findall(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise UnreadableError(f"{file}: {error}") from error
        if not lines:
            raise UnreadableError(f"{file} pins no package: it has no line such as name==1.0")
        for name, version in lines:
            found.setdefault(canonicalize_name(name), set()).add(version)
    return found


def entries(database: Path) -> Iterator[Mapping[str, Any]]:
    """The vulnerabilities of a database.

    Args:
        database: OSV's ``all.zip``, or one JSON file of it.

    Raises:
        UnreadableError: It is neither, or an entry is no JSON object or too large.
    """
    try:
        if database.suffix == ".json":
            yield _parsed(database.name, database.read_bytes())
            return
        with zipfile.ZipFile(database) as archive:
            names = [one for one in archive.infolist() if one.filename.endswith(".json")]
            if not names:
                raise UnreadableError(f"{database} holds no vulnerability; it should be OSV's all.zip of PyPI")
            for one in names:
                if one.file_size > LARGEST:
                    raise UnreadableError(f"{database}: {one.filename} has {one.file_size} bytes, above {LARGEST}")
                with archive.open(one) as file:
                    yield _parsed(one.filename, file.read(LARGEST + 1))
    except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise UnreadableError(f"{database}: {error}") from error


def _parsed(name: str, content: bytes) -> Mapping[str, Any]:
    try:
        entry = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"{name}: {error}") from error
    if not isinstance(entry, dict) or not isinstance(entry.get("id"), str):
        raise UnreadableError(f"{name} is no entry of OSV: it has no id")
    return entry


def findings(database: Path, pinned: Mapping[str, set[str]]) -> tuple[list[Finding], int]:
    """Vulnerabilities of pinned releases, and how many entries were read.

    Args:
        database: See :func:`entries`.
        pinned: See :func:`pins`.

    Raises:
        UnreadableError: The database cannot be read.
    """
    found: set[Finding] = set()
    count = 0
    for entry in entries(database):
        count += 1
        if "withdrawn" in entry:
            continue
        try:
            found.update(_affected(entry, pinned))
        except (TypeError, AttributeError, KeyError) as error:
            raise UnreadableError(f"{entry['id']} is not in OSV's format: {error!r}") from error
    return sorted(found), count


def _affected(entry: Mapping[str, Any], pinned: Mapping[str, set[str]]) -> Iterator[Finding]:
    for affected in entry.get("affected", []):
        package = affected.get("package", {})
        name = canonicalize_name(package.get("name", ""))
        if package.get("ecosystem", "").partition(":")[0] != "PyPI" or name not in pinned:
            continue
        fixed = [event["fixed"] for each in affected.get("ranges", []) for event in each["events"] if "fixed" in event]
        for version in pinned[name]:
            if _is_affected(version, affected):
                aliases = tuple(entry.get("aliases", ()))
                releases = tuple(one for one in fixed if not re.fullmatch("[0-9a-f]{40}", one))
                yield Finding(name, version, entry["id"], aliases, releases, entry.get("summary", ""))


def _is_affected(version: str, affected: Mapping[str, Any]) -> bool:
    """Whether a release is listed, or lies in a range; commits of Git say nothing about releases."""
    ours = Version(version)
    if any(_version(listed) == ours for listed in affected.get("versions", [])):
        return True
    ranges = [each["events"] for each in affected.get("ranges", []) if each["type"] in ("ECOSYSTEM", "SEMVER")]
    return any(_is_inside(ours, events) for events in ranges)


def _is_inside(ours: Version, events: Sequence[Mapping[str, str]]) -> bool:
    """Play a range's events in the order of their versions, as OSV's specification says."""
    inside = False
    for event in sorted(events, key=_when):
        ((kind, value),) = event.items()
        at = _version(value)
        if at is None:
            continue
        if kind == "introduced" and ours >= at:
            inside = True
        elif (kind == "fixed" and ours >= at) or (kind == "last_affected" and ours > at):
            inside = False
    return inside


def _when(event: Mapping[str, str]) -> Version:
    ((_, value),) = event.items()
    return _version(value) or Version("0.dev0")


def _version(text: str) -> Version | None:
    """A release; ``0`` stands for before all others, and what is no version of Python's for none."""
    try:
        return Version("0.dev0" if text == "0" else text)
    except InvalidVersion:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("database", type=Path, help="OSV's all.zip of PyPI, or one entry as JSON")
    parser.add_argument("pins", type=Path, nargs="+", help="files that pin packages")
    arguments = parser.parse_args()
    try:
        pinned = pins(arguments.pins)
        found, count = findings(arguments.database, pinned)
    except UnreadableError as error:
        print(f"audit: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    for finding in found:
        print(finding)
    print(f"{len(found)} known vulnerabilities in {len(pinned)} packages; the database has {count} entries")
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
