"""Results for people: tables that read alike in a terminal and in a page of the documentation."""

from thinwire.report.sheet import Sheet, insert, markdown_table, rich_table

__all__ = ["Sheet", "insert", "markdown_table", "rich_table"]
