"""Options that several commands have, said once."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["InternodeGbps", "NodesPerLeaf", "Seq", "SpineGbps"]

Seq = Annotated[
    int | None, typer.Option(min=1, help="Tokens of a sequence; the model's by default.", show_default=False)
]

InternodeGbps = Annotated[
    float | None, typer.Option(min=0.001, help="Gbit/s of a node's cards together.", show_default=False)
]

NodesPerLeaf = Annotated[
    int | None, typer.Option(min=1, help="Nodes below a leaf switch, in order.", show_default=False)
]

SpineGbps = Annotated[
    float | None,
    typer.Option(min=0.001, help="Gbit/s from a leaf switch to the spine, for each node below it.", show_default=False),
]
