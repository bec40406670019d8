"""Results for people: tables for a terminal, pictures, and the page about a run."""

from thinwire.report.pictures import draw_sweep
from thinwire.report.sheet import Sheet, print_sheet, rich_table

__all__ = ["Sheet", "draw_sweep", "print_sheet", "rich_table"]
