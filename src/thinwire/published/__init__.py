"""What papers measured, and how close the simulator comes. Never imports torch."""

from thinwire.published.tables import TABLES, Comparison, Table, mean_error, reproduce

__all__ = ["TABLES", "Comparison", "Table", "mean_error", "reproduce"]
