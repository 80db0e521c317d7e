"""`patchlight doctor` says what there is, tries the bundled model, and notices what is broken."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

import patchlight
from patchlight.cli import app, common
from patchlight.zoo import bundled, pocket


def test_all_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patchlight.core.extras.find_spec", lambda name: None if name == "h5py" else name)
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["well"] is True
    assert told["patchlight"] == patchlight.__version__
    assert told["versions"]["torch"] == metadata.version("torch")
    assert [device["device"] for device in told["devices"]][:1] == ["cpu"]
    assert told["devices"][0]["auto_inside"] == told["devices"][0]["auto_masks"] == "full"
    assert [extra["install"] for extra in told["missing_extras"]] == ["pip install 'patchlight[segmentation]'"]
    assert [check["what"] for check in told["checks"]][1:3] == [
        "pocket predicts cat on cpu",
        "explain on cpu",
    ]


def test_a_damaged_file_and_a_broken_model_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sums = tmp_path / "sums.txt"
    right = bundled.SUMS.read_text(encoding="utf-8")
    sums.write_text(right.replace("photos/bird.jpg", "photos/bard.jpg").replace("b49c84ca", "b49c84cb"))
    monkeypatch.setattr(bundled, "SUMS", sums)

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("patchlight.anatomy.load.load", broken)
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 2
    assert "photos/bard.jpg is missing" in done.stdout
    assert "pocket.safetensors is another" in done.stdout
    assert ": reinstall Patchlight" in done.stdout
    assert "BROKEN pocket predicts cat on cpu: no such kernel" in done.stdout
    assert "BROKEN explain on cpu: no such kernel" in done.stdout


def test_the_checksums_are_those_of_the_files() -> None:
    """`python -m tools.checksums` brings them up to date."""
    assert bundled.SUMS.read_text(encoding="utf-8") == bundled.checksum_lines()
    assert pocket.description()["sha256"] + "  pocket.safetensors\n" in bundled.checksum_lines()


def test_what_to_type_is_what_works_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "my venv" / "bin" / "patchlight"
    script.parent.mkdir(parents=True)
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["my venv/bin/patchlight"])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert common.program() == "'my venv/bin/patchlight'"
    monkeypatch.chdir(script.parent)
    monkeypatch.setattr(sys, "argv", [str(script)])
    assert common.program() == "./patchlight"
    monkeypatch.setenv("PATH", str(script.parent))
    assert common.program() == "patchlight"
    monkeypatch.setattr(sys, "argv", ["/somewhere/patchlight/__main__.py", "demo"])
    assert common.program().endswith(" -m patchlight")
    monkeypatch.setattr(sys, "argv", ["pytest"])
    assert common.program() == "patchlight"
