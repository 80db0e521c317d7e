"""Results as pandas tables. Pandas is optional and imported only here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from patchlight.core.extras import import_extra

if TYPE_CHECKING:
    from pandas import DataFrame


def make_frame(columns: Mapping[str, Any]) -> DataFrame:
    """A table of columns in this order; a single value is repeated in every row."""
    return _pandas().DataFrame(dict(columns))


def stack_frames(frames: Iterable[DataFrame]) -> DataFrame:
    """Tables below each other, with new row numbers."""
    return _pandas().concat(list(frames), ignore_index=True)


def from_arrow(table: Any) -> DataFrame:
    """A pyarrow table as a pandas table."""
    _pandas()
    return table.to_pandas()


def _pandas() -> Any:
    return import_extra("pandas", "to_frame needs", "pandas")
