"""The first operation that differs between two traces, forward and backward. See README.md."""

from samebits.verify.drift.result import Drift, DriftError, drift
from samebits.verify.drift.rows import (
    Columns,
    RowMap,
    batch_rows,
    column_shards,
    packed_rows,
    padded_rows,
    permuted_rows,
    read_rows,
)

__all__ = [
    "Columns",
    "Drift",
    "DriftError",
    "RowMap",
    "batch_rows",
    "column_shards",
    "drift",
    "packed_rows",
    "padded_rows",
    "permuted_rows",
    "read_rows",
]
