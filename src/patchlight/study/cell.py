"""One measurement: the value of a metric for a method's map of one image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Cell:
    """One image under one method and one metric.

    Attributes:
        image: The name of the image.
        method: The label of the method.
        metric: The label of the metric.
        value: The number, or None.
        note: Why there is no value, or why it is not informative.
        error: Why explaining or measuring failed.
        target: The explained class.
        curve: The metric's curve, if it has one.
        parts: The flat columns of a micro average.
        measure_seconds: Time of measuring this image.
        explain_seconds: Time of the pass that explained this image.
        shared_by: The number of methods that share this pass.
    """

    image: str
    method: str
    metric: str
    value: float | None = None
    note: str = ""
    error: str = ""
    target: int | None = None
    curve: Sequence[float] | None = None
    parts: Mapping[str, Sequence[float]] = field(default_factory=dict)
    measure_seconds: float | None = None
    explain_seconds: float | None = None
    shared_by: int | None = None

    @property
    def reason(self) -> str:
        """Why there is no value, or why it is not informative."""
        return self.error or self.note
