"""Bags of tiles: heads that classify a set of feature vectors [n,E], such as the tiles of a slide.

A bag is a grid of n x 1 cells, and its tiles are the tokens. Removing a tile makes the bag shorter.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from patchlight.anatomy.by_hand import DescribedAnatomy
from patchlight.anatomy.custom import Output, logits_of
from patchlight.anatomy.probe import alike, random_image
from patchlight.anatomy.watching import AttentionTap, current_tap
from patchlight.anatomy.windows import Windows
from patchlight.core.errors import PatchlightError, Unsupported, first_line
from patchlight.core.images import Preprocess

PROBED = 17
"""Tiles of the bag that a head is checked with."""
KEYWORDS = ("embed", "blocks", "readout", "output", "prefix", "pooling", "labels", "name", "sigmoid", "regression")
"""Keywords of `wrap` for a bag head."""
GIVE_BAG = "give the features of its tiles: a tensor or array [n,E], or a .npy, .npz, .pt or .safetensors file"


class Tiles(nn.Module):
    """The block of a head without transformer blocks: each tile attends to itself, so it changes nothing."""

    def forward(self, tokens: Tensor) -> Tensor:
        tap = current_tap()
        if tap is not None and tap.watches:
            count = tokens.shape[1]
            tap.place = Windows(torch.arange(count, device=tokens.device)[:, None])
            torch.softmax(tokens.new_zeros(len(tokens) * count, 1, 1, 1), -1)
            tap.place = None
        return tokens


class BagAnatomy(DescribedAnatomy):
    """A head that takes bags [B,n,E]. Its tokens are the tiles, or what `embed` makes of them.

    A head is run whole, behind one block that changes nothing (`Tiles`), unless `embed`, `blocks` and `readout` say
    where its transformer blocks are. If one softmax over tiles pools them, its weights are the attention that is read.
    """

    library = "bag"
    unordered = True

    def __init__(
        self,
        model: nn.Module,
        *,
        features: int,
        parts: tuple[Callable[[Tensor], Tensor], Sequence[nn.Module], Callable[[Tensor], Tensor]] | None,
        output: Output | None,
        **facts: Any,
    ) -> None:
        self.output, self.pools_only, self._tiles = output, parts is None, Tiles()
        self.reading = "" if output is None else repr(getattr(output, "__code__", output))
        self._form = "batch"
        self._branches = 1
        self._pooling_given = "pooling" in facts
        embed, blocks, readout = parts or (_unchanged, [], _unchanged)
        pooling = "cls" if facts.get("prefix") else "avg"
        size = (PROBED, 1)
        start = {"prefix": 0, "pooling": pooling, "heads": 1, "classes": 1, "name": type(model).__name__}
        facts = {**start, **facts, "grid": size, "preprocess": Preprocess(size, (0.0,), (1.0,)), "channels": features}
        super().__init__(model, embed=embed, blocks=blocks, readout=readout, **facts)

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return [self._tiles] if self.pools_only else super().blocks

    @property
    def castable(self) -> bool:
        return self.pools_only or super().castable

    @property
    def rows_differ(self) -> bool:
        """Whether each class has its own attention over the tiles, as in CLAM."""
        return self._branches == self.classes > 1

    def embed(self, images: Tensor) -> Tensor:
        tiles = images[..., 0].mT
        return tiles if self.pools_only else super().embed(tiles)

    def features(self, tokens: Tensor) -> Tensor:
        with self._showing(tokens):
            return self._logits(tokens) if self.pools_only else super().features(tokens)

    def model_output(self, images: Tensor) -> Tensor:
        return self._logits(images[..., 0].mT)

    def _logits(self, tiles: Tensor) -> Tensor:
        """The logits [B,C] of the model itself for bags [B,n,E], given as it takes them."""
        if self._form == "batch":
            return logits_of(self.net(tiles), len(tiles), self.output, self.name)
        bags = tiles if self._form == "bare" else tiles[:, None]
        return torch.cat([logits_of(self.net(bag), 1, self.output, self.name) for bag in bags])

    def _showing(self, tokens: Tensor) -> contextlib.AbstractContextManager[Any]:
        if self.pooling != "map" or current_tap() is None:
            return contextlib.nullcontext()
        return _TilesLast(len(tokens) if self._form == "batch" else 1, tokens.shape[1])

    def pool_row(
        self, logits: Tensor, pool_attention: Tensor | None, tokens: Tensor | None = None, index: Tensor | None = None
    ) -> Tensor:
        if not self.rows_differ or pool_attention is None or index is None:
            return super().pool_row(logits, pool_attention, tokens, index)
        return pool_attention[torch.arange(len(logits)), index.to(logits.device), 0]

    def check(self) -> None:
        """Find how the head takes bags, how it pools tiles and whether their order matters; then check its parts."""
        if self.bare is None:
            with torch.inference_mode(False), torch.no_grad(), self.steady():
                tiles = torch.cat([random_image(self), random_image(self).flip(1)])[..., 0].mT
                self._form = self._find_form(tiles)
                self.can_drop = self._find_order(tiles)
                if self.pools_only:
                    self.can_attend = self._find_pooling(tiles[:1])
        super().check()

    def _find_form(self, tiles: Tensor) -> str:
        """How the head takes bags: several [B,n,E], one [n,E] ("bare") or one [1,n,E] ("one")."""
        errors: list[str] = []
        for self._form in ("batch", "bare", "one"):
            try:
                both, alone = self._logits(tiles), torch.cat([self._logits(bag[None]) for bag in tiles])
            except Exception as error:  # a user's head may fail in any way
                errors.append(first_line(error))
                continue
            if alike(both, alone):
                return self._form
            errors.append("a bag has different logits alone and in a batch")
        raise PatchlightError(
            f"{self.name} does not accept bags [B,n,E] of tiles with {self.channels} features: {errors[0]}; set bag= "
            "to the number of features per tile, and select the logits with output= if it returns more"
        )

    def _find_order(self, tiles: Tensor) -> str | None:
        """Why tiles cannot be left out: their order matters, or their number is fixed; None if they can."""
        try:
            self._logits(tiles[:, :-2])
        except Exception as error:
            return f"its head takes exactly {PROBED} tiles ({first_line(error)})"
        if alike(self._logits(tiles), self._logits(tiles.roll(5, 1))):
            return None
        return "its output depends on the order of the tiles, so tiles cannot be removed; unit='patch' fills them"

    def _find_pooling(self, tiles: Tensor) -> str | None:
        """Find the softmax that pools tiles; returns why its weights cannot be read, or None."""
        given, self._branches, tap = self.pooling, 1, AttentionTap()
        self.pooling = "map"
        try:
            with tap:
                self.classified(tiles)
            found = tap.matrix
        except Unsupported:
            found = None
        count = tiles.shape[1]
        if self._form == "batch" and found is not None and found.shape[-2:] == (1, count) and found.shape[1] < count:
            self._branches = found.shape[1]
            return None
        self.pooling = given if self._pooling_given else "avg"
        if self._form != "batch":
            return "its forward accepts one bag at a time; change it to accept a batch of bags [B,n,E]"
        return "it has no single softmax over tiles; if it has transformer blocks, give embed, blocks and readout"

    def fit(self, images: Any) -> tuple[Self, Tensor]:
        bags = self._read(images)
        return self.sized(bags.shape[2]), bags

    def sized(self, tiles: int) -> Self:
        """The same head for bags of another number of tiles."""
        if tiles == self.grid[0]:
            return self
        return self.resized((tiles, 1), (tiles, 1), None if self.bare is None else self.bare.sized(tiles))

    def batch(self, images: Any) -> Tensor:
        self.renew()
        return self.place(self._read(images))

    def _read(self, images: Any) -> Tensor:
        """Bags [B,E,n,1] of what a user gives."""
        if isinstance(images, Tensor) and images.ndim == 4:  # read already
            return images
        if isinstance(images, list | tuple):
            bags = [self._read_bag(bag) for bag in images]
            sizes = list(dict.fromkeys(len(bag) for bag in bags))
            if len(sizes) > 1:
                raise PatchlightError(
                    f"the bags have {sizes[0]} and {sizes[1]} tiles; give bags of one length at a time"
                )
            if not bags:
                raise PatchlightError(f"no bag was given; {GIVE_BAG}")
            tiles = torch.stack(bags)
        else:
            tiles = self._read_bag(images)
            tiles = tiles if tiles.ndim == 3 else tiles[None]
        return tiles.mT[..., None]

    def _read_bag(self, source: Any) -> Tensor:
        """The features [n,E], or [B,n,E], of a tensor, array or file, checked."""
        bag = read_features(source)
        if bag.ndim not in (2, 3) or bag.shape[-1] != self.channels:
            raise PatchlightError(
                f"the bag has shape {list(bag.shape)}, but {self.name} takes tiles of {self.channels} features: "
                f"[n,{self.channels}]"
            )
        if 0 in bag.shape:
            raise PatchlightError("the bag is empty; give the features of at least one tile")
        if not bool(bag.isfinite().all()):
            raise PatchlightError("the features of the bag contain NaN or infinity")
        blank = (bag == 0).all(-1)
        if bool(blank.any()):
            first = int(blank.reshape(-1, blank.shape[-1]).any(0).nonzero()[0])
            raise PatchlightError(f"tile {first} contains only zeros, which looks like padding; remove padded tiles")
        return bag

    def __repr__(self) -> str:
        return (
            f"<{self.name} ({self.library}): tiles of {self.channels} features, {self.depth} blocks, "
            f"{self.pooling} pooling, {self.classes} classes, {self.device}>"
        )


class _TilesLast(TorchFunctionMode):
    """Inside, the first softmax over the tiles of a head passes the active tap as attention [B,K,1,n]."""

    def __init__(self, bags: int, tiles: int) -> None:
        super().__init__()
        self.bags, self.tiles, self.waiting = bags, tiles, True

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.waiting or getattr(func, "__name__", "") != "softmax":
            return func(*args, **kwargs)
        scores = args[0] if args else kwargs["input"]
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        if dim is None or scores.ndim > 3 or scores.shape[dim] != self.tiles or (self.bags > 1 and dim == 0):
            return func(*args, **kwargs)
        self.waiting = False
        moved = scores.movedim(dim, -1)
        attention = torch.softmax(moved.reshape(self.bags, -1, 1, self.tiles), -1, dtype=kwargs.get("dtype"))
        return attention.view(moved.shape).movedim(-1, dim)


def read_features(source: Any) -> Tensor:
    """A tensor of floats of a tensor, an array or a file; in a file with several arrays, the one called `features`."""
    found: Any = _read_file(Path(source)) if isinstance(source, str | Path) else source
    if isinstance(found, Mapping):
        names = list(found)
        if "features" not in found and len(names) != 1:
            what = f"'{source}'" if isinstance(source, str | Path) else "the bag"
            listed = ", ".join(map(str, names))
            raise PatchlightError(f"{what} contains the arrays {listed}; name the features of the bag 'features'")
        found = found.get("features", found[names[0]])
    try:
        tensor = found if isinstance(found, Tensor) else torch.as_tensor(np.asarray(found))
    except (TypeError, ValueError) as error:
        raise PatchlightError(f"a bag of type {type(source).__name__} cannot be read; {GIVE_BAG}") from error
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_complex() or tensor.is_meta:
        raise PatchlightError("the bag is a sparse, quantised, complex or meta tensor; give a dense, real one")
    return tensor.detach() if tensor.is_floating_point() else tensor.float()


def _read_file(path: Path) -> Any:
    if not os.path.isfile(path):
        raise PatchlightError(f"no bag at '{path}'; {GIVE_BAG}")
    try:
        if path.suffix == ".npy":
            return np.load(path, allow_pickle=False)
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                return dict(arrays)
        if path.suffix == ".pt":
            return torch.load(path, map_location="cpu", weights_only=True)
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
    except Exception as error:  # readers raise all kinds of exceptions for damaged files
        raise PatchlightError(f"'{path}' cannot be read as a bag: {first_line(error)}") from error
    raise PatchlightError(f"'{path}' cannot be read as a bag; {GIVE_BAG}")


def open_bag(model: nn.Module, overrides: Mapping[str, Any]) -> BagAnatomy:
    """The anatomy of a head over bags, from the keywords of `wrap`."""
    features = overrides["bag"]
    if isinstance(features, bool) or not isinstance(features, int) or features < 1:
        raise PatchlightError(f"bag is {features!r}; give the number of features of a tile, such as bag=1024")
    wrong = next((key for key in overrides if key not in ("bag", *KEYWORDS)), None)
    if wrong is not None:
        raise PatchlightError(f"{wrong} does not apply to a bag of tiles")
    rest = dict(overrides)
    del rest["bag"]
    parts = [rest.pop(key, None) for key in ("embed", "blocks", "readout")]
    if any(parts) and None in parts:
        raise PatchlightError("the description of a bag head is incomplete; give embed, blocks and readout")
    return BagAnatomy(
        model,
        features=features,
        parts=cast(Any, tuple(parts)) if any(parts) else None,
        output=rest.pop("output", None),
        **rest,
    )


def _unchanged(tokens: Tensor) -> Tensor:
    return tokens
