"""Counts what a reader of this repository feels, and draws the packages of the source.

    python tools/structure.py
    python tools/structure.py --source ../old/src --json
    python tools/structure.py --page docs/architecture.md --svg docs/structure.svg

One table: how much there is, how it hangs together, and how much of it one step, one save and one `thinwire plan`
visit. No number of it has a limit; a change that makes one larger says what for.

A *room* is a directory of modules, or a module that lies directly in a package of the top. An *arrow* is an import
between two children of the same package, those for types only included. Children stand on *floors*: each one above
everything it imports. A *circle* is an arrow that no order of floors makes point down. A file *reaches through* an
object if it takes an attribute of an attribute of a `Runtime`.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import grimp
import probes

ROOT = Path(__file__).parents[1]
PACKAGES = ("thinwire", "thinwire_bench")
BEGIN, END = "<!-- structure: begin -->", "<!-- structure: end -->"

LONG_FILE, FULL_FOLDER = 500, 14
"""Lines of a file and files of a folder above which they are counted."""


@dataclass(frozen=True)
class Room:
    """A directory of modules.

    Attributes:
        name: dotted name.
        files: number of modules directly in it.
        lines: their lines.
        share: fraction of all lines.
        floor: 1 for a room that imports no sibling, otherwise one more than the highest sibling it imports.
        imports: siblings it imports, by the last part of their names.
    """

    name: str
    files: int
    lines: int
    share: float
    floor: int
    imports: tuple[str, ...]


@dataclass(frozen=True)
class Structure:
    """The structure of a source tree.

    Attributes:
        rooms: from the top floor down, by package.
        circles: imports that belong to a circle, as ``importer -> imported``.
        long_files: lines of files of more than :data:`LONG_FILE`, longest first.
        full_folders: files of folders of more than :data:`FULL_FOLDER`, fullest first.
        reaching: expressions that reach through a runtime, by file.
    """

    rooms: tuple[Room, ...]
    circles: tuple[str, ...]
    long_files: Mapping[str, int]
    full_folders: Mapping[str, int]
    reaching: Mapping[str, int]


def read(source: Path) -> Structure:
    """Measure a source tree.

    Args:
        source: the directory that holds the packages.
    """
    # The evidence is a distribution of its own, beside the product.
    places = {
        name: place
        for name in PACKAGES
        for place in (source, source.parent / "bench" / "src")
        if (place / name).is_dir()
    }
    packages = list(places)
    graph = _import_graph(places)
    directories = _directories(places)
    total = sum(_count_lines(files) for files in directories.values())
    floors: dict[str, int] = {}
    arrows: dict[str, tuple[str, ...]] = {}
    upwards: list[str] = []
    for parent in [*packages, *(name for name in graph.modules if graph.find_children(name) and "." in name)]:
        below = {child: _imported_siblings(graph, child) for child in graph.find_children(parent)}
        of_parent, circular = _floors(below)
        floors |= of_parent
        arrows |= {child: tuple(sorted(name.rpartition(".")[2] for name in names)) for child, names in below.items()}
        upwards += circular
    rooms = [
        Room(
            name,
            len(files),
            _count_lines(files),
            _count_lines(files) / total,
            floors.get(name, 1),
            arrows.get(name, ()),
        )
        for name, files in directories.items()
    ]
    files = {path: len(path.read_text(encoding="utf-8").splitlines()) for of in directories.values() for path in of}
    return Structure(
        rooms=tuple(sorted(rooms, key=lambda room: (room.name.split(".")[0], -_top_floor(room, floors), room.name))),
        circles=tuple(sorted(upwards)),
        long_files=_beyond({_named(path, places): lines for path, lines in files.items()}, LONG_FILE),
        full_folders=_beyond({room.name: room.files for room in rooms}, FULL_FOLDER),
        reaching={_named(path, places): found for path in sorted(files) if (found := _reaches(path))},
    )


# -- imports ----------------------------------------------------------------------------------------------------------


def _import_graph(places: Mapping[str, Path]) -> grimp.ImportGraph:
    # An editable installation would find its own checkout, regardless of the path.
    sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
    sys.path[:0] = [str(place.resolve()) for place in places.values()]
    return grimp.build_graph(*places, exclude_type_checking_imports=False, cache_dir=None)


def _imported_siblings(graph: grimp.ImportGraph, child: str) -> set[str]:
    parent = child.rpartition(".")[0]
    return {
        sibling
        for sibling in graph.find_children(parent) - {child}
        if graph.direct_import_exists(importer=child, imported=sibling, as_packages=True)
    }


def _floors(below: Mapping[str, set[str]]) -> tuple[dict[str, int], list[str]]:
    """Floors of siblings, and the imports that no order of floors can point down."""
    reachable = {name: _reach(name, below) for name in below}
    circular = [f"{name} -> {other}" for name, others in below.items() for other in others if name in reachable[other]]
    floors: dict[str, int] = {}

    def floor(name: str) -> int:
        if name not in floors:
            lower = [other for other in below[name] if name not in reachable[other]]
            floors[name] = 1 + max(map(floor, lower), default=0)
        return floors[name]

    return {name: floor(name) for name in below}, circular


def _reach(start: str, below: Mapping[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    waiting = list(below[start])
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += below[name]
    return reached


def _top_floor(room: Room, floors: Mapping[str, int]) -> int:
    """The floor of the child of a top package that a room belongs to."""
    return floors.get(".".join(room.name.split(".")[:2]), 0)


# -- files and definitions --------------------------------------------------------------------------------------------


def _directories(places: Mapping[str, Path]) -> dict[str, list[Path]]:
    """Modules by room: directories, and modules that lie directly in a top package."""
    rooms: dict[str, list[Path]] = defaultdict(list)
    for package, place in places.items():
        for path in sorted((place / package).rglob("*.py")):
            name = ".".join(path.parent.relative_to(place).parts)
            if name == package and path.stem != "__init__":
                name = f"{package}.{path.stem}"
            rooms[name].append(path)
    return dict(rooms)


def _named(path: Path, places: Mapping[str, Path]) -> str:
    """A file's path from the directory that holds its package."""
    return str(path.relative_to(next(place for place in places.values() if path.is_relative_to(place))))


def _count_lines(files: Iterable[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


def _beyond(sizes: Mapping[str, int], limit: int) -> dict[str, int]:
    return dict(sorted(((name, size) for name, size in sizes.items() if size > limit), key=lambda pair: -pair[1]))


def _reaches(path: Path) -> int:
    """Expressions of a file that take an attribute of an attribute of a runtime."""
    found = 0
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
            found += _name_of(node.value.value) in ("runtime", "_runtime", "runtime_of")
    return found


def _name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        node = node.func
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


# -- the table --------------------------------------------------------------------------------------------------------


def measure(source: Path, structure: Structure) -> dict[str, int]:
    """Everything that the table says, by what it is.

    Args:
        source: the directory that holds the packages.
        structure: its structure.
    """
    root = source.resolve().parent
    top = Counter[str]()
    for room in structure.rooms:
        top[".".join(room.name.split(".")[:2])] += room.lines
    table = {f"lines of {name}": lines for name, lines in sorted(top.items(), key=lambda pair: -pair[1])}
    table |= {
        "lines in all": sum(top.values()),
        f"files above {LONG_FILE} lines": len(structure.long_files),
        f"folders above {FULL_FOLDER} files": len(structure.full_folders),
        "most files of a folder": max(room.files for room in structure.rooms),
        "circles, of types too": len(structure.circles),
        "files that reach through a runtime": len(structure.reaching),
    }
    pages = sorted((root / "docs").glob("*.md"))
    table |= {"pages": len(pages), "words of pages": sum(len(page.read_text("utf-8").split()) for page in pages)}
    table["test cases"] = _test_cases(root)
    table |= probes.surface(source)
    for kind, of in probes.visits(source).items():
        table |= {f"{what} that one {kind} visits": number for what, number in probes.summary(of).items()}
    for kind, pattern in (("wheel", "*.whl"), ("sdist", "*.tar.gz")):
        sizes = [path.stat().st_size for path in (root / "dist").glob(pattern)]
        table |= {f"bytes of the largest {kind}": max(sizes)} if sizes else {}
    return table


def _test_cases(root: Path) -> int:
    """Cases that pytest collects, slow ones and those for GPUs included."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "--quiet", "--no-header", "-m", "slow or not slow"]
    said = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False).stdout
    found = re.findall(r"^(\d+)(?:/\d+)? tests? collected", said, re.MULTILINE)
    return int(found[-1]) if found else 0


# -- output ----------------------------------------------------------------------------------------------------------


def markdown(structure: Structure) -> str:
    """The structure as Markdown tables."""
    lines = [
        f"{sum(room.lines for room in structure.rooms):,} lines of Python in {len(structure.rooms)} rooms.",
        "",
        "| room | floor | files | lines | share | imports, of its siblings |",
        "|---|---:|---:|---:|---:|---|",
    ]
    lines += [
        f"| `{room.name}` | {room.floor} | {room.files} | {room.lines:,} | {room.share:.1%} | "
        f"{', '.join(room.imports)} |"
        for room in structure.rooms
    ]
    return "\n".join(lines) + "\n"


def rewrite(page: Path, text: str) -> None:
    """Put ``text`` between the marks of a page."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{page} lacks the marks {BEGIN} and {END}")
    page.write_text(f"{before}{begin}\n{text}{end}{after}", encoding="utf-8")


def draw(structure: Structure, path: Path) -> None:
    """Draw the children of the top packages on their floors.

    Imports that other arrows imply are left out: if ``a`` imports ``b`` and ``c``, and ``b`` imports ``c``, the drawing
    has no arrow from ``a`` to ``c``.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch

    blocks = _blocks(structure)
    positions: dict[str, tuple[float, float]] = {}
    floors = sorted({floor for _, floor, _ in blocks.values()})
    width = max(sum(1 for _, floor, _ in blocks.values() if floor == level) for level in floors)
    for level in floors:
        names = [name for name, (_, floor, _) in blocks.items() if floor == level]
        for number, name in enumerate(names):
            positions[name] = ((number + 0.5) * width / len(names), float(level))
    with mpl.rc_context({"svg.hashsalt": "thinwire", "font.family": "DejaVu Sans", "svg.fonttype": "none"}):
        figure = Figure(figsize=(1.9 * width, 1.15 * len(floors) + 0.4))
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set(xlim=(0, width), ylim=(floors[0] - 0.6, floors[-1] + 0.6))
        axes.axis("off")
        below = {name: set(imports) for name, (_, _, imports) in blocks.items()}
        largest = max(lines for lines, _, _ in blocks.values())
        for name, (_, _, imports) in blocks.items():
            x, y = positions[name]
            implied = set().union(*(_reach(other, below) for other in imports))
            for other in sorted(set(imports) - implied):
                axes.annotate(
                    "",
                    xy=(positions[other][0], positions[other][1] + 0.24),
                    xytext=(x, y - 0.24),
                    arrowprops={"arrowstyle": "-|>", "color": "#8a94a6", "linewidth": 0.8},
                    zorder=0,
                )
        for name, (lines, _, _) in blocks.items():
            x, y = positions[name]
            bench = name.startswith("thinwire_bench")
            color = (0.98, 0.86, 0.72) if bench else (0.75, 0.86, 0.98)
            box = FancyBboxPatch(
                (x - 0.42, y - 0.22), 0.84, 0.44, boxstyle="round,pad=0.01", facecolor=color, edgecolor="#44506a"
            )
            axes.add_patch(box)
            filled = 0.8 * lines / largest
            axes.add_patch(mpl.patches.Rectangle((x - 0.4, y - 0.19), filled, 0.05, color="#44506a", alpha=0.6))
            axes.text(x, y + 0.06, name.partition(".")[2], ha="center", va="center", fontsize=9)
            axes.text(x, y - 0.08, f"{lines:,} lines", ha="center", va="center", fontsize=6.5, color="#44506a")
        figure.savefig(path, format="svg", metadata={"Date": None})


Block = tuple[int, int, tuple[str, ...]]
"""Lines of a child of a top package with all that is in it, the floor it is drawn on, and the blocks it imports."""


def _blocks(structure: Structure) -> dict[str, Block]:
    lines: dict[str, int] = defaultdict(int)
    for room in structure.rooms:
        if "." in room.name:
            lines[".".join(room.name.split(".")[:2])] += room.lines
    by_name = {room.name: room for room in structure.rooms}
    tallest = max(by_name[name].floor for name in lines if name.startswith("thinwire.") and name in by_name)
    blocks: dict[str, Block] = {}
    for name, count in lines.items():
        package = name.partition(".")[0]
        room = by_name.get(name)
        floor = room.floor if room else 1
        imports = tuple(f"{package}.{other}" for other in room.imports) if room else ()
        # The evidence stands on top of the product.
        blocks[name] = (count, floor + (tallest if package == "thinwire_bench" else 0), imports)
    return blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=ROOT / "src", help="the directory that holds the packages")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--static", action="store_true", help="print what the source alone says; with --json")
    parser.add_argument("--page", type=Path, help="rewrite the part between the marks of this Markdown page")
    parser.add_argument("--svg", type=Path, help="draw the packages here")
    arguments = parser.parse_args()
    structure = read(arguments.source)
    if arguments.page:
        rewrite(arguments.page, markdown(structure))
    if arguments.svg:
        draw(structure, arguments.svg)
    if arguments.static:
        print(json.dumps(asdict(structure), indent=1))
        return
    table = measure(arguments.source, structure)
    if arguments.json:
        print(json.dumps(table, indent=1))
    else:
        print(*(f"{number:>12,}  {what}" for what, number in table.items()), sep="\n")


if __name__ == "__main__":
    main()
