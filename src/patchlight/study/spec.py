"""Methods and metrics in recipes; each is resolved once."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field

from patchlight.core.recipes import Number, OpenSpec, short_for
from patchlight.methods.requests import Request, resolve
from patchlight.metrics.base import MetricRequest, resolve_metric


class MethodSpec(OpenSpec):
    """A registered method; all other keys are its settings. `upsampling` replaces that of the metrics."""

    method: str
    upsampling: Literal["nearest", "bilinear", "bicubic"] | None = None

    _by_name = short_for("method")

    @cached_property
    def request(self) -> Request:
        """The method with its settings, resolved once."""
        return resolve(self.method, self.settings)

    @property
    def registered_name(self) -> str:
        """The registered name of the method."""
        return self.request.method.name

    def measured_by(self, metric: MetricSpec) -> MetricRequest:
        """The metric with the upsampling of this method."""
        request = metric.request
        if self.upsampling is None or "upsampling" not in request.metric.settings:
            return request
        return replace(request, settings={**request.settings, "upsampling": self.upsampling})


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
    def registered_name(self) -> str:
        """The registered name of the metric."""
        return self.request.metric.name
