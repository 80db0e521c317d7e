"""Runs on real Ray clusters of this machine: equal to local ones, whoever dies, and refused by nodes that differ."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

import patchlight
from patchlight.bench import local
from patchlight.bench.events import Event, UnitEnd, UnitStart
from patchlight.bench.local import RunOptions, Summary, run
from patchlight.bench.recipe import Recipe, parse
from patchlight.bench.store import Store
from patchlight.core.errors import PatchlightError
from patchlight.core.plugins import load_plugin
from tests.bench.small import pictures, text
from tests.registries import restored

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'patchlight[ray]'")
MEMORY = 80_000_000
DEADLY = """\
import os
import time

import torch

import patchlight as pl


@pl.own_passes("test-sleepy", paper="none", ignores_class=True)
def sleepy(ask: pl.Ask):
    time.sleep(0.4)
    return torch.arange(ask.vit.grid[0] * ask.vit.grid[1]).view(1, *ask.vit.grid).float().repeat(len(ask.images), 1, 1)


@pl.own_passes("test-deadly", paper="none", ignores_class=True)
def deadly(ask: pl.Ask):
    os._exit(9)
"""


@contextlib.contextmanager
def cluster_of(*cpus: int) -> Iterator[Any]:
    """A Ray cluster of nodes with so many CPUs each, which ends with the test, whatever happens in it."""
    from ray.cluster_utils import Cluster

    kept, folder = signal.getsignal(signal.SIGTERM), tempfile.mkdtemp(prefix="pl-")  # sockets need short paths
    head = {"num_cpus": cpus[0], "object_store_memory": MEMORY, "include_dashboard": False, "temp_dir": folder}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for count in cpus[1:]:
            cluster.add_node(num_cpus=count, object_store_memory=MEMORY)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        signal.signal(signal.SIGTERM, kept)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    """Ray reports nothing to anybody about what is begun here, and notes it where no other run of it looks."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="pl-") as folder:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_TMPDIR", folder)
        Path(folder, "ray").mkdir()  # a cluster with a folder of its own does not make the common one
        yield


@pytest.fixture(scope="module")
def cluster(quiet: None) -> Iterator[Any]:
    with cluster_of(1) as found:
        yield found


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units of one batch, so that there are many."""
    monkeypatch.setattr(local, "SECONDS", 1e-6)


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("plugin") / "deadly.py"
    path.write_text(DEADLY)
    with restored():
        load_plugin(path)
        yield path


def with_method(label: str, method: str, folder: Path) -> str:
    """The small recipe with one method more."""
    return text(folder).replace("[methods]", f'[methods]\n{label} = "{method}"')


def run_ray(recipe: Recipe, out: Path, address: str, stop: threading.Event | None = None, **options: Any) -> Summary:
    listen = options.pop("listen", lambda event: None)
    return run(recipe, out, RunOptions(ray=address, **options), stop, listen)


def values(out: Path) -> dict[tuple[str, str, str], tuple[float | None, list[float] | None, str]]:
    """By image, method and metric: the value, its curve, and the error."""
    found = {}
    for row in pq.read_table(out / "units").to_pylist():
        key = row["image"], row["method"], row["metric"]
        assert key not in found, f"{key} is there twice"
        found[key] = row["value"], row["curve"], row["error"]
    return found


def assert_equal(out: Path, other: Path) -> None:
    """All values and curves of two runs agree to six significant digits."""
    mine, theirs = values(out), values(other)
    assert mine.keys() == theirs.keys()
    for key, (value, curve, error) in mine.items():
        assert error == theirs[key][2]
        assert value == pytest.approx(theirs[key][0], rel=5e-7), key
        assert curve == pytest.approx(theirs[key][1], rel=5e-7, abs=1e-9), key


@pytest.mark.usefixtures("small_units")
def test_a_run_gives_the_numbers_of_a_local_one(tmp_path: Path, cluster: Any, capfd: Any) -> None:
    chosen = parse(text(pictures(tmp_path / "images", 3)))
    run(chosen, tmp_path / "local")
    told: list[Event] = []
    flying, most = set(), 0

    def listen(event: Event) -> None:
        nonlocal most
        told.append(event)
        if isinstance(event, UnitStart):
            flying.add(event.key)
        if isinstance(event, UnitEnd):
            flying.remove(event.key)
        most = max(most, len(flying))

    handler = signal.getsignal(signal.SIGTERM)
    capfd.readouterr()
    done = run_ray(chosen, tmp_path / "ray", cluster.address, listen=listen)
    assert capfd.readouterr().out == ""
    assert signal.getsignal(signal.SIGTERM) is handler
    assert not ray.is_initialized()
    assert done == Summary(24, 0, 24, 0, 0, {}, ())
    assert sum(isinstance(event, UnitEnd) for event in told) == len(list((tmp_path / "ray" / "units").iterdir())) == 6
    assert most == 1  # of six: as many as there is room for
    assert_equal(tmp_path / "ray", tmp_path / "local")
    assert Store(tmp_path / "ray").manifest().threads == 1


def test_a_cluster_without_nodes_is_not_waited_for_for_ever(
    tmp_path: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from patchlight.bench import ray as room

    stop, looks = threading.Event(), 0

    def room_of(cluster: Any) -> int:
        nonlocal looks
        looks += 1
        if looks > 40:
            stop.set()
        return int(looks == 1)

    monkeypatch.setattr(room.Cluster, "room", room_of)
    monkeypatch.setattr(room, "PATIENCE", 1.0)
    chosen = parse(text(pictures(tmp_path / "images", 1)))
    told = "for 1 seconds, no node of the Ray cluster has had 1 CPU, .* the same command resumes the run"
    with pytest.raises(PatchlightError, match=told):
        run(chosen, tmp_path / "run", RunOptions(ray=cluster.address), stop)
    assert not Store(tmp_path / "run").busy()


def test_threads_of_a_run_begun_elsewhere_are_named(tmp_path: Path, cluster: Any) -> None:
    threads = torch.get_num_threads()
    chosen = parse(text(pictures(tmp_path / "images", 1)))
    try:
        stop = threading.Event()
        stop.set()
        run(chosen, tmp_path / "run", RunOptions(threads=2), stop)
        told = "the run was started with 2 threads, but no node of the Ray cluster has 2 CPUs, .*; use another --out"
        with pytest.raises(PatchlightError, match=told):
            run_ray(chosen, tmp_path / "run", cluster.address)
    finally:
        torch.set_num_threads(threads)


def test_a_node_with_another_patchlight_is_refused_by_name(tmp_path: Path, cluster: Any) -> None:
    (tmp_path / "patchlight").mkdir()
    (tmp_path / "patchlight" / "__init__.py").write_text('__version__ = "0.0.7"\n')
    node = cluster.add_node(num_cpus=1, object_store_memory=MEMORY, env_vars={"PYTHONPATH": str(tmp_path)})
    try:
        told = rf"^node \S+ \([\d.]+\) of the Ray cluster has Patchlight 0.0.7, but this is {patchlight.__version__};"
        with pytest.raises(PatchlightError, match=told):
            run_ray(parse(text(pictures(tmp_path / "images", 1))), tmp_path / "run", cluster.address)
        assert not (tmp_path / "run").exists()
    finally:
        cluster.remove_node(node, allow_graceful=False)


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("here", "--ray here is not an address; give auto, or HOST:PORT"),
        ("127.0.0.1:1", "no Ray cluster answers at 127.0.0.1:1"),
        ("127.0.0.1:99999", "no Ray cluster answers at 127.0.0.1:99999"),
    ],
)
def test_an_address_without_a_cluster_is_told_at_once(tmp_path: Path, address: str, told: str) -> None:
    begin = time.monotonic()
    with pytest.raises(PatchlightError, match=told):
        run_ray(parse(text(pictures(tmp_path / "images", 1))), tmp_path / "run", address)
    assert time.monotonic() - begin < 30


def test_the_address_of_a_dead_cluster_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(PatchlightError, match=r"no Ray cluster answers at 127\.0\.0\.1:1 "):
        run_ray(parse(text(pictures(tmp_path / "images", 1))), tmp_path / "run", "auto")


@pytest.mark.slow
@pytest.mark.usefixtures("small_units")
def test_of_three_nodes_one_is_killed_and_nothing_is_lost(tmp_path: Path, plugin: Path) -> None:
    chosen = parse(with_method("Sleepy", "test-sleepy", pictures(tmp_path / "images", 6)))
    run(chosen, tmp_path / "local")
    with cluster_of(1, 1, 1) as cluster:
        ends = 0

        def listen(event: Event) -> None:
            nonlocal ends
            ends += isinstance(event, UnitEnd)
            if isinstance(event, UnitStart) and plugin.exists():
                plugin.rename(tmp_path / "gone.py")  # nodes find no such file: they are told what was in it
            if isinstance(event, UnitEnd) and ends == 6:
                cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)

        done = run_ray(chosen, tmp_path / "ray", cluster.address, listen=listen)
        (tmp_path / "gone.py").rename(plugin)
    again = run(chosen, tmp_path / "ray")
    assert (done.now, done.left, done.failures) == (60, 0, {})
    assert (again.before, again.now, again.left) == (60, 0, 0)
    assert any(re.match(r"node [\d.]+ died \(NodeDiedError\);", note) for note in done.notes), done.notes
    assert_equal(tmp_path / "ray", tmp_path / "local")


@pytest.mark.slow
@pytest.mark.usefixtures("small_units")
def test_a_unit_that_kills_its_workers_fails_alone(tmp_path: Path, plugin: Path) -> None:
    chosen = parse(with_method("Deadly", "test-deadly", pictures(tmp_path / "images", 1)))
    with cluster_of(1) as cluster:
        done = run_ray(chosen, tmp_path / "ray", cluster.address)
    assert done.failures == {"3 processes died while they ran it": 2}
    assert (done.now, done.left) == (10, 0)
    assert all(
        (method == "Deadly") == bool(error) for (_, method, _), (_, _, error) in values(tmp_path / "ray").items()
    )


@pytest.mark.slow
def test_sigterm_ends_it_with_75_and_the_same_command_goes_on(tmp_path: Path, plugin: Path) -> None:
    chosen = tmp_path / "small.toml"
    chosen.write_text(with_method("Sleepy", "test-sleepy", pictures(tmp_path / "images", 12)))
    words = [sys.executable, "-m", "patchlight", "bench", "run", str(chosen), "--plugin", str(plugin)]
    run(parse(chosen.read_text()), tmp_path / "local")
    with cluster_of(1, 1) as cluster:
        here = [*words, "--out", str(tmp_path / "ray"), "--ray", cluster.address, "--json"]
        first = subprocess.Popen(here, stdout=subprocess.PIPE, text=True)
        assert first.stdout is not None
        for line in first.stdout:
            if json.loads(line)["event"] == "done":
                first.send_signal(signal.SIGTERM)
                break
        events = [json.loads(line) for line in first.stdout]
        assert first.wait(60) == 75
        assert events[-1]["event"] == "end"
        assert events[-1]["done"] < events[-1]["values"]
        assert not Store(tmp_path / "ray").busy()
        assert subprocess.run(here, stdout=subprocess.DEVNULL).returncode == 0
    assert_equal(tmp_path / "ray", tmp_path / "local")


@pytest.mark.slow
def test_a_node_without_the_extra_or_with_other_code_is_refused_by_name(tmp_path: Path) -> None:
    chosen = parse(text(pictures(tmp_path / "images", 1)))
    home = Path(patchlight.__file__).parent
    shutil.copytree(home, tmp_path / "other" / "patchlight", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "other" / "patchlight" / "engine.py").open("a") as file:
        file.write("# changed\n")
    (tmp_path / "without" / "pyarrow").mkdir(parents=True)
    (tmp_path / "without" / "pyarrow" / "__init__.py").write_text("raise ModuleNotFoundError('no pyarrow')\n")
    cases = {
        str(tmp_path / "other"): "has other code of Patchlight .* install the same version of Patchlight on every node",
        os.pathsep.join([str(tmp_path / "without"), str(home.parent)]): r"pip install 'patchlight\[bench\]'",
    }
    with cluster_of(1) as cluster:
        for path, told in cases.items():
            node = cluster.add_node(num_cpus=1, object_store_memory=MEMORY, env_vars={"PYTHONPATH": path})
            with pytest.raises(PatchlightError, match=rf"^node \S+ .*{told}"):
                run_ray(chosen, tmp_path / "run", cluster.address)
            cluster.remove_node(node, allow_graceful=False)


@pytest.mark.slow
def test_what_a_node_cannot_read_is_told_with_its_name(tmp_path: Path, cluster: Any) -> None:
    folder = pictures(tmp_path / "images", 2)

    def listen(event: Event) -> None:
        if isinstance(event, UnitStart) and folder.exists():
            shutil.rmtree(folder)

    with pytest.raises(PatchlightError, match=r"^on node \S+: .*images"):
        run_ray(parse(text(folder)), tmp_path / "run", cluster.address, listen=listen)
    assert not ray.is_initialized()


@pytest.mark.slow
def test_tasks_have_as_many_threads_as_every_node_has_room_for(tmp_path: Path) -> None:
    stop, threads = threading.Event(), torch.get_num_threads()
    stop.set()
    chosen = parse(text(pictures(tmp_path / "images", 1)))
    try:
        with cluster_of(8, 3) as cluster:
            for workers, expected in ((None, 3), (11, 1)):
                run_ray(chosen, tmp_path / str(workers), cluster.address, workers=workers, stop=stop)
                assert Store(tmp_path / str(workers)).manifest().threads == expected
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.usefixtures("small_units")
def test_a_node_that_joins_later_is_refused_by_name_too(tmp_path: Path, plugin: Path) -> None:
    (tmp_path / "other" / "patchlight").mkdir(parents=True)
    (tmp_path / "other" / "patchlight" / "__init__.py").write_text('__version__ = "0.0.7"\n')
    chosen = parse(with_method("Sleepy", "test-sleepy", pictures(tmp_path / "images", 12)))
    with cluster_of(1) as cluster:

        def listen(event: Event) -> None:
            if isinstance(event, UnitEnd) and len(cluster.list_all_nodes()) == 1:
                other = {"PYTHONPATH": str(tmp_path / "other")}
                cluster.add_node(num_cpus=1, object_store_memory=MEMORY, env_vars=other)

        with pytest.raises(PatchlightError, match=r"^node \S+ of the Ray cluster has Patchlight 0.0.7, but this is"):
            run_ray(chosen, tmp_path / "run", cluster.address, listen=listen)
    done = Store(tmp_path / "run").files()
    assert done
    assert run(chosen, tmp_path / "run").before >= len(done)
