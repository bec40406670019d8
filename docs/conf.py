"""Builds the site: ``make site``, warnings are errors. Nothing is fetched from the network."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

import thinwire
from thinwire.spec.base import Spec

HERE = Path(__file__).parent

project = "thinwire"
author = "the thinwire authors"
copyright = author  # what Sphinx calls it
version = release = thinwire.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = f"thinwire {release}"

# Otherwise "--nodes" would become a dash and "nodes".
smartquotes = False
myst_heading_anchors = 3

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_default_options = {"exclude-members": "model_config, toml_inline"}
napoleon_numpy_docstring = False
napoleon_use_ivar = True


def write_command_reference(path: Path) -> None:
    """The help texts of all commands as Markdown, by Typer's own generator."""
    path.parent.mkdir(exist_ok=True)
    subprocess.run(
        [sys.executable, "-m", "typer", "thinwire.cli.main", "utils", "docs", "--name", "thinwire", "--output", path],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    text = path.read_text(encoding="utf-8").replace("# `thinwire`", "# Command reference", 1)
    text = re.sub(r"<span style=\"font-weight: bold\">(.*?)</span>", r"**\1**", text)
    # The examples of a help text are indented by two spaces; by four they are code.
    path.write_text(re.sub(r"^  (?=\S)", "    ", text, flags=re.MULTILINE), encoding="utf-8")


write_command_reference(HERE / "generated" / "cli.md")


def short_signature(app: Sphinx, what: str, name: str, found: Any, *rest: Any) -> tuple[str, str] | None:
    """Specifications have pages with their keys; as a signature these would be unreadable."""
    del app, name, rest
    return ("(**keys)", "") if what == "class" and issubclass(found, Spec) else None


def setup(app: Sphinx) -> None:
    """What Sphinx calls."""
    app.connect("autodoc-process-signature", short_signature)
