"""Methods and metrics as recipes name them; each is resolved once."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field

from patchlight.core.recipes import Number, OpenSpec, short_for
from patchlight.methods.requests import Request, resolve
from patchlight.metrics.base import MetricRequest, resolve_metric


class MethodSpec(OpenSpec):
    """A registered method; all other keys are its settings.

    `upsampling` says how its map becomes pixels where that is the method's own affair; it wins over the metrics'.
    """

    method: str
    upsampling: Literal["nearest", "bilinear", "bicubic"] | None = None

    _by_name = short_for("method")

    @cached_property
    def request(self) -> Request:
        """The method with its settings, resolved once."""
        return resolve(self.method, self.settings)

    @property
    def registered(self) -> str:
        """The name the method is registered under."""
        return self.request.method.name

    def measured_by(self, metric: MetricSpec) -> MetricRequest:
        """The metric as it measures this method."""
        asked = metric.request
        if self.upsampling is None or "upsampling" not in asked.metric.settings:
            return asked
        return replace(asked, settings={**asked.settings, "upsampling": self.upsampling})


class MetricSpec(OpenSpec):
    """A registered metric; all other keys are its settings. Tables show value x `scale` with `digits` decimals."""

    metric: str
    scale: Number = 1.0
    digits: Annotated[int, Field(strict=True, ge=0, le=8)] = 3

    _by_name = short_for("metric")

    @cached_property
    def request(self) -> MetricRequest:
        """The metric with its settings, resolved once."""
        return resolve_metric(self.metric, self.settings)

    @property
    def registered(self) -> str:
        """The name the metric is registered under."""
        return self.request.metric.name
