"""What a run tells while it goes on; whoever listens is given one of these at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from patchlight.bench.rows import ResultRow


@dataclass(frozen=True)
class Planning:
    """So many of the images have been read."""

    event: ClassVar[str] = "plan"
    read: int
    images: int


@dataclass(frozen=True)
class Start:
    """The plan is made, and how many of its values are done already is known; `images` are those of one model."""

    event: ClassVar[str] = "start"
    values: int
    done: int
    notes: Sequence[str]
    images: int
    models: Sequence[str]
    folder: str


@dataclass(frozen=True)
class UnitStart:
    """A unit is begun."""

    event: ClassVar[str] = "unit"
    model: str
    methods: Sequence[str]
    images: int
    key: str


@dataclass(frozen=True)
class StepEnd:
    """A stage of a unit, "explain" or "measure", is over for these methods."""

    event: ClassVar[str] = "step"
    stage: str
    method: str


@dataclass(frozen=True)
class UnitEnd:
    """A unit is stored."""

    event: ClassVar[str] = "done"
    key: str
    values: int
    seconds: float
    rows: Sequence[ResultRow]
    reused: int = 0


@dataclass(frozen=True)
class End:
    """The run is over, or was asked to stop; `failures` are values that failed, by reason."""

    event: ClassVar[str] = "end"
    failures: Mapping[str, int]
    values: int
    done: int


Event = Planning | Start | UnitStart | StepEnd | UnitEnd | End
Listener = Callable[[Event], None]
