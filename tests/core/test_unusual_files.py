"""Damaged, hostile and oddly named files: attributions, images, and arguments of the command line."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import patchlight as pl
from patchlight.core.images import open_image, open_mask
from tests.families import build, images, shared
from tests.helpers import command, refuses

GONE = "gone"
LABELS = ["cat", "dog", "bird", "fish", "frog", "ship", "tree"]


@pytest.fixture
def tiny_model(monkeypatch: pytest.MonkeyPatch) -> pl.Anatomy:
    """The command line loads a small model."""
    vit = build("vit")
    vit.labels = LABELS
    monkeypatch.setattr("patchlight.anatomy.load.load", lambda *_, **__: vit)
    return vit


def saved(folder: Path, **keys: Any) -> Path:
    """A saved small attribution with changed keys in its JSON."""
    vit = shared("vit")
    path = pl.explain(vit, images(vit), "ixg").save(folder) / "attribution.json"
    about = {**json.loads(path.read_text()), **keys}
    path.write_text(json.dumps({k: v for k, v in about.items() if v != GONE}))
    return folder


def header(path: Path, shape: list[int], size: int, kind: str = "F32") -> None:
    """A safetensors file of a given length that declares scores of a shape without containing them."""
    end = {"F32": 4, "F8_E8M0": 1}[kind] * torch.Size(shape).numel()
    tensors = {
        "scores": {"dtype": kind, "shape": shape, "data_offsets": [0, end]},
        "target": {"dtype": "I64", "shape": [1], "data_offsets": [end, end + 8]},
    }
    text = json.dumps(tensors).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(size or 8 + len(text) + end + 8)


def test_attributions_of_absurd_size(tmp_path: Path) -> None:
    saved(tmp_path / "shown", image_size=[200_000, 200_000])
    refuses(("shown' is damaged: ", "200000"), pl.Attribution.load, tmp_path / "shown")
    saved(tmp_path / "cut", preprocess={"size": [64, 64], "crop_pct": 1e-9})
    refuses(("cut' is damaged: ", "not a possible image size"), pl.Attribution.load, tmp_path / "cut")
    for name, size in (("lies", 4096), ("sparse", 0)):
        header(saved(tmp_path / name) / "scores.safetensors", [1, 200_000, 200_000], size)
        refuses(f"{name}' is damaged: ", pl.Attribution.load, tmp_path / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sysconf", lambda name: {"SC_PHYS_PAGES": 8, "SC_PAGE_SIZE": 8}[name])
        refuses(("large' is damaged: ", "of memory"), pl.Attribution.load, saved(tmp_path / "large"))


DAMAGED_KEYS: list[dict[str, Any]] = [
    {"format": GONE},
    {"method": GONE},
    {"image_size": GONE},
    {"format": 99},
    {"colour": "red"},
    *[{"method": value} for value in (3, None)],
    *[{"image_size": value} for value in ("64x64", [64], [64, 0], [64, 6.5], [32, 32])],
    *[{"extent": value} for value in ([0, 64], [200_000, 200_000])],
    *[{"labels": value} for value in ("cat", [1, 2, 3], ["cat"])],
    {"against_labels": ["cat"]},
    {"level": "patch"},
    *[{"settings": value} for value in ([], None)],
    *[{"seed": value} for value in ("0", True)],
    {"versions": {"torch": 2}},
    *[{"preprocess": value} for value in ([], {}, {"size": [64, 64], "colour": "red"})],
    {"preprocess": {"size": [64, 64], "mean": [0.5], "std": [0.0]}},
    {"preprocess": {"size": [64, 64], "mean": [float("nan")], "std": [1.0]}},
    {"preprocess": {"size": [64, 64], "fit": "stretch"}},
    *[{"preprocess": {"size": [64, 64], "crop_pct": value}} for value in (1e308, 1e-320, 0.0)],
    {"images": ["a hash"]},
    {"tensors": "../../secret.safetensors"},
]


@pytest.mark.parametrize("keys", DAMAGED_KEYS, ids=str)
def test_attributions_with_keys_that_do_not_belong(keys: dict[str, Any], tmp_path: Path) -> None:
    refuses("map' is damaged: ", pl.Attribution.load, saved(tmp_path / "map", **keys))


SCORES = torch.rand(3, 4, 4)


@pytest.mark.parametrize(
    ("key", "tensor"),
    [
        ("scores", torch.rand(2, 4, 4)),
        ("scores", torch.rand(4, 4)),
        ("scores", torch.rand(3, 2, 4, 4)),
        ("scores", SCORES.long()),
        ("scores", SCORES.where(SCORES < 0.9, torch.nan).index_fill(0, torch.tensor([1]), torch.inf)),
        ("scores", None),
        ("target", None),
        ("target", torch.tensor([0, -1, 2])),
        ("target", torch.tensor([0.0, 1.0, 2.0])),
        ("target", torch.tensor([[0], [1], [2]])),
        ("against", torch.tensor([0, 1])),
        ("against", torch.tensor([0, 1, -2])),
        ("weights", torch.rand(3)),
        ("scores", SCORES.bfloat16()),
        ("scores", SCORES.to(torch.float8_e4m3fn)),
        ("target", torch.tensor([0, 1, 2], dtype=torch.uint64)),
    ],
)
def test_attributions_with_tensors_that_do_not_fit(key: str, tensor: torch.Tensor | None, tmp_path: Path) -> None:
    path = next(saved(tmp_path / "map").glob("scores*.safetensors"))
    save_file({k: v for k, v in {**load_file(path), key: tensor}.items() if v is not None}, path)
    refuses("map' is damaged: ", pl.Attribution.load, tmp_path / "map")


def test_attributions_of_another_kind(tmp_path: Path) -> None:
    header(saved(tmp_path / "bytes") / "scores.safetensors", [1, 4, 4], 0, "F8_E8M0")
    refuses("bytes' is damaged: scores has the type F8_E8M0, not F32 or F64", pl.Attribution.load, tmp_path / "bytes")
    (tmp_path / "file").write_text("")
    refuses("cannot be read: Not a directory", pl.Attribution.load, tmp_path / "file")
    assert pl.Attribution.load(saved(tmp_path / "sound")).seed == 0


class Killed(BaseException):
    """Stands for the end of the process."""


def test_an_attribution_is_there_whenever_its_replacement_is_killed(tmp_path: Path) -> None:
    old, new = (
        pl.Attribution(torch.full((1, 2, 2), v), torch.tensor([int(v)]), str(v), "m", (8, 8)) for v in (1.0, 2.0)
    )
    seen: set[str] = set()
    for step in range(40):
        place = old.save(tmp_path / f"{step}")
        left = step
        dead = False

        def counted(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal left, dead
                dead = dead or left == 0
                if dead:
                    raise Killed
                left -= 1
                result = real(*args, **kwargs)
                dead = left == 0
                left -= 1
                if dead:
                    raise Killed
                return result

            return call

        with pytest.MonkeyPatch.context() as patch:
            for name in ("rename", "replace", "unlink", "rmdir", "chmod"):
                patch.setattr(os, name, counted(getattr(os, name)))
            try:
                new.save(place, force=True)
            except Killed:
                done = False
            else:
                done = True
        kept = pl.Attribution.load(place)
        assert (kept.method, float(kept.scores[0, 0, 0]), int(kept.target[0])) in {("1.0", 1.0, 1), ("2.0", 2.0, 2)}
        seen.add(kept.method)
        new.save(place, force=True)
        assert pl.Attribution.load(place).method == "2.0"
        if done:
            break
    assert done
    assert step > 3, "nothing was killed"
    assert seen == {"1.0", "2.0"}
    assert sorted(p.suffix for p in place.iterdir()) == [".json", ".safetensors"], "the old scores were left"


EPS = b"""%!PS-Adobe-3.0 EPSF-3.0
%%BoundingBox: 0 0 10 10
%%EndComments
0 0 10 10 rectfill
showpage
"""


def test_pictures_that_are_programs(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_, **__: pytest.fail("Ghostscript was to run"))
        (tmp_path / "eps.png").write_bytes(EPS)
        (tmp_path / "pdf.jpg").write_bytes(b"%PDF-1.4\n%\xe2\xe3\xcf\xd3\n")
        (tmp_path / "wmf.bmp").write_bytes(b"\xd7\xcd\xc6\x9a\x00\x00" + bytes(40))
        Image.new("RGB", (8, 8)).save(tmp_path / "icon.png", format="ICO")
        for name in ("eps.png", "pdf.jpg", "wmf.bmp", "icon.png"):
            for opened in (open_image, open_mask):
                refuses((f"{name}' is not a readable image", "formats: JPEG, PNG"), opened, tmp_path / name)
    for kind in ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM"):
        Image.new("RGB", (8, 8), "red").save(tmp_path / "named.wrongly", format=kind)
        assert open_image(tmp_path / "named.wrongly").size == (8, 8)


def test_names_that_are_no_text(tiny_model: pl.Anatomy, tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    odd, broken = os.fsdecode(b"caf\xe9.png"), os.fsdecode(b"\xff\xfe.png")
    Image.effect_noise((60, 60), 60).save(photos / "plain.png")
    Image.effect_noise((60, 60), 60).convert("RGB").save(photos / odd)
    (photos / broken).write_bytes(b"no image")
    out, maps = tmp_path / "out", tmp_path / "maps"
    told = command(
        "explain", str(photos), "--out", f"{out}/", "--save", str(maps), code=3, says=("plain.png", "1 of 3 images")
    )
    assert "caf\\xe9.png" in told
    again = command("explain", str(photos), "--out", f"{out}/", "--force", "--json", code=3)
    about, _ = json.JSONDecoder().raw_decode(again, again.index("{"))
    alone = command("explain", str(photos / odd), "--out", str(tmp_path / "one.png"))
    measured = ("evaluate", str(maps), "--images", str(photos), "--metric", "sparseness")
    command(*measured, "--csv", str(tmp_path / "found.csv"))
    assert "caf\\udce9.png" in command(*measured, "--json")
    assert {Path(one["path"]).name for one in about["images"]} == {"plain.png", odd}
    assert [Path(one["path"]).name for one in about["errors"]] == [broken]
    assert (out / odd).is_file()
    assert len(pl.Attribution.load(maps / odd[:-4] / "auto")) == 1
    assert "one.png" in alone
    assert b"caf\xe9.png,auto" in (tmp_path / "found.csv").read_bytes()


def test_a_run_continues_past_a_map_that_is_not_finite(
    tiny_model: pl.Anatomy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    for name, level in (("a.png", 40), ("black.png", 0), ("c.png", 90)):
        Image.new("RGB", (64, 64), (level, 2 * level, 90)).save(photos / name)
    vit = tiny_model
    dark = vit.batch(photos / "black.png")[0]
    readout, embed = vit.readout, vit.embed
    lost = torch.zeros(0, dtype=torch.bool)

    def embedded(given: torch.Tensor) -> torch.Tensor:
        nonlocal lost
        lost = (given == dark).flatten(1).all(1)
        return embed(given)

    def read(tokens: torch.Tensor) -> torch.Tensor:
        return readout(tokens) * torch.where(lost, torch.nan, 1.0)[:, None]

    monkeypatch.setattr(vit, "embed", embedded)
    monkeypatch.setattr(vit, "readout", read)
    words = ("black.png': the map of image 0 by fullgrad-plus.libra is not finite: the model's logits", "1 of 3 images")
    command("explain", str(photos), "--out", f"{tmp_path / 'out'}/", "--target", "cat", code=3, says=words)
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"a.png", "c.png"}
