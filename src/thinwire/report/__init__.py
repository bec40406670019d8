"""Results for people: tables that read alike in a terminal and in a page of the documentation."""

from thinwire.report.scatter import draw_agreement
from thinwire.report.sheet import Sheet, insert, markdown_table, rich_table
from thinwire.report.sweep import draw_sweep
from thinwire.report.timelines import draw_timelines

__all__ = ["draw_agreement", "draw_sweep", "draw_timelines", "Sheet", "insert", "markdown_table", "rich_table"]
