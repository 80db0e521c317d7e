"""The progress events of a run, which listeners receive one at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from patchlight.bench.rows import ResultRow


@dataclass(frozen=True)
class Planning:
    """`read` of the images have been read for planning."""

    event: ClassVar[str] = "plan"
    read: int
    images: int


@dataclass(frozen=True)
class Start:
    """The plan is complete; `done` of its values exist already. `images` is the number of images per model."""

    event: ClassVar[str] = "start"
    values: int
    done: int
    notes: Sequence[str]
    images: int
    models: Sequence[str]
    folder: str


@dataclass(frozen=True)
class UnitStart:
    """A unit has started."""

    event: ClassVar[str] = "unit"
    model: str
    methods: Sequence[str]
    images: int
    key: str


@dataclass(frozen=True)
class StepEnd:
    """A stage of a unit, "explain" or "measure", has ended for these methods."""

    event: ClassVar[str] = "step"
    stage: str
    method: str


@dataclass(frozen=True)
class UnitEnd:
    """A unit has been stored."""

    event: ClassVar[str] = "done"
    key: str
    values: int
    seconds: float
    rows: Sequence[ResultRow]
    reused: int = 0


@dataclass(frozen=True)
class End:
    """The run has ended or was stopped; `failures` counts failed values by reason."""

    event: ClassVar[str] = "end"
    failures: Mapping[str, int]
    values: int
    done: int


Event = Planning | Start | UnitStart | StepEnd | UnitEnd | End
Listener = Callable[[Event], None]
