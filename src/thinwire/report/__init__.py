"""Results for people: tables for a terminal, pictures, and the page about a run."""

from thinwire.report.sheet import Sheet, rich_table
from thinwire.report.sweep import draw_sweep

__all__ = ["Sheet", "draw_sweep", "rich_table"]
