"""Cells of a matrix, listed row by row, so that one indexing operation serves all rows of a batch.

N cells.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def cells(
    parts: Sequence[tuple[int, torch.Tensor]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows and the columns of the cells that *parts* lists as (row, its columns)."""
    num_columns = torch.tensor([len(columns) for _, columns in parts])
    row_N = torch.tensor([row for row, _ in parts]).repeat_interleave(num_columns)
    column_N = torch.cat([columns for _, columns in parts])
    return row_N.to(device), column_N.to(device)
