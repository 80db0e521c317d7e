"""Odd files: images that are something else, attributions damaged or half replaced, names that are no text."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import patchlight as pl
from patchlight.core.images import open_image, open_mask
from tests.families import build, images, shared
from tests.strangers.table import command, refuses, row

LABELS = ["cat", "dog", "bird", "fish", "frog", "ship", "tree"]


@contextmanager
def tiny_model() -> Iterator[pl.Anatomy]:
    """A small model in place of the one that the command line would load."""
    vit = build("vit")
    vit.labels = LABELS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("patchlight.anatomy.load.load", lambda *_, **__: vit)
        yield vit


def saved(folder: Path, **how: Any) -> Path:
    vit = shared("vit")
    return pl.explain(vit, images(vit), "ixg", **how).save(folder)


def changed(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite the JSON of an attribution."""
    path = folder / "attribution.json"
    about = json.loads(path.read_text())
    change(about)
    path.write_text(json.dumps(about))


def with_tensors(folder: Path, **tensors: torch.Tensor) -> None:
    from safetensors.torch import load_file, save_file

    path = next(folder.glob("scores*.safetensors"))
    save_file({k: v for k, v in {**load_file(path), **tensors}.items() if v.numel()}, path)


def header(path: Path, shape: list[int], size: int, kind: str = "F32") -> None:
    """A safetensors file that declares scores of this shape, and is so many bytes long without holding them."""
    end = {"F32": 4, "F8_E8M0": 1}[kind] * torch.Size(shape).numel()
    tensors = {
        "scores": {"dtype": kind, "shape": shape, "data_offsets": [0, end]},
        "target": {"dtype": "I64", "shape": [1], "data_offsets": [end, end + 8]},
    }
    text = json.dumps(tensors).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(size or 8 + len(text) + end + 8)


# Attributions


@row
def attributions_of_absurd_size(folder: Path) -> None:
    changed(saved(folder / "shown"), lambda about: about.update(image_size=[200_000, 200_000]))
    refuses(lambda: pl.Attribution.load(folder / "shown"), "shown' is damaged: ", "200000")
    changed(saved(folder / "cut"), lambda about: about["preprocess"].update(crop_pct=1e-9))
    refuses(lambda: pl.Attribution.load(folder / "cut"), "cut' is damaged: ", "cannot be made")
    for name, size in (("lies", 4096), ("sparse", 0)):
        header(saved(folder / name) / "scores.safetensors", [1, 200_000, 200_000], size)
        refuses(lambda name=name: pl.Attribution.load(folder / name), f"{name}' is damaged: ")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sysconf", lambda name: {"SC_PHYS_PAGES": 8, "SC_PAGE_SIZE": 8}[name])
        refuses(lambda: pl.Attribution.load(saved(folder / "large")), "large' is damaged: ", "of memory")


@row
def attributions_with_a_json_that_is_none(folder: Path) -> None:
    place = saved(folder / "kept")
    for text in (b"null", b"[]", b"3", b"", b"{", b"\xff\xfe{}", b"[" * 100_000, b'{"format": 1}'):
        (place / "attribution.json").write_bytes(text)
        refuses(lambda: pl.Attribution.load(place), "kept' is damaged: attribution.json")


@row
def attributions_with_keys_that_do_not_belong(folder: Path) -> None:
    def without(key: str) -> Callable[[dict[str, Any]], object]:
        return lambda about: about.pop(key)

    def having(**values: Any) -> Callable[[dict[str, Any]], object]:
        return lambda about: about.update(values)

    for n, change in enumerate(
        (
            without("format"),
            without("method"),
            without("image_size"),
            having(format=99),
            having(colour="red"),
            having(method=3),
            having(method=None),
            having(image_size="64x64"),
            having(image_size=[64]),
            having(image_size=[64, 0]),
            having(image_size=[64, 6.5]),
            having(image_size=[32, 32]),
            having(extent=[0, 64]),
            having(extent=[200_000, 200_000]),
            having(labels="cat"),
            having(labels=[1, 2, 3]),
            having(labels=["cat"]),
            having(against_labels=["cat"]),
            having(level="patch"),
            having(settings=[]),
            having(settings=None),
            having(seed="0"),
            having(seed=True),
            having(versions={"torch": 2}),
            having(preprocess=[]),
            having(preprocess={}),
            having(preprocess={"size": [64, 64], "colour": "red"}),
            having(preprocess={"size": [64, 64], "mean": [0.5], "std": [0.0]}),
            having(preprocess={"size": [64, 64], "mean": [float("nan")], "std": [1.0]}),
            having(preprocess={"size": [64, 64], "fit": "stretch"}),
            having(tensors="../../secret.safetensors"),
        )
    ):
        place = saved(folder / f"{n}")
        changed(place, change)
        refuses(lambda place=place: pl.Attribution.load(place), f"{n}' is damaged: ")
    assert pl.Attribution.load(saved(folder / "sound")).seed == 0


@row
def attributions_with_tensors_that_do_not_fit(folder: Path) -> None:
    scores, gone = torch.rand(3, 4, 4), torch.empty(0)
    for n, tensors in enumerate(
        (
            {"scores": torch.rand(2, 4, 4)},
            {"scores": torch.rand(4, 4)},
            {"scores": torch.rand(3, 2, 4, 4)},
            {"scores": scores.long()},
            {"scores": scores.where(scores < 0.9, torch.nan).index_fill(0, torch.tensor([1]), torch.inf)},
            {"scores": gone},
            {"target": gone},
            {"target": torch.tensor([0, -1, 2])},
            {"target": torch.tensor([0.0, 1.0, 2.0])},
            {"target": torch.tensor([[0], [1], [2]])},
            {"against": torch.tensor([0, 1])},
            {"against": torch.tensor([0, 1, -2])},
            {"weights": torch.rand(3)},
        )
    ):
        place = saved(folder / f"{n}")
        with_tensors(place, **tensors)
        refuses(lambda place=place: pl.Attribution.load(place), f"{n}' is damaged: ")
    header(saved(folder / "bytes") / "scores.safetensors", [1, 4, 4], 0, "F8_E8M0")
    refuses(lambda: pl.Attribution.load(folder / "bytes"), "bytes' is damaged: 'F8_E8M0'")
    (folder / "file").write_text("")
    refuses(lambda: pl.Attribution.load(folder / "file"), "cannot be read: Not a directory")


class Killed(BaseException):
    """The process is gone: nothing after this happens."""


@row
def an_attribution_is_there_whenever_its_replacement_is_killed(folder: Path) -> None:
    old, new = (
        pl.Attribution(torch.full((1, 2, 2), v), torch.tensor([int(v)]), str(v), "m", (8, 8)) for v in (1.0, 2.0)
    )
    seen: set[str] = set()
    for step in range(40):
        place = old.save(folder / f"{step}")
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


# Images


EPS = b"""%!PS-Adobe-3.0 EPSF-3.0
%%BoundingBox: 0 0 10 10
%%EndComments
0 0 10 10 rectfill
showpage
"""


@row
def pictures_that_are_programs(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_, **__: pytest.fail("Ghostscript was to run"))
        (folder / "eps.png").write_bytes(EPS)
        (folder / "pdf.jpg").write_bytes(b"%PDF-1.4\n%\xe2\xe3\xcf\xd3\n")
        (folder / "wmf.bmp").write_bytes(b"\xd7\xcd\xc6\x9a\x00\x00" + bytes(40))
        Image.new("RGB", (8, 8)).save(folder / "icon.png", format="ICO")
        for name in ("eps.png", "pdf.jpg", "wmf.bmp", "icon.png"):
            for opened in (open_image, open_mask):
                refuses(
                    lambda name=name, opened=opened: opened(folder / name),
                    f"{name}' is not an image that can be read",
                    "none of JPEG, PNG",
                )
    for kind in ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM"):
        Image.new("RGB", (8, 8), "red").save(folder / "named.wrongly", format=kind)
        assert open_image(folder / "named.wrongly").size == (8, 8)


# The command line


@row
def names_that_are_no_text(folder: Path) -> None:
    photos = folder / "photos"
    photos.mkdir()
    odd, broken = os.fsdecode(b"caf\xe9.png"), os.fsdecode(b"\xff\xfe.png")
    Image.effect_noise((60, 60), 60).save(photos / "plain.png")
    Image.effect_noise((60, 60), 60).convert("RGB").save(photos / odd)
    (photos / broken).write_bytes(b"no image")
    out, maps = folder / "out", folder / "maps"
    with tiny_model():
        told = command(
            "explain", str(photos), "--out", f"{out}/", "--save", str(maps), code=3, says=("plain.png", "1 of 3 images")
        )
        assert "caf\\udce9.png" in told
        again = command("explain", str(photos), "--out", f"{out}/", "--force", "--json", code=3)
        about, _ = json.JSONDecoder().raw_decode(again, again.index("{"))
        alone = command("explain", str(photos / odd), "--out", str(folder / "one.png"))
        measured = ("evaluate", str(maps), "--images", str(photos), "--metric", "sparseness")
        command(*measured, "--csv", str(folder / "found.csv"))
        assert "caf\\udce9.png" in command(*measured, "--json")
    assert {Path(one["path"]).name for one in about["images"]} == {"plain.png", odd}
    assert [Path(one["path"]).name for one in about["errors"]] == [broken]
    assert (out / odd).is_file()
    assert len(pl.Attribution.load(maps / odd[:-4] / "genatt")) == 1
    assert "one.png" in alone
    assert b"caf\xe9.png,genatt" in (folder / "found.csv").read_bytes()


@row
def a_contrast_at_the_command_line(folder: Path) -> None:
    Image.effect_noise((60, 60), 60).save(folder / "a.png")
    asked = ("explain", str(folder / "a.png"), "--target", "cat", "--against", "dog", "--method", "ixg")
    with tiny_model():
        command(*asked, "--out", str(folder / "b.png"), "--save", str(folder / "maps"), says=("cat against dog",))
        told = command(*asked, "--out", str(folder / "c.png"), "--json")
    (image,) = json.loads(told)["images"]
    assert image["target"]["label"] == "cat"
    assert image["against"] == {"index": 1, "label": "dog"}
    assert pl.Attribution.load(folder / "maps" / "a" / "ixg").named == ("cat against dog",)


@row
def a_run_goes_on_past_a_map_that_is_not_finite(folder: Path) -> None:
    photos = folder / "photos"
    photos.mkdir()
    for name, level in (("a.png", 40), ("black.png", 0), ("c.png", 90)):
        Image.new("RGB", (64, 64), (level, 2 * level, 90)).save(photos / name)
    with tiny_model() as vit:
        dark = vit.batch(photos / "black.png")[0]
        readout, embed = vit.readout, vit.embed
        lost = torch.zeros(0, dtype=torch.bool)

        def embedded(given: torch.Tensor) -> torch.Tensor:
            nonlocal lost
            lost = (given == dark).flatten(1).all(1)
            return embed(given)

        def read(tokens: torch.Tensor) -> torch.Tensor:
            return readout(tokens) * torch.where(lost, torch.nan, 1.0)[:, None]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(vit, "embed", embedded)
            patch.setattr(vit, "readout", read)
            command(
                "explain",
                str(photos),
                "--out",
                f"{folder / 'out'}/",
                "--target",
                "cat",
                code=3,
                says=("black.png': the map of image 0 by genatt is not finite: the model's logits", "1 of 3 images"),
            )
    assert {p.name for p in (folder / "out").iterdir()} == {"a.png", "c.png"}
