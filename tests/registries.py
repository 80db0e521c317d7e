"""What a test registers is taken out again, so that others see what is bundled."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from patchlight.anatomy.families import FAMILIES
from patchlight.data.base import KINDS
from patchlight.evidence.rules import RULES
from patchlight.methods.base import COMPOSITIONS, METHODS
from patchlight.metrics.base import METRICS
from patchlight.report.figures import FIGURES

REGISTRIES: tuple[Any, ...] = (METHODS, METRICS, RULES, COMPOSITIONS, KINDS, FAMILIES, FIGURES)


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Whatever is registered inside is gone afterwards."""
    before = [set(registry) for registry in REGISTRIES]
    try:
        yield
    finally:
        for registry, known in zip(REGISTRIES, before, strict=True):
            for name in set(registry) - known:
                registry.remove(name)
