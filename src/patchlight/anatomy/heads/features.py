"""Heads turn the features of an image into logits, so they define what the classes are.

The model's classifier is one. `load` and `wrap` take another as `head=`, and every method and metric then works on its
classes: sentences (`Texts`), reference images (`Similar`), groups of them (`Prototypes`), your weights (`Linear`), or
channels and directions inside the model (`Neurons`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from patchlight.anatomy.contract import Affine, Pooling
from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import PatchlightError, integer
from patchlight.core.fingerprints import fingerprint, hash_images, hash_tensor
from patchlight.core.targets import Outputs

Pool = Literal["avg", "cls", "max"]


class Head(ABC):
    """From features [B,E] to logits [B,C].

    `labels` name the classes; `outputs` defines how logits are read. A head with a `block` reads the tokens [B,N,D]
    that enter this block instead of the features; its `pooling` is how it reads them.
    """

    labels: Sequence[str] = ()
    outputs: Outputs = Outputs()
    block: int | None = None
    pooling: Pooling | None = None

    @abstractmethod
    def bound(self, vit: Anatomy) -> Self:
        """The head for a model: computes what it needs from the model, and refuses what does not fit."""

    @abstractmethod
    def __call__(self, features: Tensor) -> Tensor:
        """The logits [B,C]."""

    @abstractmethod
    def about(self) -> dict[str, Any]:
        """A description of the head, saved with results."""

    def linear(self) -> Affine | None:
        """The linear map of the head; None if it is not linear."""
        return None

    def itself(self, hashes: Sequence[str], index: Tensor) -> list[int]:
        """Which of the images with these hashes are compared with themselves by one of their classes `index` [B,T]."""
        return []

    def read_row(self, tokens: Tensor, index: Tensor) -> Tensor:
        """The weight [B,N] with which the class `index` [B] reads each token that enters the block."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {', '.join(self.labels[:3])}{', …' if len(self.labels) > 3 else ''}>"


class DeviceTensor:
    """A tensor with a cached copy for each device and type."""

    def __init__(self, values: Tensor) -> None:
        with torch.inference_mode(False):  # cached tensors must allow gradients
            self.values = values.detach().clone()
        self._made: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def like(self, other: Tensor) -> Tensor:
        key = (other.device, other.dtype)
        if key not in self._made:
            with torch.inference_mode(False):
                self._made[key] = self.values.to(other)
        return self._made[key]

    def __getstate__(self) -> dict[str, Any]:
        return {"values": self.values, "_made": {}}


class Linear(Head):
    """A linear classifier: logits = features W^T + b, W [C,E].

    Args:
        weight: W [C,E], one row per class.
        bias: b [C]; None: no bias.
        labels: Names of the classes.
        sigmoid: Whether each class is an independent yes or no; a single class always is.
        regression: Whether the outputs are numbers.
    """

    def __init__(
        self,
        weight: Any,
        bias: Any = None,
        labels: Sequence[str] | None = None,
        sigmoid: bool = False,
        regression: bool = False,
    ) -> None:
        if sigmoid and regression:
            raise PatchlightError(
                "give sigmoid=True (each output is a yes or no) or regression=True (each output is a number), not both"
            )
        matrix = _matrix(weight, "weight")
        offset = torch.zeros(len(matrix)) if bias is None else _vector(bias, len(matrix), "bias")
        self._weight, self._bias = DeviceTensor(matrix), DeviceTensor(offset.to(matrix))
        self.outputs = Outputs("none" if regression else "sigmoid" if sigmoid or len(matrix) == 1 else "softmax")
        self.labels = _check_labels(labels, len(matrix), "output" if regression else "class")

    def bound(self, vit: Anatomy) -> Self:
        _check_width(self._weight.values, vit, "weight")
        return self

    def __call__(self, features: Tensor) -> Tensor:
        return F.linear(features, self._weight.like(features), self._bias.like(features))

    def linear(self) -> Affine:
        return Affine(self._weight.values, self._bias.values)

    def about(self) -> dict[str, Any]:
        both = torch.cat([self._weight.values, self._bias.values[:, None]], 1)
        return {"head": "Linear", "labels": list(self.labels), "kind": self.outputs.kind, "weights": hash_tensor(both)}


class CosineHead(Head):
    """Logits are scale * cosine(features, row) + bias: the base of all heads that compare."""

    _rows: DeviceTensor | None = None
    _weights = ""
    """The hash of the weights that computed the rows, if a model did."""

    def __call__(self, features: Tensor) -> Tensor:
        scale, bias = self.outputs.scale, self.outputs.bias
        assert scale is not None
        return scale * self.cosines(features) + bias

    def cosines(self, features: Tensor) -> Tensor:
        """The cosine [B,C] of features with the row of each class."""
        assert self._rows is not None, "bound gives a head its rows"
        return F.linear(F.normalize(features, dim=-1), self._rows.like(features))

    def _with(self, rows: Tensor, vit: Anatomy, what: str) -> Self:
        _check_width(rows, vit, what)
        head = copy(self)
        head._rows, head._weights = DeviceTensor(_unit(rows, what)), fingerprint(vit.model)
        return head

    def _hash(self) -> str:
        return "" if self._rows is None else hash_tensor(self._rows.values)


class Texts(CosineHead):
    """The classes are sentences: what in the image supports each.

    Logits use the model's scale and bias. Probabilities are a softmax over the sentences given (CLIP), or one sigmoid
    each (SigLIP).

    Args:
        texts: Sentences for the model's text encoder, or their embeddings [T,E].
        labels: Names of the classes; None: the sentences.
        template: Text around each sentence, such as "a photo of a {}"; the normalised embeddings of several templates
            are averaged.
    """

    def __init__(self, texts: Any, labels: Sequence[str] | None = None, template: str | Sequence[str] = "{}") -> None:
        texts = texts.tolist() if isinstance(texts, np.ndarray) and texts.dtype.kind in "OSU" else texts
        self._templates = [template] if isinstance(template, str) else list(template)
        if not self._templates or any("{}" not in each for each in self._templates):
            raise PatchlightError(f"template {template!r} has no placeholder for the text; add {{}}, as in 'a {{}}'")
        self._sentences: list[str] | None = None
        self._given: Tensor | None = None
        if isinstance(texts, str):
            texts = [texts]
        if isinstance(texts, Sequence) and all(isinstance(text, str) for text in texts):
            self._sentences = _sentences(texts)
            self.labels = _check_labels(labels or self._sentences, len(texts), "text")
        elif isinstance(texts, Sequence) and any(isinstance(text, str) for text in texts):
            other = next(type(text).__name__ for text in texts if not isinstance(text, str))
            raise PatchlightError(f"texts contain a {other}; give sentences, or a tensor of embeddings [T,E]")
        else:
            if self._templates != ["{}"]:
                raise PatchlightError("template applies to sentences, but embeddings were given; leave it out")
            self._given = _unit(_matrix(texts, "texts"), "texts")
            self.labels = _check_labels(labels, len(self._given), "text")

    def bound(self, vit: Anatomy) -> Self:
        if self._given is not None:
            head = self._with(self._given, vit, "texts")
        else:
            assert self._sentences is not None
            prompts = [each.replace("{}", text) for text in self._sentences for each in self._templates]
            with torch.no_grad():
                embeddings = F.normalize(vit.encode_texts(prompts), dim=-1)
            head = self._with(embeddings.unflatten(0, (-1, len(self._templates))).mean(1), vit, "texts")
        head.outputs = vit.text_outputs()
        return head

    def about(self) -> dict[str, Any]:
        about: dict[str, Any] = {"head": "Texts", "labels": list(self.labels), "kind": self.outputs.kind}
        about |= {"scale": _rounded(self.outputs.scale), "bias": _rounded(self.outputs.bias)}
        if self._sentences is None:
            return {**about, "embeddings": self._hash()}
        return {**about, "texts": self._sentences, "templates": self._templates, "weights": self._weights}


class Similar(CosineHead):
    """The classes are reference images: what in the image makes it similar to each, by the cosine of their features.

    Do not explain a reference image itself: its similarity to itself is at the maximum and has no gradient. The
    features are computed once, when the head is bound; bind it again after further training.
    """

    outputs = Outputs("cosine", 1.0)

    def __init__(self, images: Any, labels: Sequence[str] | None = None) -> None:
        single = isinstance(images, str | Path) or not isinstance(images, Tensor | Sequence)
        single = single or (isinstance(images, Tensor) and images.ndim == 3)
        self._images = [images] if single else images
        if len(self._images) == 0:
            raise PatchlightError("Similar has no reference images; give at least one")
        names = _stems(self._images)
        self.labels = _check_labels(labels or names, len(names), "reference")
        self._seen: tuple[str, ...] = ()

    def bound(self, vit: Anatomy) -> Self:
        batch = vit.batch(self._images)
        head = self._with(vit.features_of(batch), vit, "references")
        head._seen = hash_images(batch)
        return head

    def about(self) -> dict[str, Any]:
        return {"head": "Similar", "labels": list(self.labels), "images": list(self._seen), "weights": self._weights}

    def itself(self, hashes: Sequence[str], index: Tensor) -> list[int]:
        asked = zip(hashes, index.tolist(), strict=True)
        return [i for i, (each, classes) in enumerate(asked) if any(self._seen[c] == each for c in classes)]


class Prototypes(CosineHead):
    """The classes are groups of reference features [n,E], each with one of `labels`.

    A class is the mean of its normalised features; with `neighbours`, its cosine is the mean over that many nearest
    features. `Anatomy.features_of` computes the features of images.
    """

    outputs = Outputs("cosine", 1.0)

    def __init__(self, features: Any, labels: Sequence[Any], neighbours: int | None = None) -> None:
        rows = _unit(_matrix(features, "features"), "features")
        owners = [str(label) for label in (labels.tolist() if hasattr(labels, "tolist") else labels)]
        if len(owners) != len(rows):
            raise PatchlightError(f"{len(owners)} labels were given for {len(rows)} features; give one for each")
        self.labels = list(dict.fromkeys(owners))
        self._neighbours = neighbours if neighbours is None else integer("neighbours", neighbours, 1)
        self._members = [torch.tensor([i for i, o in enumerate(owners) if o == name]) for name in self.labels]
        means = [rows[members].mean(0) for members in self._members]
        self._rows = DeviceTensor(rows if neighbours is not None else F.normalize(torch.stack(means), dim=-1))

    def bound(self, vit: Anatomy) -> Self:
        assert self._rows is not None
        _check_width(self._rows.values, vit, "features")
        return self

    def cosines(self, features: Tensor) -> Tensor:
        each = super().cosines(features)
        if self._neighbours is None:
            return each
        nearest = [
            each[:, members.to(each.device)].topk(min(self._neighbours, len(members)), 1).values.mean(1)
            for members in self._members
        ]
        return torch.stack(nearest, 1)

    def about(self) -> dict[str, Any]:
        about = {"head": "Prototypes", "labels": list(self.labels), "neighbours": self._neighbours}
        return {**about, "features": self._hash()}


class Neurons(Head):
    """The outputs are channels, or directions, of the tokens that enter a block: what activates them.

        s = pool_i <w, x_i - center> + bias

    w is a unit vector for each of `channels`, or a row of `directions` [C,D] (for example, the encoder rows of a sparse
    autoencoder, before the activation). Blocks are counted from 0; `block` = the number of blocks reads the output of
    the last one. In a hierarchical model it reads the output of the block before, before patches are merged. `pool` is
    "avg" or "max" over the patches, or "cls". The model then ends there: methods use the blocks before.
    """

    outputs = Outputs("none")

    def __init__(
        self,
        block: int,
        channels: Sequence[int] | None = None,
        directions: Any = None,
        pool: Pool = "avg",
        center: Any = None,
        bias: Any = None,
        labels: Sequence[str] | None = None,
    ) -> None:
        if (channels is None) == (directions is None):
            raise PatchlightError("Neurons reads either channels=[…] or directions=W of a block; give one of the two")
        if pool not in ("avg", "cls", "max"):
            raise PatchlightError(f"pool is {pool!r}; give 'avg', 'cls' or 'max'")
        self.block, self.pool, self.pooling = integer("block", block, 1), pool, pool
        self._channels = None if channels is None else [integer("channel", c, 0) for c in channels]
        if self._channels == []:
            raise PatchlightError("Neurons has no channels; give at least one")
        self._center = None if center is None else DeviceTensor(_vector(center, None, "center"))
        self._rows = None if directions is None else DeviceTensor(_matrix(directions, "directions"))
        count = len(self._channels) if self._rows is None else len(self._rows.values)  # type: ignore[arg-type]
        self._bias = DeviceTensor(torch.zeros(count) if bias is None else _vector(bias, count, "bias"))
        word = "direction" if self._channels is None else "channel"
        own = [f"{word} {c} of block {block}" for c in self._channels or range(count)]
        self.labels = _check_labels(labels or own, count, "neuron")
        self._prefix = 0

    def bound(self, vit: Anatomy) -> Self:
        assert self.block is not None
        if vit.depth == 0:
            raise PatchlightError(
                f"{vit.name} is opened as a feature map with no blocks, so Neurons has no tokens to read"
            )
        if not 1 <= self.block <= vit.depth:
            raise PatchlightError(
                f"the input of block {self.block} does not exist or cannot be explained; {vit.name} has 1 to "
                f"{vit.depth}"
            )
        if self.pool == "cls" and vit.prefix == 0:
            raise PatchlightError(f"{vit.name} has no CLS token; pool 'avg' and 'max' work")
        head, width = copy(self), vit.width_of(self.block - 1)
        head._prefix = vit.prefix
        if self._channels is not None:
            wrong = next((c for c in self._channels if not 0 <= c < width), None)
            if wrong is not None:
                raise PatchlightError(f"there is no channel {wrong}; the tokens of {vit.name} have 0 to {width - 1}")
            head._rows = DeviceTensor(torch.eye(width)[self._channels])  # exact in any type
        assert head._rows is not None
        for what, tensor in (("directions", head._rows), ("center", self._center)):
            if tensor is not None and tensor.values.shape[-1] != width:
                raise PatchlightError(
                    f"{what} has width {tensor.values.shape[-1]}, and the tokens of {vit.name} {width}"
                )
        return head

    def __call__(self, features: Tensor) -> Tensor:
        if self.pool == "max":
            return self._fire(features[:, self._prefix :]).amax(1)
        return self._fire(features[:, 0] if self.pool == "cls" else features[:, self._prefix :].mean(1))

    def _fire(self, tokens: Tensor) -> Tensor:
        assert self._rows is not None, "bound gives a head its rows"
        tokens = tokens if self._center is None else tokens - self._center.like(tokens)
        return F.linear(tokens, self._rows.like(tokens), self._bias.like(tokens))

    def read_row(self, tokens: Tensor, index: Tensor) -> Tensor:
        row = tokens.new_zeros(tokens.shape[:2])
        if self.pool == "cls":
            row[:, 0] = 1
        elif self.pool == "avg":
            row[:, self._prefix :] = 1 / (tokens.shape[1] - self._prefix)
        else:
            largest = self._fire(tokens[:, self._prefix :]).argmax(1)
            row.scatter_(1, largest.gather(1, index[:, None]) + self._prefix, 1.0)
        return row

    def about(self) -> dict[str, Any]:
        assert self._rows is not None
        about: dict[str, Any] = {"head": "Neurons", "block": self.block, "pool": self.pool, "labels": list(self.labels)}
        about |= {"channels": self._channels, "directions": hash_tensor(self._rows.values)}
        about |= {"center": None if self._center is None else hash_tensor(self._center.values)}
        return {**about, "bias": hash_tensor(self._bias.values)}


def head_of(
    texts: Sequence[str] = (), template: str | Sequence[str] = "{}", similar_to: Sequence[str | Path] = ()
) -> Head | None:
    """The head for sentences or reference images; None if there are neither."""
    if texts and similar_to:
        raise PatchlightError("classes are sentences (texts) or images (similar_to); give one of the two")
    if similar_to:
        return Similar(list(similar_to))
    return Texts(list(texts), template=template) if texts else None


def _matrix(values: Any, what: str) -> Tensor:
    kind, shape = "a tensor or array [classes, width]", "one row for each class, [classes, width]"
    return _numbers(values, what, kind, shape, lambda found: found.ndim == 2 and 0 not in found.shape)


def _vector(values: Any, count: int | None, what: str) -> Tensor:
    kind, shape = "a tensor or list of numbers", f"[{'width' if count is None else count}]"
    return _numbers(values, what, kind, shape, lambda found: found.ndim == 1 and count in (None, len(found)))


def _numbers(values: Any, what: str, kind: str, shape: str, fits: Callable[[Tensor], bool]) -> Tensor:
    """Finite floating-point numbers of the expected shape."""
    try:
        numbers = torch.as_tensor(values).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise PatchlightError(f"{what} is a {type(values).__name__}; give {kind}") from error
    if not fits(numbers):
        raise PatchlightError(f"{what} has shape {list(numbers.shape)}; give {shape}")
    numbers = numbers if numbers.is_floating_point() else numbers.float()
    if not bool(numbers.isfinite().all()):
        raise PatchlightError(f"{what} contains NaN or infinity")
    return numbers


def _unit(rows: Tensor, what: str) -> Tensor:
    """Rows of length 1; rows of length 0 are refused."""
    flat = (rows == 0).all(1).nonzero().flatten().tolist()
    if flat:
        raise PatchlightError(f"row {flat[0]} of {what} is zero, so it has no direction to compare with")
    return F.normalize(rows, dim=-1)


def _sentences(texts: Sequence[str]) -> list[str]:
    if not texts:
        raise PatchlightError("Texts has no sentences; give at least one")
    empty = next((i for i, text in enumerate(texts) if not text.strip()), None)
    if empty is not None:
        raise PatchlightError(f"text {empty} is empty; give a word or a sentence")
    return list(texts)


def _check_labels(labels: Sequence[str] | None, count: int, word: str) -> list[str]:
    if labels is None:
        return [f"{word} {i}" for i in range(count)]
    if isinstance(labels, str):
        raise PatchlightError(f"labels are a str, {labels!r}; give a list of names")
    if len(labels) != count:
        raise PatchlightError(f"{len(labels)} labels were given for a head of {count} classes")
    names = [str(label) for label in labels]
    alike = [name.strip().casefold() for name in names]
    twice = next((name for i, name in enumerate(names) if alike[i] in alike[:i]), None)
    if twice is not None:
        raise PatchlightError(f"two classes are called {twice!r}; give each {word} once, or distinct labels")
    return names


def _rounded(number: float | None) -> float | None:
    """A number rounded to six digits, because devices round differently."""
    return None if number is None else float(f"{number:.6g}")


def _stems(images: Any) -> list[str]:
    """Names of reference images: the stem of a file, or the full path where two have the same stem."""
    files = [Path(image) if isinstance(image, str | Path) else None for image in images]
    stems = [f"reference {i}" if file is None else file.stem for i, file in enumerate(files)]
    return [str(file) if file is not None and stems.count(s) > 1 else s for s, file in zip(stems, files, strict=True)]


def _check_width(rows: Tensor, vit: Anatomy, what: str) -> None:
    """Refuse rows whose width is not that of the model's features."""
    width = vit.features_of(torch.zeros(1, *vit.input_shape)).shape[1]
    if rows.shape[1] != width:
        raise PatchlightError(
            f"{what} has rows of width {rows.shape[1]}, and the features of {vit.name} are {width} wide"
        )
