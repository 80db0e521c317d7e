"""Metrics: is an explanation true? Faithfulness, localisation, robustness, complexity, sanity."""

from __future__ import annotations

import importlib

from patchlight.errors import UndefinedMetric
from patchlight.metrics.base import Evaluation, Measure, Measured, list_metrics, register_metric
from patchlight.metrics.evaluation import evaluate

__all__ = ["Evaluation", "Measure", "Measured", "UndefinedMetric", "evaluate", "list_metrics", "register_metric"]

_ROOMS = ("deletion", "perturbation", "localisation", "robustness", "complexity", "sanity")


def load_bundled() -> None:
    """Import every room, so that its metrics are registered."""
    for room in _ROOMS:
        importlib.import_module(f"patchlight.metrics.{room}")
