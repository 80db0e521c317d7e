"""Entry point: `load` a model by name or `wrap` a module; both return its anatomy."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from patchlight.anatomy.bags import open_bag
from patchlight.anatomy.by_hand import DescribedAnatomy
from patchlight.anatomy.custom import CUSTOM, read_custom
from patchlight.anatomy.families import Family, LoadRequest, family_of, in_order, read_anatomy
from patchlight.anatomy.hf import as_processed
from patchlight.anatomy.opened import Anatomy, check_finite
from patchlight.anatomy.parts import find
from patchlight.anatomy.preprocessing import applied, read_preprocess
from patchlight.anatomy.prompts import ANSWERING
from patchlight.anatomy.spec import PreprocessSpec
from patchlight.anatomy.texts import has_text_side
from patchlight.anatomy.weights import fill, read_labels, read_weights, resampled
from patchlight.core.errors import AssumedPreprocess, NoClassifier, PatchlightError, first_line, match_names, nearest
from patchlight.core.images import Preprocess

if TYPE_CHECKING:
    from patchlight.anatomy.heads import Head

_OVERRIDES = ("labels", "name", "preprocess", "processor", "tokenizer", "sigmoid", "regression", "stage", "place")
"""Keywords of `wrap` for a model that it recognises."""
_DESCRIPTION = ("embed", "blocks", "readout", "grid", "prefix", "pooling", "heads", "classes")
"""Keywords of `wrap` for a model described by hand."""
_LAYOUT = ("suffix", "axes", "order", "geometry", "input_shape")
"""Keywords of `wrap` for inputs that are not images, and for tokens in another order; they may be left out."""
_PASSED = ("sigmoid", "regression", "stage", "tokenizer", "place")
"""Keywords of `load` that are passed to `wrap`."""
_LOADING = (
    *("weights", "labels", "device", "pretrained", "preprocess", "head", "texts", "template", "precision"),
    *_PASSED,
)
_TYPES = {"auto": None, "full": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Type of the weights by the `precision` of `load`."""


def wrap(
    model: nn.Module | Anatomy,
    head: Head | None = None,
    texts: Sequence[str] | None = None,
    template: str | Sequence[str] = "{}",
    registers: Any = None,
    **overrides: Any,
) -> Anatomy:
    """Open a model that you already have: timm, transformers, open_clip, torchvision, or your own module.

    A probe runs through the model, whole and in parts; a model whose forward does more than its parts is refused. The
    model itself is only read: everything runs on a twin that shares its weights, in evaluation mode, so the model can
    be trained or used meanwhile. Compiled and DataParallel models are unwrapped.

    A module of yours that runs one of these models inside is opened at the blocks of that backbone; what it does around
    them is its embedding and head. Any other model is described by hand: give `embed`, `blocks`, `readout`, `grid`,
    `prefix`, `pooling`, `heads`, `classes` and `preprocess`. These functions run on the twin, too: copies replace the
    modules that they refer to.

    Args:
        model: A torch module, or an Anatomy that gets another head.
        head: One of `pl.heads`, in place of the model's classifier. A model without a classifier needs one.
        texts: Sentences for an image-text model; short for `head=pl.heads.Texts(texts, template=template)`.
        template: Text around each sentence, such as "a photo of a {}".
        registers: What `pl.find_registers` returns, or MLP neurons by block such as {7: [417]}: they write to one more
            token instead of to the patches, so that outlier tokens disappear. It changes the model a little, so measure
            its maps on the model without. Default: none.
        overrides: Replace values read from the model: `labels` (names, a list or a CSV file), `name`, `preprocess` (a
            `Preprocess`, a dictionary or a JSON or TOML file of some of its fields, or a processor's folder) or
            `processor` (a transformers image processor), `tokenizer` (of transformers or `open_clip.get_tokenizer`; a
            `processor` may contain one), `sigmoid`, `regression=True` (its outputs are numbers), `stage` (0-based, or
            negative from the end: where a hierarchical model is opened). For a module of yours also `output` (a
            function from its output to the logits [B,C]), `input_shape` (of one input that is not an image, with
            `axes`) and, if they differ from the backbone's, `grid`, `prefix`, `channels`, `extent` or `pooling`. For a
            head over bags of tiles [B,n,E], `bag=E`, the number of features of a tile; `explain` then takes bags of
            any number of tiles.
    """
    overrides = {key: value for key, value in overrides.items() if value is not None}
    if isinstance(model, Anatomy):
        if overrides:
            raise PatchlightError(f"{', '.join(overrides)} cannot be given for {model.name}, which is wrapped already")
        return _registered(_with_head(model, head, texts, template), registers)
    _check_own(overrides, head, texts)
    return _registered(_with_head(_wrapped(model, overrides), head, texts, template), registers)


def _registered(anatomy: Anatomy, registers: Any) -> Anatomy:
    """The anatomy with its register neurons moved, if there are some."""
    from patchlight.anatomy.registers import with_registers

    return anatomy if registers is None else with_registers(anatomy, registers)


def _check_own(overrides: Mapping[str, Any], head: Head | None, texts: Sequence[str] | None) -> None:
    """Refuse settings of the model's own classifier when another head is given."""
    own = next((key for key in ("sigmoid", "regression", "labels") if overrides.get(key)), None)
    if own is not None and (head is not None or texts is not None):
        raise PatchlightError(
            f"{own} would be about the model's own classifier, and another head was given; give {own} to the head"
        )


def _with_head(
    anatomy: Anatomy, head: Head | None, texts: Sequence[str] | None, template: str | Sequence[str]
) -> Anatomy:
    """The anatomy with the given head; a model with neither head nor classifier is refused."""
    from patchlight.anatomy.heads import Head, Texts

    if head is not None and texts is not None:
        raise PatchlightError("give head or texts, not both (texts=… means head=pl.heads.Texts(texts))")
    if texts is None and template != "{}":
        raise PatchlightError("template applies to sentences; give texts=[…] too")
    if texts is not None and hasattr(anatomy, "with_texts"):
        return cast(Any, anatomy).with_texts(texts, template)  # type: ignore[no-any-return]
    head = head if texts is None else Texts(texts, template=template)
    if head is None:
        if anatomy.classes == 0 and not anatomy.task:
            raise NoClassifier(
                f"{anatomy.name} has no classifier, so there are no classes to explain; give head= one of pl.heads: "
                "Similar(images), Prototypes(features, labels), Linear(weight, bias, labels), Neurons(block, channels) "
                "or, of an image-text model, Texts(sentences); on the command line --similar-to or --text",
                anatomy,
            )
        return anatomy
    if not isinstance(head, Head):
        raise PatchlightError(f"head is a {type(head).__name__}; give one of pl.heads")
    return anatomy.ask(head)


def _wrapped(model: nn.Module, overrides: dict[str, Any]) -> Anatomy:
    overrides = _check_keywords(overrides)
    if not isinstance(model, nn.Module):
        raise PatchlightError(f"wrap needs a torch module, not {type(model).__name__}; load takes names")
    model = _unwrap(model)
    _check_quantised(model)
    if "processor" in overrides and not any(c.__module__.startswith("transformers.") for c in type(model).__mro__):
        _apply_processor(model, overrides)
    if "tokenizer" in overrides and not has_text_side(model) and type(model).__name__ not in ANSWERING:
        raise PatchlightError(f"{type(model).__name__} has no text encoder, so a tokenizer does not apply")
    if "labels" in overrides:
        overrides["labels"] = read_labels(overrides["labels"])
    if "preprocess" in overrides:
        overrides["preprocess"] = applied(overrides["preprocess"], lambda: _model_preprocess(model, overrides))
    if "bag" in overrides:
        anatomy: Anatomy = open_bag(model, overrides)
    else:
        anatomy = _describe(model, overrides) if "blocks" in overrides else _read(model, overrides)
    if "labels" in overrides and anatomy.classes == 0 and not anatomy.task:
        raise PatchlightError(f"{anatomy.name} has no classes, so labels do not apply; give labels to the head")
    _check_colours(anatomy)
    check_finite(model, anatomy.name)
    anatomy.check()
    return anatomy


def load(
    name: str | nn.Module | Anatomy,
    weights: str | Path | None = None,
    labels: str | Path | Sequence[str] | None = None,
    device: str | torch.device = "cpu",
    pretrained: bool | str | None = None,
    preprocess: Preprocess | Mapping[str, Any] | str | Path | None = None,
    head: Head | None = None,
    texts: Sequence[str] | None = None,
    template: str | Sequence[str] = "{}",
    precision: str = "auto",
    **options: Any,
) -> Anatomy:
    """Load a model by name; for a module you already have, `load` is the same as `wrap`.

    Args:
        name: "pocket", any timm name, "hf:NAME" (hub name or local folder), "open_clip:NAME" (of its list, or a local
            folder), or "torchvision:NAME".
        weights: A safetensors file, or a torch file of plain tensors; the number of classes is read from it. Position
            tables made for another `img_size` are resampled.
        labels: Names of the classes: a list, or a CSV file.
        device: Where the model is placed.
        pretrained: Whether pretrained weights are fetched if `weights` is not given; False leaves them random. A tag
            selects among open_clip's.
        preprocess: How images are prepared, as in `wrap`.
        head: One of `pl.heads`, in place of the model's classifier.
        texts: Sentences for an image-text model, as in `wrap`.
        template: Text around each sentence.
        precision: The type of the weights: "full" (float32), "bf16", "fp16", or "auto", that of the file.
        options: `tokenizer`, `sigmoid`, `regression` and `stage` as in `wrap`; all others go to the library's
            constructor (`img_size=`, `patch_size=`, …).
    """
    if isinstance(name, nn.Module | Anatomy):
        if weights is not None or pretrained is not None or str(device) != "cpu" or precision != "auto":
            named = "weights, pretrained, device and precision"
            raise PatchlightError(f"{named} belong to a model's name; a module is used as it is")
        return wrap(name, head, texts, template, labels=labels, preprocess=preprocess, **options)
    if not isinstance(name, str):
        raise PatchlightError(f"load needs a name or a module, not {type(name).__name__}")
    if precision not in _TYPES:
        raise PatchlightError(f"precision is {precision!r}; give one of {', '.join(_TYPES)}")
    family, rest = family_of(name)
    if isinstance(pretrained, str) and not family.tagged:
        raise PatchlightError(f"pretrained is {pretrained!r}; only open_clip's weights have tags, others True or False")
    state = read_weights(Path(weights)) if weights is not None else None
    overrides: dict[str, Any] = {"name": rest or name}
    overrides |= {} if preprocess is None else {"preprocess": read_preprocess(preprocess)}
    overrides |= {} if labels is None else {"labels": labels}
    overrides |= {key: value for key in _PASSED if (value := options.pop(key, None)) is not None}
    _check_own(overrides, head, texts)
    tag = pretrained if isinstance(pretrained, str) else None
    fetch = state is None and pretrained is not False
    model, more = _create(family, name, LoadRequest(rest, fetch, tag, state, options, overrides))
    anatomy = _wrapped(model.to(_TYPES[precision]), {**overrides, **more})
    if state is not None:
        if "img_size" in options or "image_size" in options:
            state = resampled(state, anatomy.model, anatomy.grid, f"'{weights}'")
        fill(anatomy.model, state, f"'{weights}'", anatomy.name)
    anatomy.model.eval().requires_grad_(False)
    check_finite(anatomy.model, anatomy.name)
    try:
        anatomy.model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise PatchlightError(f"device '{device}' cannot be used: {str(error).splitlines()[0]}") from error
    anatomy.renew()
    return _with_head(anatomy, head, texts, template)


def list_models(pattern: str = "") -> list[str]:
    """The names that `load` accepts without a prefix: pocket, and timm's plain and hierarchical transformers.

    Args:
        pattern: Part of a name, or a pattern with wildcards; by default all names.
    """
    return match_names((name for family in in_order() for name in family.names()), pattern)


def _create(family: Family, name: str, request: LoadRequest) -> tuple[nn.Module, dict[str, Any]]:
    """The model that a family builds, and keywords for `wrap`."""
    assert family.create is not None
    try:
        made = family.create(request)
    except PatchlightError:
        raise
    except Exception as error:
        raise PatchlightError(_could_not(name, request.pretrained, error)) from error
    return made if isinstance(made, tuple) else (made, {})


def _check_keywords(overrides: dict[str, Any]) -> dict[str, Any]:
    """The keywords of `wrap`; unknown ones are refused."""
    known = {*_OVERRIDES, *_DESCRIPTION, *CUSTOM, *_LAYOUT, "bag"}
    unknown = next((key for key in overrides if key not in known), None)
    if unknown is not None:
        raise PatchlightError(f"wrap takes no '{unknown}'; {nearest(unknown, known)}")
    if "preprocess" in overrides:
        overrides["preprocess"] = read_preprocess(overrides["preprocess"])
    if "output" in overrides and not callable(overrides["output"]):
        kind = type(overrides["output"]).__name__
        raise PatchlightError(f"output is {kind}; give a function, such as output=lambda out: out['logits']")
    if "output" in overrides and "blocks" in overrides and "bag" not in overrides:
        raise PatchlightError("output= does not apply to a model described by hand; let readout return the logits")
    return overrides


def _unwrap(model: nn.Module) -> nn.Module:
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = model.module
        if inner is None and type(model).__module__.startswith("peft."):
            inner = cast(Any, model).get_base_model()  # including its adapters
        if inner is None:
            return model
        model = inner


def _check_colours(vit: Anatomy) -> None:
    """Refuse colour statistics whose number does not match the image channels."""
    given = len(vit.preprocess.mean)
    if vit.channels in (1, 3) and given not in (1, 3):
        raise PatchlightError(
            f"mean and std of the preprocessing have {given} numbers, but {vit.name} takes images of {vit.channels} "
            "channel(s); give one for each, or one for all"
        )


def _check_quantised(model: nn.Module) -> None:
    """Refuse 8-bit weights that a twin cannot share, or that pass no gradient: those of torchao and bitsandbytes."""
    for key, value in model.named_parameters():
        kind, package = type(value).__name__, type(value).__module__.partition(".")[0]
        if package == "torchao" or (package == "bitsandbytes" and kind == "Int8Params"):
            raise PatchlightError(
                f"'{key}' of {type(model).__name__} is an {kind} of {package}, whose 8-bit layers cannot be read; "
                "load the model without quantisation (in bfloat16, say), or wrap it before it is quantised"
            )


def _model_preprocess(model: nn.Module, overrides: dict[str, Any]) -> Preprocess:
    """The model's own preprocessing, some of which is replaced."""
    if "blocks" in overrides:
        return Preprocess((224, 224))
    spec: PreprocessSpec = overrides["preprocess"]
    with warnings.catch_warnings():
        if spec.size and spec.mean and spec.std:  # no relevant assumption
            warnings.simplefilter("ignore", AssumedPreprocess)
        return _read(model, {key: value for key, value in overrides.items() if key != "preprocess"}).preprocess


def _read(model: nn.Module, overrides: dict[str, Any]) -> Anatomy:
    anatomy = None if any(key in overrides for key in CUSTOM) else read_anatomy(model, dict(overrides))
    if anatomy is None and "processor" in overrides:
        _apply_processor(model, overrides)
    if anatomy is None and ("output" in overrides or not has_text_side(model)):
        anatomy = read_custom(model, overrides)
    if anatomy is None:
        raise PatchlightError(_how_to_describe(model))
    return anatomy


def _apply_processor(model: nn.Module, overrides: dict[str, Any]) -> None:
    """Replace an image processor by its preprocessing."""
    name = str(overrides.get("name", type(model).__name__))
    overrides["preprocess"] = as_processed(overrides.pop("processor"), 3, name)


def _how_to_describe(model: nn.Module) -> str:
    """Why a model is not recognised, and how to describe it by hand."""
    kind, blocks, classes = type(model).__name__, "…", "…"
    if has_text_side(model):
        towers = ("vision_model.encoder.layers", "visual.transformer.resblocks", "visual.trunk.blocks")
        path = next((path for path in towers if find(model, path) is not None), None)
        blocks, classes = f"model.{path}" if path else "…", "number of texts, labels=texts"
        why = (
            f"{kind} compares images with texts and has no classes. Describe its image encoder by hand, with a "
            "readout that gives the similarity to the features of your texts"
        )
    else:
        why = (
            f"{kind} is not a supported model of timm, transformers, torchvision or open_clip. A Vision Transformer of "
            "your own is opened by running it: give preprocess=pl.Preprocess((height, width)) of its images, or "
            "input_shape= of other inputs. Or describe it by hand"
        )
    return (
        f"{why}: wrap(model, embed=…, blocks={blocks}, readout=…, grid=(h, w), prefix=1, pooling='cls', heads=…, "
        f"classes={classes}, preprocess=Preprocess((H, W)))"
    )


def _describe(model: nn.Module, overrides: dict[str, Any]) -> Anatomy:
    missing = [key for key in _DESCRIPTION if key not in overrides]
    if missing:
        raise PatchlightError(f"to describe a model by hand, also give {', '.join(missing)}")
    overrides.setdefault("preprocess", Preprocess((224, 224)))
    overrides.setdefault("name", type(model).__name__)
    return DescribedAnatomy(model, **overrides)


def _could_not(name: str, fetch: bool, error: Exception) -> str:
    first = first_line(error)
    misspelt = re.search(r"unexpected keyword argument '(\w+)'", first)
    if misspelt is not None:
        return f"'{name}' takes no '{misspelt[1]}'; {nearest(misspelt[1], {*_LOADING, *_parameters_of(error)})}"
    hint = "; without a hub give weights=FILE, or pretrained=False for random weights" if fetch else ""
    return f"'{name}' could not be loaded: {first}{hint}"


def _parameters_of(error: Exception) -> set[str]:
    """The parameters of the constructor that raised this error, found at the end of the traceback."""
    names, step = {"img_size", "patch_size", "num_classes", "num_labels"}, error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    cls: Any = None if step is None else step.tb_frame.f_locals.get("model_cls", step.tb_frame.f_locals.get("cls"))
    return names | set(inspect.signature(cls).parameters) if isinstance(cls, type) else names
