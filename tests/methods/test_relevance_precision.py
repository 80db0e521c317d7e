"""Relevance in less than full precision: a float64 forward and a float32 way back, against float64 throughout."""

from __future__ import annotations

import csv
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import patchlight as pl
from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import Cancelled
from patchlight.core.progress import Watcher, watch
from patchlight.methods.base import METHODS, Ask
from patchlight.methods.relevance import Relevance
from patchlight.methods.requests import resolve
from tests.close import close, ranked
from tests.families import images, shared
from tests.literal.plain import maps
from tests.literal.test_relevance import PLAIN, TARGET, ask
from tests.reference import shared_dir

SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("transatt", {}),
    ("transatt", {"rules": "orig"}),
    ("transatt", {"gradient": False}),
    ("partial-lrp", {}),
    ("lrp", {}),
    ("lrp", {"rules": "ours"}),
]


class RoundedProducts(TorchDispatchMode):
    """Inside, factors of float32 products lose the bits that TF32 does not have, as on CUDA; float64 ones do not."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}.get(func._schema.name)
        if first is not None and args[first].dtype == torch.float32:
            self.count += 1
            rounded = [
                (t.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32) for t in args[first : first + 2]
            ]
            args = (*args[:first], *rounded, *args[first + 2 :])
        return func(*args, **(kwargs or {}))


@cache
def real(name: str) -> tuple[Anatomy, Tensor]:
    """A model with its ImageNet weights, and three photographs."""
    data = shared_dir() / "data"
    photos = data / "imagenet-val-1000"
    vit = pl.load(name, weights=data / "weights" / f"{name}_imagenet1k.safetensors")
    with (photos / "boxes.csv").open(newline="") as file:
        chosen = sorted({row["image"] for row in csv.DictReader(file)})[::333][:3]
    return vit, vit.batch([photos / "images" / f"{image}.jpg" for image in chosen])


@pytest.mark.parametrize("family", PLAIN)
def test_tiny_models_get_the_maps_of_full_precision(family: str) -> None:
    """On a CPU "bf16" is float32 here; errors are 4e-6 and less."""
    vit = shared(family)
    for name, settings in SETTINGS:
        full, less = (maps(vit, images(vit), name, TARGET, precision=p, **settings) for p in ("full", "bf16"))
        assert not torch.equal(less, full), "the way back is not in float64"
        for i in range(len(full)):
            close(less[i], full[i], 2e-5, f"{name} {settings}, image {i}")


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit_tiny_patch16_224"])
@pytest.mark.parametrize("method", ["transatt", "partial-lrp", "lrp"])
def test_real_weights_keep_the_order_in_float32(name: str, method: str) -> None:
    vit, batch = real(name)
    full, less = (maps(vit, batch, method, precision=p) for p in ("full", "bf16"))
    for i in range(len(batch)):
        ranked(less[i], full[i], 0.9999, f"image {i}")


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit_tiny_patch16_224"])
@pytest.mark.parametrize("method", ["transatt", "partial-lrp"])
def test_real_weights_keep_the_order_with_rounded_products(name: str, method: str) -> None:
    """What `auto` promises is 0.998. `lrp` does not always hold it, and stays in float64."""
    vit, batch = real(name)
    full = maps(vit, batch, method, precision="full")
    with RoundedProducts() as mode:
        rounded = maps(vit, batch, method, precision="bf16")
    assert mode.count > 0
    for i in range(len(batch)):
        ranked(rounded[i], full[i], 0.9995, f"image {i}")


def test_the_forward_is_float64_and_the_way_back_is_not() -> None:
    given = ask("vit")
    for precision, dtype in (("full", torch.float64), ("tf32", torch.float32), ("bf16", torch.float32)):
        seen = Relevance(given, "ours", precision)  # type: ignore[arg-type]
        logits, _, R, g = seen.start()
        close(logits, given.vit.logits(given.images), 1e-12)
        steps = list(seen.steps(R, g, 0))
        assert {t.dtype for step in steps for t in (step.RA, step.G, step.R)} == {dtype}
        assert not seen.tokens, "nothing of a block is held once it was passed"
        assert not seen.saved


def test_what_the_forward_keeps_is_what_the_notes_say() -> None:
    """60 N D bytes a block and image with an MLP of 4 D, one row behind the last block's attention; none below the
    blocks that are read."""
    given = ask("vit")
    vit = given.vit
    hidden = vit.parts(0).fc1.out_features / vit.width  # type: ignore[union-attr, operator]
    seen = Relevance(given, "ours", "tf32")
    held = {k: sum(t.nbytes for t in inside) for k, inside in seen.saved.items()}
    row = len(given.images) * vit.width
    behind = 4 * (4 + hidden)
    assert held[0] == row * vit.tokens * (28 + behind)
    assert held[vit.depth - 1] == row * (vit.tokens * 28 + behind)
    last = Ask(vit, given.images, given.targets, "logit", 0, given.rule, (vit.depth - 1,))
    assert set(Relevance(last, "orig", "tf32").saved) == {vit.depth - 1}


def test_auto_is_tf32_on_cuda_but_for_lrp() -> None:
    auto = {name: METHODS[name].precision for name in ("lrp", "partial-lrp", "transatt")}
    assert auto == {"lrp": "full", "partial-lrp": "tf32", "transatt": "tf32"}
    assert resolve("transatt").suited(shared("vit")).precision == "full", "on a CPU"


@pytest.mark.parametrize("name", ["lrp", "transatt", "partial-lrp"])
def test_relevance_stops_between_two_blocks(name: str) -> None:
    vit = shared("vit")
    looks: list[int] = []

    def asked(enough: int) -> bool:
        looks.append(len(looks))
        return len(looks) > enough

    with watch(Watcher(cancelled=lambda: asked(10**6))):
        pl.explain(vit, images(vit, 1), name, progress=False)
    assert len(looks) > vit.depth
    for enough in range(len(looks)):
        looks.clear()
        with watch(Watcher(cancelled=lambda enough=enough: asked(enough))), pytest.raises(Cancelled):  # type: ignore[misc]
            pl.explain(vit, images(vit, 1), name, progress=False)
