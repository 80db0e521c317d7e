"""Runs too large to hold as rows: what is read of them against numpy, written out, and how much memory that takes."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from patchlight.bench.results import Results, collect_results
from patchlight.bench.statistics import table_cells
from patchlight.bench.store import Store
from patchlight.bench.tables import read_tables
from tests.bench.small import replaced
from tests.bench.synthetic import CURVES, NO_OBJECT, UNREADABLE, Synthetic, synthesise

ROOT = Path(__file__).parents[2]
SAMPLES = 200


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Synthetic:
    """Two groups, of four methods and of one; the second is not done on the last 90 images."""
    return synthesise(tmp_path_factory.mktemp("run"), images=2010, methods=5, unit=60, undone=2)


@pytest.fixture(scope="module")
def results(run: Synthetic) -> Results:
    return Store(run.folder).results()


def literal(run: Synthetic, m: int, n: int, draws: np.ndarray) -> float:
    """The data set's number of the images drawn, of which those without a value do not count."""
    metric = list(run.recipe.metrics)[n]
    counts = draws[~np.isnan(run.values[m, n, draws])]
    if metric == "pixel-accuracy":
        return float(run.correct[m, counts].sum() / run.labelled[m, counts].sum())
    if metric == "max-box-acc":
        return max(int((run.level[m, counts] >= threshold).sum()) for threshold in range(101)) / len(counts)
    return float(run.values[m, n, counts].mean())


def test_columns_are_what_was_written(run: Synthetic, results: Results) -> None:
    assert list(results.images["Pocket"]) == run.names
    for m, method in enumerate(run.recipe.methods):
        for n, metric in enumerate(run.recipe.metrics):
            column = results.columns["Pocket", method, metric]
            np.testing.assert_array_equal(column.values, run.values[m, n])
            assert column.undone == int((~run.done[m]).sum()) == (90 if m == 4 else 0)
            assert column.failed == int((run.failed & run.done[m]).sum())
            nothing = np.isnan(run.values[m, n]) & ~run.failed & run.done[m]
            words = np.where(run.failed & run.done[m], UNREADABLE, np.where(nothing, NO_OBJECT, ""))
            assert column.reasons.to_pylist() == words.tolist()
            assert column.errors.to_pylist() == np.where(words == UNREADABLE, UNREADABLE, "").tolist()
            assert column.shared_by == (1 if m == 4 else 4)
            assert float(column.explain_seconds.nanmean()) == pytest.approx(0.25)
            assert float(column.measure_seconds.nanmean()) == pytest.approx(0.01 * (n + 1))
    assert results.failures == {UNREADABLE: 12 * int((run.failed & run.done).sum())}


def test_mean_curves_are_those_of_the_images_with_a_value(run: Synthetic, results: Results) -> None:
    store = Store(run.folder)
    for m, method in enumerate(run.recipe.methods):
        for n, metric in enumerate(run.recipe.metrics):
            column = results.columns["Pocket", method, metric]
            if metric not in CURVES:
                assert column.mean_curve is None
                continue
            np.testing.assert_allclose(column.mean_curve, run.curves[m, n], rtol=1e-12)
    curves = store.curves("Pocket", "ixg", "auc")
    assert curves is not None
    there = torch.from_numpy(np.isfinite(run.values[4, list(run.recipe.metrics).index("auc")]))
    np.testing.assert_allclose(curves[there].double().mean(0), run.curves[4, 2], rtol=1e-12)
    assert bool(curves[-90:].isnan().all())
    assert store.curves("Pocket", "ixg", "saco") is None


def test_means_intervals_ties_and_ranks_are_numpys(run: Synthetic, results: Results) -> None:
    images = len(run.names)
    draws = torch.randint(images, (SAMPLES, images), generator=torch.Generator().manual_seed(0)).numpy()
    found = {(cell.method, cell.metric): cell for cell in table_cells(results, run.recipe, SAMPLES)}
    methods, metrics = list(run.recipe.methods), list(run.recipe.metrics)
    for metric in ("insertion", "pixel-accuracy", "max-box-acc"):
        n = metrics.index(metric)
        everything = np.arange(images)
        means = [literal(run, m, n, everything) for m in range(5)]
        for m, method in enumerate(methods):
            cell = found[method, metric]
            assert cell.mean == pytest.approx(means[m], rel=1e-12)
            spread = [literal(run, m, n, own) for own in draws]
            assert (cell.low, cell.high) == pytest.approx(tuple(np.quantile(spread, [0.025, 0.975])), rel=1e-12)
            assert cell.images == int(np.isfinite(run.values[m, n]).sum())
            assert cell.failed == int((run.failed & run.done[m]).sum())
            assert cell.images + cell.undefined + cell.failed + int((~run.done[m]).sum()) == images
    placed = read_tables(run.folder).ranks["Pocket", "insertion"]
    values = run.values[:, 0][:, np.isfinite(run.values[:, 0]).all(0)]
    expected = stats.rankdata(-values, axis=0).mean(1)
    assert list(placed.means.values()) == pytest.approx(expected.tolist(), rel=1e-12)
    assert placed.p == pytest.approx(stats.friedmanchisquare(*values).pvalue, rel=1e-9)


def test_methods_are_tied_on_the_images_that_all_share(run: Synthetic, results: Results) -> None:
    images = len(run.names)
    draws = torch.randint(images, (SAMPLES, images), generator=torch.Generator().manual_seed(0)).numpy()
    found = {(cell.method, cell.metric): cell for cell in table_cells(results, run.recipe, SAMPLES)}
    methods, metrics = list(run.recipe.methods), list(run.recipe.metrics)
    marked = 0
    for n, metric in enumerate(metrics):
        if metric in ("pixel-accuracy", "max-box-acc"):
            continue
        values = run.values[:, n]
        marks = [found[method, metric].mark for method in methods]
        if "best" not in marks:
            continue
        best = marks.index("best")
        for m, mark in enumerate(marks):
            shared = np.isfinite(values).all(0)
            differences = [np.mean((values[best] - values[m])[own[shared[own]]]) for own in draws]
            low, high = np.quantile(differences, [0.025, 0.975])
            assert mark == ("best" if m == best else "tied" if low <= 0 <= high else ""), (metric, methods[m])
            marked += mark == "tied"
    assert marked, "no method was tied: the test shows nothing"


def test_rows_of_other_plans_are_passed_over(run: Synthetic, tmp_path: Path) -> None:
    """A unit with an image and a method that the plan does not have."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    shutil.copytree(run.folder, tmp_path / "run")
    unit = sorted((tmp_path / "run" / "units").glob("*.parquet"))[0]
    table = pq.read_table(unit)
    image = pc.if_else(pc.equal(table["image"], run.names[0]), "stranger.jpeg", table["image"])
    method = pc.if_else(pc.equal(table["method"], "rollout"), "stranger", table["method"])
    table = table.set_column(1, "image", image).set_column(3, "method", method)
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    replaced(unit, sink.getvalue().to_pybytes())
    found = Store(tmp_path / "run").results()
    assert found.columns["Pocket", "genatt", "auc"].undone == 1
    assert found.columns["Pocket", "rollout", "auc"].undone == 60
    assert math.isnan(float(found.columns["Pocket", "genatt", "auc"].values[0]))
    np.testing.assert_array_equal(found.columns["Pocket", "genatt", "auc"].values[1:], run.values[0, 2, 1:])


MEASURED = """
import json, resource, sys
from pathlib import Path
from patchlight.bench.tables import as_csv, as_markdown, read_tables
import scipy.stats, pandas
status = lambda: next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmRSS")) / 1024
before = status()
run = read_tables(sys.argv[1])
as_markdown(run), as_csv(run)
print(json.dumps([before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]))
"""


def peak(folder: Path) -> tuple[float, float]:
    """MB before a report was made, and at most."""
    found = subprocess.run([sys.executable, "-c", MEASURED, str(folder)], capture_output=True, text=True, check=True)
    before, most = json.loads(found.stdout.splitlines()[-1])
    return before, most


def test_tables_are_dropped_and_little_is_kept(run: Synthetic) -> None:
    """Of each row three numbers and two places of words; of the boxes' hits a byte each."""
    store = Store(run.folder)
    alive: list[weakref.ref[Any]] = []

    def one_by_one() -> Iterator[Any]:
        for table in store.tables():
            alive.append(weakref.ref(table))
            yield table
            assert sum(reference() is not None for reference in alive[:-1]) == 0

    found = collect_results(one_by_one(), store.manifest())
    assert len(alive) > 60
    columns = list(found.columns.values())
    tensors = [t for c in columns for t in (c.values, c.explain_seconds, c.measure_seconds, *c.parts.values())]
    words = [array.indices for column in columns for array in (column.errors, column.reasons)]
    held = sum(t.numel() * t.element_size() for t in tensors) + sum(array.nbytes for array in words)
    rows, images = 120_600, 5 * 2010
    assert held <= rows * 32 + images * (304 + 8)
    assert found.columns["Pocket", "genatt", "max-box-acc"].parts["hits"].dtype == torch.uint8


@pytest.mark.slow
def test_seven_million_rows_are_reported_within_two_gigabytes(tmp_path: Path) -> None:
    synthesise(tmp_path / "run", images=50_000, unit=128)
    assert peak(tmp_path / "run")[1] < 2000
