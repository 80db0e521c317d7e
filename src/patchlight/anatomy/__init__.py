"""The model boundary: `load` a model by name or `wrap` one you have; both give its anatomy."""

from __future__ import annotations

import contextlib
import csv
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from patchlight.anatomy.base import Anatomy, Parts, Pooling, check_finite, modules_of
from patchlight.errors import PatchlightError, nearest
from patchlight.images import Preprocess

__all__ = ["Anatomy", "Parts", "Pooling", "load", "wrap"]


class DescribedAnatomy(Anatomy):
    """A model described by hand: its blocks, and functions for what comes before and after them."""

    library = "described"

    def __init__(
        self,
        model: nn.Module,
        *,
        embed: Callable[[Tensor], Tensor],
        blocks: Sequence[nn.Module],
        readout: Callable[[Tensor], Tensor],
        **about: Any,
    ) -> None:
        self._given = embed, list(blocks), readout
        super().__init__(model, **about)

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return [self._twin.moved(block) for block in self._given[1]]

    @property
    def functions(self) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        """`embed` and `readout` as they were given."""
        return self._given[0], self._given[2]

    def embed(self, images: Tensor) -> Tensor:
        return cast(Tensor, self._twin.moved(self._given[0])(images))

    def block(self, index: int, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        out: Any = self.blocks[index](tokens)
        return cast(Tensor, out[0] if isinstance(out, tuple) else out)

    def readout(self, tokens: Tensor) -> Tensor:
        return cast(Tensor, self._twin.moved(self._given[2])(tokens))

    def whole(self, images: Tensor) -> Any:
        """What the model itself gives, where that is logits at all: its own forward may take, or give, anything."""
        described = self.readout(self.run(self.embed(images)))
        try:
            out: Any = self.net(images)
        except Exception:
            return described
        out = getattr(out, "logits", out)
        return out if isinstance(out, Tensor) and out.shape == described.shape else described

    @property
    def castable(self) -> bool:
        return not any(self._twin.moved(f) is f for f in self.functions)

    @contextlib.contextmanager
    def steady(self) -> Iterator[None]:
        """As ever; but functions that are no methods of the model run the user's own modules.

        Those must be in evaluation mode, which other threads can see: one thread at a time, and only where a module is
        in training mode.
        """
        with super().steady(), contextlib.nullcontext() if self.castable else _evaluating(self.model):
            yield

    def parts(self, index: int) -> Parts:
        block = self.blocks[index]
        return Parts(getattr(block, "norm1", None), getattr(block, "norm2", None))


_LOCKS: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    with _LOCKS.setdefault(model, threading.RLock()):
        training = [m for m in modules_of(model) if m.training]
        for module in training:
            module.training = False
        try:
            yield
        finally:
            for module in training:
                module.training = True


def wrap(model: nn.Module | Anatomy, **about: Any) -> Anatomy:
    """The anatomy of a model you already have: timm, transformers or torchvision.

    A probe is run through the model, whole and in parts, and a model whose forward does more than its parts is refused.
    The model itself is only read: everything runs on a twin over the same weights, in evaluation mode, so the model may
    be trained or used meanwhile. Compiled and DataParallel models are unwrapped.

    `labels` (names, a list or a CSV file), `name`, `preprocess` and `sigmoid` override what is read from the model;
    `stage` (0-based, or negative from the end) is where a hierarchical model is opened, the second-to-last by default.
    A model of another make is described by hand: give `embed`, `blocks`, `readout`, `grid`, `prefix`, `pooling`,
    `heads`, `classes` and `preprocess`. Functions that are methods of the model run on its twin; others run its own
    modules, put into evaluation mode under a lock where they are not in it.
    """
    if isinstance(model, Anatomy):
        return model
    if not isinstance(model, nn.Module):
        raise PatchlightError(f"wrap takes a torch module; {type(model).__name__} was given (load takes names)")
    model = _unwrap(model)
    if "labels" in about:
        about["labels"] = read_labels(about["labels"])
    anatomy = _describe(model, about) if "blocks" in about else _read(model, about)
    check_finite(model, anatomy.name)
    anatomy.check()
    return anatomy


def load(
    name: str,
    weights: str | Path | None = None,
    labels: str | Path | Sequence[str] | None = None,
    device: str | torch.device = "cpu",
    pretrained: bool | None = None,
    **options: Any,
) -> Anatomy:
    """Load a model by name: "pocket", any timm name, "hf:NAME" (hub name or local folder), or "torchvision:NAME".

    `weights` is a safetensors file (or a torch file of plain tensors); the number of classes is read from it. Without
    it the pretrained weights are fetched, where a hub is reachable; `pretrained=False` leaves them random. Further
    options go to the library's own constructor (`img_size=`, `patch_size=`, …); `stage` as in wrap.
    """
    fetch = weights is None if pretrained is None else pretrained
    state = read_weights(Path(weights)) if weights is not None else None
    library, _, rest = name.partition(":") if name.startswith(("hf:", "torchvision:", "timm:")) else ("timm", "", name)
    about: dict[str, Any] = {"name": rest or name}
    if "stage" in options:
        about["stage"] = options.pop("stage")
    if name == "pocket":
        anatomy = _load_pocket(about)
    elif library == "hf":
        anatomy = _load_hf(rest, fetch, options, about)
    elif library == "torchvision":
        anatomy = _load_torchvision(rest, fetch, state, options, about)
    else:
        anatomy = _load_timm(rest, fetch, state, options, about)
    if state is not None:
        _fill(anatomy.model, state, f"'{weights}'", anatomy.name)
    if labels is not None:
        anatomy.labels = read_labels(labels)
        if len(anatomy.labels) != max(anatomy.classes, 2 if anatomy.classes == 1 else 1):
            raise PatchlightError(f"{len(anatomy.labels)} labels for a model with {anatomy.classes} classes")
    anatomy.model.eval().requires_grad_(False)
    check_finite(anatomy.model, anatomy.name)
    try:
        anatomy.model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise PatchlightError(f"device '{device}' cannot be used: {str(error).splitlines()[0]}") from error
    return anatomy


def model_names(pattern: str = "") -> list[str]:
    """The names `load` knows without a prefix: pocket, and timm's plain and hierarchical transformers."""
    import timm

    plain = ("vision_transformer", "deit", "eva", "beit")
    hierarchical = ("swin_transformer", "swin_transformer_v2", "pvt_v2", "twins")
    names = ["pocket", *(n for m in (*plain, *hierarchical) for n in timm.list_models(module=m))]
    wanted = pattern if any(c in pattern for c in "*?[") else f"*{pattern}*"
    from fnmatch import fnmatch

    return sorted({n for n in names if fnmatch(n, wanted)})


def read_labels(labels: str | Path | Sequence[str]) -> list[str]:
    """Class names from a list, a text file (one a line), or a CSV with a column `names`, `name` or `label`."""
    if not isinstance(labels, str | Path):
        return [str(label) for label in labels]
    path = Path(labels)
    if not path.is_file():
        raise PatchlightError(f"no label file at '{path}'")
    if path.suffix.lower() != ".csv":
        return path.read_text(encoding="utf-8").splitlines()
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    column = next((c for c in ("names", "name", "label", "labels") if rows and c in rows[0]), None)
    if column is None:
        raise PatchlightError(f"'{path}' has no column called names, name or label")
    order = next((c for c in ("class_index", "index", "id") if c in rows[0]), None)
    if order is not None:
        rows.sort(key=lambda row: int(row[order]))
    return [row[column] for row in rows]


def read_weights(path: Path) -> dict[str, Tensor]:
    """Tensors by name from a safetensors file, or a torch file read without unpickling code."""
    if not path.is_file():
        raise PatchlightError(f"no weights at '{path}'")
    if path.suffix not in (".safetensors", ".pth", ".pt", ".bin"):
        raise PatchlightError(f"'{path}' cannot be read as weights; give a .safetensors, .pth, .pt or .bin file")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            tensors: dict[str, Tensor] = load_file(path)
            return tensors
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise PatchlightError(
            f"'{path}' cannot be read as weights: it is damaged, or holds more than plain tensors"
        ) from error
    for key in ("state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise PatchlightError(f"'{path}' does not hold plain tensors by name")
    return state


def _unwrap(model: nn.Module) -> nn.Module:
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


def _read(model: nn.Module, about: dict[str, Any]) -> Anatomy:
    from patchlight.anatomy.hf import read_hf, supported
    from patchlight.anatomy.timm import read_timm
    from patchlight.anatomy.torchvision import read_torchvision

    make = type(model).__module__.partition(".")[0]
    readers = {"timm": read_timm, "transformers": read_hf, "torchvision": read_torchvision}
    order = [readers[make]] if make in readers else list(readers.values())
    staged = {"stage": about.pop("stage")} if "stage" in about else {}
    for read in order:
        anatomy = read(model, **about, **(staged if read is read_timm else {}))
        if anatomy is not None:
            if staged and not anatomy.hierarchical:
                raise PatchlightError(f"{anatomy.name} has no stages, so stage={staged['stage']} means nothing for it")
            return anatomy
    raise PatchlightError(
        f"{type(model).__name__} is not a model that can be read by itself; looked for timm's VisionTransformer, Eva, "
        f"Beit, Swin, SwinV2, PVTv2 and Twins, torchvision's VisionTransformer, and transformers' "
        f"{', '.join(supported())}. Describe it by hand: "
        "wrap(model, embed=…, blocks=…, readout=…, grid=(h, w), prefix=1, pooling='cls', heads=…, classes=…, "
        "preprocess=Preprocess((H, W)))"
    )


def _describe(model: nn.Module, about: dict[str, Any]) -> Anatomy:
    wanted = ("embed", "blocks", "readout", "grid", "prefix", "pooling", "heads", "classes")
    missing = [key for key in wanted if key not in about]
    if missing:
        raise PatchlightError(f"to describe a model by hand, also give {', '.join(missing)}")
    about.setdefault("preprocess", Preprocess((224, 224)))
    about.setdefault("name", type(model).__name__)
    return DescribedAnatomy(model, **about)


def _load_pocket(about: dict[str, Any]) -> Anatomy:
    from patchlight.zoo import pocket

    facts = pocket.description()
    preprocess = Preprocess((32, 32), tuple(facts["mean"]), tuple(facts["std"]))
    return wrap(pocket.build(), labels=facts["classes"], preprocess=preprocess, **about)


def _load_timm(
    name: str, fetch: bool, state: dict[str, Tensor] | None, options: dict[str, Any], about: dict[str, Any]
) -> Anatomy:
    import timm

    known = model_names()
    if not timm.is_model(name):
        raise PatchlightError(f"no model is called '{name}'; {nearest(name, known)}")
    if name.partition(".")[0] not in known:
        raise PatchlightError(f"'{name}' is not a Vision Transformer that can be read; {nearest(name, known)}")
    if state is not None and "num_classes" not in options:
        head = state.get("head.weight", state.get("head.fc.weight"))
        if head is not None:
            options = {**options, "num_classes": int(head.shape[0])}
    try:
        model = timm.create_model(name, pretrained=fetch, **options)
    except Exception as error:
        raise PatchlightError(_could_not(name, fetch, error)) from error
    return wrap(model, **about)


def _load_hf(name: str, fetch: bool, options: dict[str, Any], about: dict[str, Any]) -> Anatomy:
    try:
        from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageClassification
    except ImportError as error:
        raise PatchlightError("'hf:' models need the transformers package: pip install patchlight[hf]") from error
    import transformers

    try:
        config = AutoConfig.from_pretrained(name)
        kind = (config.architectures or [""])[0]
        cls: Any = getattr(transformers, kind, None) if kind.startswith("DeiT") else AutoModelForImageClassification
        cls = cls or AutoModelForImageClassification
        model = cls.from_pretrained(name, **options) if fetch else cls.from_config(config, **options)
    except Exception as error:
        raise PatchlightError(_could_not(f"hf:{name}", fetch, error)) from error
    try:
        about["processor"] = AutoImageProcessor.from_pretrained(name)
    except Exception:
        about["processor"] = None
    return wrap(model, **about)


def _load_torchvision(
    name: str, fetch: bool, state: dict[str, Tensor] | None, options: dict[str, Any], about: dict[str, Any]
) -> Anatomy:
    from torchvision import models

    names = [n for n in models.list_models() if n.startswith("vit_")]
    if name not in names:
        raise PatchlightError(f"torchvision has no Vision Transformer called '{name}'; {nearest(name, names)}")
    if state is not None and "num_classes" not in options and "heads.head.weight" in state:
        options = {**options, "num_classes": int(state["heads.head.weight"].shape[0])}
    try:
        model = models.get_model(name, weights="DEFAULT" if fetch else None, **options)
    except Exception as error:
        raise PatchlightError(_could_not(f"torchvision:{name}", fetch, error)) from error
    return wrap(model, **about)


def _could_not(name: str, fetch: bool, error: Exception) -> str:
    first = (str(error).splitlines() or [type(error).__name__])[0]
    hint = "; without a hub give weights=FILE, or pretrained=False for random weights" if fetch else ""
    return f"'{name}' could not be loaded: {first}{hint}"


def _fill(model: nn.Module, state: dict[str, Tensor], source: str, name: str) -> None:
    own = model.state_dict()
    missing = [k for k in own if k not in state]
    extra = [k for k in state if k not in own]
    shapes = [k for k in own if k in state and own[k].shape != state[k].shape]
    if missing or extra or shapes:
        parts = [f"{len(keys)} {word} ({keys[0]})" for word, keys in (("missing", missing), ("extra", extra)) if keys]
        parts += [f"'{k}' is {list(state[k].shape)} but must be {list(own[k].shape)}" for k in shapes[:1]]
        raise PatchlightError(f"weights in {source} do not fit {name}: {'; '.join(parts)}")
    model.load_state_dict(state)
