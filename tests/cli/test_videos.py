"""`patchlight explain` of a folder of frames with a video model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import patchlight as pl
from tests.core.test_arrays import write_frames
from tests.helpers import command
from tests.registries import restored


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


def test_a_sound_is_explained(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.ASTConfig(**sizes, max_length=64, num_mel_bins=32)
    transformers.ASTForAudioClassification(config).save_pretrained(tmp_path / "model")
    np.save(tmp_path / "sound.npy", np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32))
    words = ("explain", f"{tmp_path}/sound.npy", "--model", f"hf:{tmp_path}/model", "--method", "occlusion")
    command(*words, "--unit", "band", "--set", "fill=floor", "--out", f"{tmp_path}/out/", says=("sound",))
    assert (tmp_path / "out" / "sound.png").is_file()


SCANS = """
import patchlight as pl
from timm.models.vision_transformer import Block
from torch import nn


class Volume(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Conv3d(1, 24, 16, 16)
        self.blocks = nn.ModuleList(Block(24, 3) for _ in range(2))
        self.head = nn.Linear(24, 5)

    def forward(self, volumes):
        tokens = self.project(volumes).flatten(2).mT
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(tokens.mean(1))


@pl.register_family("scans", prefix="scan", create=lambda request: (Volume(), {"input_shape": (1, 32, 32, 48)}))
def read_scan(model, **about):
    return None
"""


def test_a_volume_is_explained_by_a_model_of_a_plugin(tmp_path: Path) -> None:
    (tmp_path / "scans.py").write_text(SCANS, encoding="utf-8")
    np.save(tmp_path / "scan.npy", np.random.default_rng(0).normal(size=(1, 32, 32, 48)).astype(np.float32))
    with restored():
        pl.load_plugin(tmp_path / "scans.py")
        save_file(pl.load("scan:small").model.state_dict(), tmp_path / "scans.safetensors")
        command(
            *("explain", f"{tmp_path}/scan.npy", "--plugin", f"{tmp_path}/scans.py", "--model", "scan:small"),
            *("--weights", f"{tmp_path}/scans.safetensors", "--method", "occlusion", "--unit", "slice"),
            *("--out", f"{tmp_path}/out/"),
            says=("scan",),
        )
    assert (tmp_path / "out" / "scan.png").is_file()
