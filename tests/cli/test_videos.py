"""`patchlight explain` of a folder of frames with a video model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.core.test_arrays import write_frames
from tests.helpers import command


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.VideoMAEConfig(**small, image_size=64, num_frames=4)
    folder = tmp_path_factory.mktemp("video-model")
    transformers.VideoMAEForVideoClassification(config).save_pretrained(folder)
    return folder


def test_a_folder_of_frames_is_one_video(model: Path, tmp_path: Path) -> None:
    clip = write_frames(tmp_path / "clip", 4)
    words = ("explain", str(clip), "--model", f"hf:{model}", "--method", "occlusion", "--unit", "frame")
    command(*words, "--out", f"{tmp_path}/out/", says=("clip",))
    assert (tmp_path / "out" / "clip.png").is_file()
    command(*words, "--report", f"{tmp_path}/report.html", code=2, says=("a report draws pictures",))


def test_wrong_clips_and_units_are_refused(model: Path, tmp_path: Path) -> None:
    short = write_frames(tmp_path / "short", 3)
    words = ("explain", str(short), "--model", f"hf:{model}", "--out", f"{tmp_path}/out/")
    command(*words, "--method", "ixg", code=3, says=("has 3 frames, and this model takes 4",))
    command(*words, "--method", "ixg", "--unit", "frame", code=2, says=("--unit is for methods that hide parts",))
