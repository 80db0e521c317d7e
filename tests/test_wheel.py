"""The wheel, alone in an empty environment: it has all it needs, works, and says what to install for the rest.

Nothing is downloaded: what the wheel requires, and what that requires, is linked from where these tests run; what only
extras bring is not there.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import patchlight
from patchlight.core.extras import EXTRAS
from patchlight.zoo import pocket
from tools import dist

pytestmark = pytest.mark.slow
ABSENT = {module for extra in EXTRAS.values() for module in extra.modules}


def closure(requirements: Sequence[str], extra: str = "") -> set[str]:
    """Names of all distributions that these requirements lead to, in the environment of the tests."""
    found: set[str] = set()
    waiting = [(requirement, extra) for requirement in requirements]
    while waiting:
        text, asked = waiting.pop()
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": asked})):
            continue
        found.add(name)
        try:
            further = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # of another platform
            found.discard(name)
            continue
        waiting += [(one, inner) for one in further for inner in ("", *requirement.extras)]
    return found


def link(names: set[str], folder: Path) -> None:
    """Every top-level file and folder of these distributions, linked there."""
    for name in names:
        distribution = metadata.distribution(name)
        tops = {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
        for top in tops:
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(str(distribution.locate_file(top))).resolve())


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel in it."""

    bin: Path
    packages: Path
    work: Path

    def run(self, *words: object, extra_path: Path | None = None) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP", "VIRTUAL"))}
        own = {"HOME": str(self.work), "PATCHLIGHT_CACHE": str(self.work / "cache"), "HF_HUB_OFFLINE": "1"}
        own |= {"PYTHONPATH": str(extra_path)} if extra_path else {}
        return subprocess.run(
            [str(word) for word in words], cwd=self.work, env=kept | own, capture_output=True, text=True, check=False
        )

    def patchlight(self, *words: object) -> str:
        done = self.run(self.bin / "patchlight", *words)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def python(self, code: str, extra_path: Path | None = None) -> str:
        done = self.run(self.bin / "python", "-c", code, extra_path=extra_path)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    pytest.importorskip("build")
    return dist.build(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def alone(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Installed:
    home = tmp_path_factory.mktemp("alone")
    venv.create(home / "env", with_pip=False, symlinks=True)
    (packages,) = (home / "env").glob("lib/python*/site-packages")
    wheel = built[0]
    words = [sys.executable, "-m", "pip", "--python", str(home / "env" / "bin" / "python"), "install", "--no-deps"]
    subprocess.run([*words, "--no-index", "--quiet", str(wheel)], check=True, capture_output=True)
    (about,) = packages.glob("patchlight-*.dist-info")
    required = metadata.Distribution.at(about).requires or []
    link(closure(required) - {"patchlight"}, packages)
    (home / "work").mkdir()
    return Installed(home / "env" / "bin", packages, home / "work")


def test_they_have_what_they_should_and_nothing_else(built: tuple[Path, Path]) -> None:
    for file in built:
        assert list(dist.wrong(file)) == []
        done = subprocess.run(
            [sys.executable, "-m", "twine", "check", "--strict", str(file)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout
    names = dist.contents(built[0])
    for name in ("py.typed", "zoo/pocket.safetensors", "zoo/pocket-diffmask/gates.safetensors"):
        assert f"patchlight/{name}" in names
    for name in ("zoo/photos/cat.jpg", "recipes/bench/tis-table-1.toml", "web/static/index.html"):
        assert f"patchlight/{name}" in names
    assert "patchlight/bench/templates/runs.html" in names
    assert "patchlight/report/templates/report.html" in names


def test_a_strange_file_would_be_reported(built: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "LARGEST", 1000)
    monkeypatch.setattr(dist, "STRANGE", {"zoo"})
    monkeypatch.setattr(dist, "PACKAGE", dist.PACKAGE / "zoo")
    told = "\n".join(dist.wrong(built[0]))
    assert "at most 1000" in told
    assert "lacks patchlight/zoo" not in told
    assert "has patchlight/engine.py, which is no part of the package" in told


def test_what_extras_bring_is_not_there(alone: Installed) -> None:
    code = f"from importlib.util import find_spec; print([m for m in {sorted(ABSENT)!r} if find_spec(m) is not None])"
    assert alone.python(code).strip() == "[]"
    code = "import patchlight; print(patchlight.__file__)"
    assert alone.python(code).strip().startswith(str(alone.packages))


def test_version_and_lists(alone: Installed) -> None:
    assert alone.patchlight("--version").strip() == patchlight.__version__
    code = "from importlib.metadata import version; print(version('patchlight'))"
    assert alone.python(code).strip() == patchlight.__version__
    assert "genatt" in alone.patchlight("methods")
    assert "tis-table-1" in alone.patchlight("bench", "list")


def test_demo_explain_and_evaluate(alone: Installed) -> None:
    said = alone.patchlight("demo", "--out", "demo")
    assert (alone.work / "demo" / "patchlight-demo.png").stat().st_size > 10_000
    command = re.search(r"Your own image: (\S+) explain", said)
    assert command is not None
    assert Path(alone.work, command[1]).exists(), f"'{command[1]}' is not what can be typed"
    assert "pip install 'patchlight[web]'" in said
    photo = pocket.PHOTOS / "cat.jpg"
    alone.patchlight("explain", photo, "--method", "genatt,diffmask,vit-shapley", "--out", "cat.png")
    assert (alone.work / "cat.png").stat().st_size > 5_000
    alone.patchlight("explain", photo, "--method", "genatt", "--report", "report.html")
    assert "<html" in (alone.work / "report.html").read_text(encoding="utf-8")
    told = alone.patchlight(
        "evaluate", "--images", photo, "--method", "genatt,random", "--metric", "deletion", "--json"
    )
    assert json.loads(told)


def test_doctor(built: tuple[Path, Path], alone: Installed) -> None:
    told = json.loads(alone.patchlight("doctor", "--json"))
    assert told["well"] is True
    assert {extra["extra"] for extra in told["missing_extras"]} == set(EXTRAS)
    files = [name for name in dist.contents(built[0]) if name.startswith("patchlight/")]
    assert told["checks"][0]["told"] == f"{len(files)} files"
    gone = alone.packages / "patchlight" / "web" / "static" / "index.html"
    text = gone.read_text(encoding="utf-8")
    try:
        gone.unlink()
        done = alone.run(alone.bin / "patchlight", "doctor")
        assert done.returncode == 2
        assert "web/static/index.html is missing: install Patchlight again" in done.stdout
    finally:
        gone.write_text(text, encoding="utf-8")


MISSING = {
    "hf": ["explain", pocket.PHOTOS / "cat.jpg", "--model", "hf:google/vit-base-patch16-224"],
    "hf (a processor)": ["explain", pocket.PHOTOS / "cat.jpg", "--preprocess", "processor"],
    "open_clip": ["explain", pocket.PHOTOS / "cat.jpg", "--model", "open_clip:ViT-B-32"],
    "lime": ["explain", pocket.PHOTOS / "cat.jpg", "--method", "lime", "--set", "unit=pixel"],
    "train": ["diffmask", "train", "--images", pocket.PHOTOS, "--out", "gates", "--set", "batch_size=4"],
    "bench": ["bench", "run", "diffmask-table-1", "--out", "run"],
    "bench (ray)": ["bench", "run", "diffmask-table-1", "--out", "run", "--ray", "local"],
    "bench (report)": ["bench", "report", "run"],
    "web": ["serve", "--port", "0"],
    "segmentation": ["evaluate", "--images", "data", "--data", "imagenet-segmentation", "--method", "genatt"],
}


@pytest.mark.parametrize("what", MISSING)
def test_a_missing_extra_is_one_sentence(what: str, alone: Installed) -> None:
    (alone.work / "processor").mkdir(exist_ok=True)
    (alone.work / "processor" / "preprocessor_config.json").write_text("{}")
    (alone.work / "data").mkdir(exist_ok=True)
    (alone.work / "data" / "gtsegs_ijcv.mat").write_bytes(b"x")
    done = alone.run(alone.bin / "patchlight", *MISSING[what])
    assert done.returncode == 2, done.stdout + done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1, done.stderr
    assert re.search(rf"needs? .*: pip install '?patchlight\[{what.split()[0]}\]'?", said[0]), said[0]
    assert "Traceback" not in done.stderr


def test_missing_extras_in_python(alone: Installed, tmp_path: Path) -> None:
    code = (
        "import patchlight as pl\n"
        f"vit = pl.load('pocket'); att = pl.explain(vit, {str(pocket.PHOTOS / 'cat.jpg')!r}, 'genatt')\n"
        "try: att.to_frame()\n"
        "except pl.PatchlightError as error: print(error)"
    )
    assert alone.python(code).strip() == "to_frame needs pandas: pip install 'patchlight[pandas]'"
    code = "import patchlight as pl\ntry: import patchlight.bench.ray\nexcept pl.PatchlightError as error: print(error)"
    assert "pip install 'patchlight[bench]'" in alone.python(code)
    link(closure(["pyarrow", "filelock"]), tmp_path)
    assert alone.python(code, tmp_path).strip() == "--ray needs Ray: pip install 'patchlight[ray]'"


OTHERS = {"patchlight.callbacks.lightning": "lightning"}
"""What needs a package that no extra brings."""


def test_every_module_is_imported_or_waits_for_an_extra(alone: Installed) -> None:
    code = (
        "import importlib, pkgutil, re, patchlight\n"
        "for found in pkgutil.walk_packages(patchlight.__path__, 'patchlight.', onerror=lambda name: None):\n"
        "    if found.name in ('patchlight.__main__', 'patchlight.evidence.kernels'): continue\n"
        "    try: importlib.import_module(found.name)\n"
        "    except ModuleNotFoundError as error: print(found.name, error.name)\n"
        "    except patchlight.PatchlightError as error:\n"
        '        print(found.name, re.search(r"pip install \'?(?:patchlight\\[)?(\\w+)", str(error))[1])'
    )
    waiting = dict(line.split() for line in alone.python(code).splitlines())
    assert waiting["patchlight.callbacks.transformers"] == "hf"
    for module, needs in waiting.items():
        assert module.startswith(("patchlight.bench", "patchlight.callbacks", "patchlight.web")), module
        assert needs.partition(".")[0] in ABSENT | set(EXTRAS) or OTHERS[module] == needs, (module, needs)
