"""Results as pandas tables; pandas is imported when one is asked for, and is not needed otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from patchlight.core.extras import missing_extra

if TYPE_CHECKING:
    from pandas import DataFrame


def make_frame(columns: Mapping[str, Any]) -> DataFrame:
    """A table of columns, in that order; a column that is one value has it in every row."""
    return _pandas().DataFrame(dict(columns))


def stack_frames(frames: Iterable[DataFrame]) -> DataFrame:
    """Tables below each other, their rows numbered through."""
    return _pandas().concat(list(frames), ignore_index=True)


def from_arrow(table: Any) -> DataFrame:
    """A table of pyarrow as one of pandas."""
    _pandas()
    return table.to_pandas()


def _pandas() -> Any:
    try:
        import pandas
    except ImportError as error:
        raise missing_extra("to_frame needs", "pandas", "pandas") from error
    return pandas
