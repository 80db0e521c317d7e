"""The makers of the bundled model run, and what they write is what the package loads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from patchlight.data.cifar import Part
from patchlight.zoo import pocket
from tools import evaluate_pocket, train_pocket


def few(folder: str, split: str = "test") -> Part:
    rng = np.random.default_rng(len(split))
    labels = (np.arange(40) % 10).astype(np.uint8)
    return rng.integers(0, 256, (40, 32, 32, 3), dtype=np.uint8), labels


@pytest.mark.slow
def test_training_writes_what_the_package_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_pocket, "read_cifar10", few)
    short = ["--epochs", "1", "--teacher-epochs", "1", "--batch", "20", "--teacher-batch", "20", "--device", "cpu"]
    assert train_pocket.main(["--data", "nowhere", "--out", str(tmp_path), *short]) == 0
    about, shipped = json.loads((tmp_path / "pocket.json").read_text()), pocket.description()
    assert {key: about[key] for key in ("architecture", "classes", "mean", "std", "parameters", "dtype")} == {
        key: shipped[key] for key in ("architecture", "classes", "mean", "std", "parameters", "dtype")
    }
    assert (tmp_path / "pocket-curve.csv").read_text().startswith("epoch,loss,accuracy\n1,")
    monkeypatch.setattr(pocket, "WEIGHTS", tmp_path / "pocket.safetensors")
    monkeypatch.setattr(pocket, "description", lambda: about)
    assert pocket.check_file()
    assert not pocket.build().training


def test_the_stored_model_is_measured_again(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(evaluate_pocket, "read_cifar10", few)
    assert evaluate_pocket.main(["--data", "nowhere", "--batch", "16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [*pocket.classes(), "all", "recorded"]
    assert lines[-2].endswith("of 40 test images)")
    monkeypatch.setattr(pocket, "check_file", lambda: False)
    assert evaluate_pocket.main(["--data", "nowhere"]) == 1
