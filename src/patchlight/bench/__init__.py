"""Benchmarks: recipes, runs and their tables. Needs the extra `bench`."""

from __future__ import annotations

from patchlight.bench.local import run as run
from patchlight.bench.opened import open as open
from patchlight.bench.plan import plan as plan
from patchlight.bench.recipe import Recipe as Recipe
from patchlight.bench.recipe import read_recipe as read_recipe
from patchlight.bench.store import Store as Store
