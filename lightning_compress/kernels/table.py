"""Columns of the block table: the one int64 matrix that tells every kernel where each block lives."""

from __future__ import annotations

SOURCE = 0
"""Offset of the block's first element in the value buffer (bucket or shard), in elements."""
LENGTH = 1
"""Number of elements of the block."""
PAYLOAD = 2
"""Offset of the block's code in the payload, in bytes."""
STATE = 3
"""Offset of the block's first element in the memory's flat store, in elements."""
PARAMETER = 4
"""Index of the block's parameter inside the bucket."""
START = 5
"""Offset of the block's first element inside its parameter, in elements."""
ROW = 6
"""Elements of one first-dimension slice of the parameter (all of them for a 1-D parameter)."""
KEY = 7
"""32-bit hash of the parameter's name: the seed of its random numbers."""
COLUMNS = 8

# What is known of a parameter in one exchange; the values travel in the payload's header, and max() merges the ranks'.
ABSENT = 0
"""No backward reached it: it sends nothing, and its memory stays untouched."""
PRESENT = 1
"""It takes part."""
NONFINITE = 2
"""Its gradient holds an inf or NaN: it becomes NaN on all ranks, and its memory stays untouched."""
