"""Lists and draws the structure of the source: packages, lines, imports, and the shapes that grow without notice.

    python tools/structure.py
    python tools/structure.py --json
    python tools/structure.py --page docs/architecture.md --svg docs/structure.svg
    python tools/structure.py --source ../old/src ../old/bench/src

A *room* is a directory of modules, or a module that lies directly in a package of the top. An *arrow* is an import
between two children of the same package. Children stand on *floors*: each one above everything it imports. An arrow
points *upwards* if it belongs to a circle, because then no order of floors makes all arrows point down.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grimp

ROOT = Path(__file__).parents[1]
PACKAGES = ("thinwire", "thinwire_bench")
SOURCES = (ROOT / "src", ROOT / "bench" / "src")
BEGIN, END = "<!-- structure: begin -->", "<!-- structure: end -->"

MAX_LINES, MAX_PARAMETERS, MAX_METHODS = 60, 7, 15
"""A function or class beyond these is listed."""


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
class Shape:
    """A function or class that is larger than it should be.

    Attributes:
        where: file and name.
        size: lines, parameters or methods.
    """

    where: str
    size: int


@dataclass(frozen=True)
class Structure:
    """The structure of a source tree.

    Attributes:
        rooms: from the top floor down, by package.
        upwards: imports that belong to a circle, as ``importer -> imported``.
        long_functions: functions of more than :data:`MAX_LINES` lines, longest first.
        wide_functions: functions of more than :data:`MAX_PARAMETERS` parameters without ``self``, widest first.
        large_classes: classes of more than :data:`MAX_METHODS` methods, largest first.
        homonyms: class names that several files define, with the files.
    """

    rooms: tuple[Room, ...]
    upwards: tuple[str, ...]
    long_functions: tuple[Shape, ...]
    wide_functions: tuple[Shape, ...]
    large_classes: tuple[Shape, ...]
    homonyms: Mapping[str, tuple[str, ...]]


def read(sources: Sequence[Path]) -> Structure:
    """Measure a source tree.

    Args:
        sources: the directories that hold the packages.
    """
    packages = {name: source / name for name in PACKAGES for source in sources if (source / name).is_dir()}
    graph = _import_graph(sources, packages)
    directories = _directories(packages)
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
    functions, classes = _definitions(packages)
    return Structure(
        rooms=tuple(sorted(rooms, key=lambda room: (room.name.split(".")[0], -_top_floor(room, floors), room.name))),
        upwards=tuple(sorted(upwards)),
        long_functions=_beyond(((where, lines) for where, lines, _ in functions), MAX_LINES),
        wide_functions=_beyond(((where, width) for where, _, width in functions), MAX_PARAMETERS),
        large_classes=_beyond(((f"{file}:{name}", methods) for file, name, methods in classes), MAX_METHODS),
        homonyms=_homonyms(classes),
    )


# -- imports ----------------------------------------------------------------------------------------------------------


def _import_graph(sources: Sequence[Path], packages: Iterable[str]) -> grimp.ImportGraph:
    # An editable installation would find its own checkout, regardless of the path.
    sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
    sys.path[:0] = [str(source.resolve()) for source in sources]
    return grimp.build_graph(*packages, exclude_type_checking_imports=True, cache_dir=None)


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


def _directories(packages: Mapping[str, Path]) -> dict[str, list[Path]]:
    """Modules by room: directories, and modules that lie directly in a top package."""
    rooms: dict[str, list[Path]] = defaultdict(list)
    for package, directory in packages.items():
        for path in sorted(directory.rglob("*.py")):
            name = ".".join(path.parent.relative_to(directory.parent).parts)
            if name == package and path.stem != "__init__":
                name = f"{package}.{path.stem}"
            rooms[name].append(path)
    return dict(rooms)


def _count_lines(files: Iterable[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


Function = tuple[str, int, int]
"""Location, number of lines and number of parameters."""
Class = tuple[str, str, int]
"""File, name and number of methods."""


def _definitions(packages: Mapping[str, Path]) -> tuple[list[Function], list[Class]]:
    functions: list[Function] = []
    classes: list[Class] = []
    for directory in packages.values():
        for path in sorted(directory.rglob("*.py")):
            file = str(path.relative_to(directory.parent))
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    lines = (node.end_lineno or node.lineno) - node.lineno + 1
                    functions.append((f"{file}:{node.name}", lines, len(list(_parameters(node)))))
                elif isinstance(node, ast.ClassDef):
                    methods = sum(isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) for item in node.body)
                    classes.append((file, node.name, methods))
    return functions, classes


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    arguments = function.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        if argument.arg not in ("self", "cls"):
            yield argument.arg


def _beyond(sized: Iterable[tuple[str, int]], limit: int) -> tuple[Shape, ...]:
    return tuple(
        Shape(where, size) for where, size in sorted(sized, key=lambda pair: (-pair[1], pair[0])) if size > limit
    )


def _homonyms(classes: Iterable[Class]) -> dict[str, tuple[str, ...]]:
    files: dict[str, set[str]] = defaultdict(set)
    for file, name, _ in classes:
        files[name].add(file)
    return {name: tuple(sorted(places)) for name, places in sorted(files.items()) if len(places) > 1}


# -- output ----------------------------------------------------------------------------------------------------------


def counts(structure: Structure) -> dict[str, int]:
    """How many shapes of each kind there are, by what the kind is."""
    return {
        f"functions above {MAX_LINES} lines": len(structure.long_functions),
        f"functions above {MAX_PARAMETERS} parameters": len(structure.wide_functions),
        f"classes above {MAX_METHODS} methods": len(structure.large_classes),
        "class names that several files define": len(structure.homonyms),
        "arrows upwards": len(structure.upwards),
    }


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
    lines += ["", "| count | now |", "|---|---:|"]
    lines += [f"| {what} | {count} |" for what, count in counts(structure).items()]
    for title, shapes in (
        (f"Functions above {MAX_LINES} lines", structure.long_functions),
        (f"Functions above {MAX_PARAMETERS} parameters", structure.wide_functions),
        (f"Classes above {MAX_METHODS} methods", structure.large_classes),
    ):
        if shapes:
            lines += ["", f"{title}: " + ", ".join(f"`{shape.where}` ({shape.size})" for shape in shapes) + "."]
    if structure.homonyms:
        lines += [
            "",
            "Class names that several files define: " + ", ".join(map("`{}`".format, structure.homonyms)) + ".",
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
    parser.add_argument(
        "--source", type=Path, nargs="+", default=SOURCES, help="the directories that hold the packages"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--page", type=Path, help="rewrite the part between the marks of this Markdown page")
    parser.add_argument("--svg", type=Path, help="draw the packages here")
    arguments = parser.parse_args()
    structure = read(arguments.source)
    if arguments.page:
        rewrite(arguments.page, markdown(structure))
    if arguments.svg:
        draw(structure, arguments.svg)
    as_json: dict[str, Any] = asdict(structure) | {"counts": counts(structure)}
    print(json.dumps(as_json, indent=1) if arguments.json else markdown(structure), end="")


if __name__ == "__main__":
    main()
