"""Published measurements, compared with the simulator. Never imports torch."""

from thinwire_bench.published.amsp import traced
from thinwire_bench.published.calibration import Fit, fits
from thinwire_bench.published.tables import TABLES, RowComparison, Table, mean_error, reproduce

__all__ = ["TABLES", "RowComparison", "Fit", "Table", "fits", "mean_error", "reproduce", "traced"]
