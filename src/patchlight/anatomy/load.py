"""The model boundary: `load` a model by name or `wrap` one you have; both give its anatomy."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from patchlight.anatomy.by_hand import DescribedAnatomy
from patchlight.anatomy.custom import CUSTOM, read_custom
from patchlight.anatomy.families import read_anatomy
from patchlight.anatomy.hf import as_processed
from patchlight.anatomy.names import PLAIN, STAGED, module_of, why_not
from patchlight.anatomy.opened import Anatomy, check_finite
from patchlight.anatomy.preprocessing import applied, read_preprocess
from patchlight.anatomy.spec import PreprocessSpec
from patchlight.anatomy.weights import fill, read_labels, read_weights, resampled
from patchlight.core.errors import AssumedPreprocess, NoClassifier, PatchlightError, first_line, nearest
from patchlight.core.extras import missing_extra
from patchlight.core.images import Preprocess
from patchlight.core.registry import matching

if TYPE_CHECKING:
    from patchlight.anatomy.heads import Head

_OVERRIDES = ("labels", "name", "preprocess", "processor", "tokenizer", "sigmoid", "regression", "stage")
"""What `wrap` takes for a model that it reads by itself."""
_DESCRIPTION = ("embed", "blocks", "readout", "grid", "prefix", "pooling", "heads", "classes")
"""What it needs for one that is described by hand."""
_PASSED = ("sigmoid", "regression", "stage", "tokenizer")
"""What `load` takes for `wrap`."""
_LOADING = ("weights", "labels", "device", "pretrained", "preprocess", "head", "texts", "template", *_PASSED)
_LIBRARIES = ("hf:", "torchvision:", "timm:", "open_clip:")


def wrap(
    model: nn.Module | Anatomy,
    head: Head | None = None,
    texts: Sequence[str] | None = None,
    template: str | Sequence[str] = "{}",
    **about: Any,
) -> Anatomy:
    """The anatomy of a model you already have: timm, transformers, open_clip or torchvision.

    A probe is run through the model, whole and in parts, and a model whose forward does more than its parts is refused.
    The model itself is only read: everything runs on a twin over the same weights, in evaluation mode, so the model may
    be trained or used meanwhile. Compiled and DataParallel models are unwrapped.

    `head` (of `pl.heads`) asks another question than the model's own classifier; `texts` are the sentences of an
    image-text model, short for `head=pl.heads.Texts(texts, template=template)`. A model without a classifier needs one.
    An Anatomy can be given another head too. `tokenizer` reads the sentences: of transformers, or what
    `open_clip.get_tokenizer` gives; a transformers `processor` may hold one.

    `labels` (names, a list or a CSV file), `name`, `preprocess` (or `processor`, a transformers image processor) and
    `sigmoid` override what is read from the model, `regression=True` says that its outputs are numbers; `preprocess` is
    a `Preprocess`, a dictionary or a JSON or TOML file of some of its fields, or a processor's folder. `stage`
    (0-based, or negative from the end) is where a hierarchical model is opened, the second-to-last by default.

    A module of your own that runs one of these models inside is opened at the blocks of that backbone, and what it does
    around them is its embedding and head. `output` is a function from what it gives to the logits [B,C], where they
    are not its only tensor, the first of a tuple, or called logits. A backbone whose grid or prefix tokens the module
    changes is told with `grid`, `prefix`, `channels`, `extent` or `pooling`.

    A model of another make is described by hand: give `embed`, `blocks`, `readout`, `grid`, `prefix`, `pooling`,
    `heads`, `classes` and `preprocess`. Functions that are methods of the model run on its twin; others run its own
    modules, put into evaluation mode under a lock where they are not in it.
    """
    about = {key: value for key, value in about.items() if value is not None}
    if isinstance(model, Anatomy):
        if about:
            raise PatchlightError(f"{', '.join(about)} cannot be given for {model.name}, which is wrapped already")
        return _asked(model, head, texts, template)
    _check_own(about, head, texts)
    return _asked(_wrapped(model, about), head, texts, template)


def _check_own(about: Mapping[str, Any], head: Head | None, texts: Sequence[str] | None) -> None:
    """Refuse what is said of a model's own classifier where another head is asked."""
    own = next((key for key in ("sigmoid", "regression", "labels") if about.get(key)), None)
    if own is not None and (head is not None or texts is not None):
        raise PatchlightError(
            f"{own} would be about the model's own classifier, and another head is asked; give {own} to the head"
        )


def _asked(anatomy: Anatomy, head: Head | None, texts: Sequence[str] | None, template: str | Sequence[str]) -> Anatomy:
    """The anatomy with the head asked for; one with neither that nor a classifier has nothing to explain."""
    from patchlight.anatomy.heads import Head, Texts

    if head is not None and texts is not None:
        raise PatchlightError("give either head or texts, which is short for head=pl.heads.Texts(texts)")
    if texts is None and template != "{}":
        raise PatchlightError("template stands around sentences; give texts=[…] too")
    head = head if texts is None else Texts(texts, template=template)
    if head is None:
        if anatomy.classes == 0:
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


def _wrapped(model: nn.Module, about: dict[str, Any]) -> Anatomy:
    about = _checked(about)
    if not isinstance(model, nn.Module):
        raise PatchlightError(f"wrap takes a torch module; {type(model).__name__} was given (load takes names)")
    model = _unwrap(model)
    _check_quantised(model)
    if "processor" in about and not any(c.__module__.startswith("transformers.") for c in type(model).__mro__):
        about["preprocess"] = as_processed(about.pop("processor"), 3, str(about.get("name", type(model).__name__)))
    if "tokenizer" in about and not _reads_texts(model):
        raise PatchlightError(f"{type(model).__name__} has no text side, so a tokenizer means nothing for it")
    if "labels" in about:
        about["labels"] = read_labels(about["labels"])
    if "preprocess" in about:
        about["preprocess"] = applied(about["preprocess"], lambda: _own_preprocess(model, about))
    anatomy = _describe(model, about) if "blocks" in about else _read(model, about)
    _check_colours(anatomy)
    check_finite(model, anatomy.name)
    anatomy.check()
    return anatomy


def load(
    name: str,
    weights: str | Path | None = None,
    labels: str | Path | Sequence[str] | None = None,
    device: str | torch.device = "cpu",
    pretrained: bool | str | None = None,
    preprocess: Preprocess | Mapping[str, Any] | str | Path | None = None,
    head: Head | None = None,
    texts: Sequence[str] | None = None,
    template: str | Sequence[str] = "{}",
    **options: Any,
) -> Anatomy:
    """Load a model by name.

    "pocket", any timm name, "hf:NAME" (hub name or local folder), "open_clip:NAME" (of its list, or a local folder), or
    "torchvision:NAME".

    `weights` is a safetensors file (or a torch file of plain tensors); the number of classes is read from it. Without
    it the pretrained weights are fetched, where a hub is reachable (of open_clip's, `pretrained` says by tag which);
    `pretrained=False` leaves them random. Further options go to the library's own constructor (`img_size=`,
    `patch_size=`, …); `preprocess`, `head`, `texts`, `template`, `tokenizer`, `sigmoid`, `regression` and `stage` as in
    wrap. Of weights for another `img_size` the position tables are resampled.
    """
    if not isinstance(name, str):
        raise PatchlightError(f"load takes a name; {type(name).__name__} was given (wrap takes models)")
    fetch = weights is None and pretrained is not False
    state = read_weights(Path(weights)) if weights is not None else None
    library, _, rest = name.partition(":") if name.startswith(_LIBRARIES) else ("timm", "", name)
    if isinstance(pretrained, str) and library != "open_clip":
        raise PatchlightError(f"pretrained is {pretrained!r}; only open_clip's weights have tags, others True or False")
    about: dict[str, Any] = {"name": rest or name}
    about |= {} if preprocess is None else {"preprocess": read_preprocess(preprocess)}
    about |= {} if labels is None else {"labels": labels}
    about |= {key: value for key in _PASSED if (value := options.pop(key, None)) is not None}
    _check_own(about, head, texts)
    if name == "pocket":
        anatomy = _load_pocket(about, options, pretrained is not False)
    elif library == "hf":
        anatomy = _load_hf(rest, fetch, state, options, about)
    elif library == "open_clip":
        anatomy = _load_open_clip(rest, pretrained if isinstance(pretrained, str) else None, fetch, options, about)
    elif library == "torchvision":
        anatomy = _load_torchvision(rest, fetch, state, options, about)
    else:
        anatomy = _load_timm(rest, fetch, state, options, about)
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
    return _asked(anatomy, head, texts, template)


def list_models(pattern: str = "") -> list[str]:
    """The names `load` knows without a prefix: pocket, and timm's plain and hierarchical transformers."""
    import timm

    names = [n for m in (*PLAIN, *STAGED) for n in timm.list_models(module=m) if why_not(n, m) is None]
    return matching(["pocket", *names], pattern)


def _checked(about: dict[str, Any]) -> dict[str, Any]:
    """The keywords of `wrap`, or a sentence about one that it does not take."""
    known = {*_OVERRIDES, *_DESCRIPTION, *CUSTOM}
    unknown = next((key for key in about if key not in known), None)
    if unknown is not None:
        raise PatchlightError(f"wrap takes no '{unknown}'; {nearest(unknown, known)}")
    if "preprocess" in about:
        about["preprocess"] = read_preprocess(about["preprocess"])
    if "output" in about and not callable(about["output"]):
        kind = type(about["output"]).__name__
        raise PatchlightError(f"output is {kind}; give a function, such as output=lambda out: out['logits']")
    if "output" in about and "blocks" in about:
        raise PatchlightError("output is for models that are read by themselves; a readout gives the logits itself")
    return about


def _unwrap(model: nn.Module) -> nn.Module:
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = model.module
        if inner is None and type(model).__module__.startswith("peft."):
            inner = cast(Any, model).get_base_model()  # with the adapters in it
        if inner is None:
            return model
        model = inner


def _check_colours(vit: Anatomy) -> None:
    """Refuse colour statistics of another number of channels, where pictures can be given at all."""
    given = len(vit.preprocess.mean)
    if vit.channels in (1, 3) and given not in (1, 3):
        raise PatchlightError(
            f"mean and std of the preprocessing have {given} numbers, but {vit.name} takes images of {vit.channels} "
            "channel(s); give one for each, or one for all"
        )


def _check_quantised(model: nn.Module) -> None:
    """Refuse weights of 8 bits that a twin cannot share, or that pass no gradient: torchao's, and bitsandbytes' own."""
    for key, value in model.named_parameters():
        kind, package = type(value).__name__, type(value).__module__.partition(".")[0]
        if package == "torchao" or (package == "bitsandbytes" and kind == "Int8Params"):
            raise PatchlightError(
                f"'{key}' of {type(model).__name__} is an {kind} of {package}, whose 8 bits cannot be looked through; "
                "load the model without quantisation (in bfloat16, say), or wrap it before it is quantised"
            )


def _own_preprocess(model: nn.Module, about: dict[str, Any]) -> Preprocess:
    """What a model says of its images, of which some is to be replaced."""
    if "blocks" in about:
        return Preprocess((224, 224))
    given: PreprocessSpec = about["preprocess"]
    with warnings.catch_warnings():
        if given.size and given.mean and given.std:  # nothing that matters is assumed
            warnings.simplefilter("ignore", AssumedPreprocess)
        return _read(model, {key: value for key, value in about.items() if key != "preprocess"}).preprocess


def _read(model: nn.Module, about: dict[str, Any]) -> Anatomy:
    from patchlight.anatomy import hf, hf_backbones

    anatomy = None if any(key in about for key in CUSTOM) else read_anatomy(model, dict(about))
    if anatomy is None and ("output" in about or not _reads_texts(model)):
        anatomy = read_custom(model, about)
    if anatomy is None:
        raise PatchlightError(_unread(model, [*hf.supported(), *hf_backbones.supported()]))
    return anatomy


def _unread(model: nn.Module, of_transformers: Sequence[str]) -> str:
    """Why a model cannot be read by itself, and how it is described by hand."""
    kind, blocks, classes = type(model).__name__, "…", "…"
    if _reads_texts(model):
        towers = ("vision_model.encoder.layers", "visual.transformer.resblocks", "visual.trunk.blocks")
        found = next((path for path in towers if _reaches(model, path)), None)
        blocks, classes = f"model.{found}" if found else "…", "number of texts, labels=texts"
        why = (
            f"{kind} compares images with texts and has no classes of its own. Describe its image side by hand, with a "
            "readout that gives the similarity to the features of your texts"
        )
    else:
        why = (
            f"{kind} is not a model that can be read by itself; looked for timm's transformers (list_models names "
            "them), torchvision's VisionTransformer, open_clip's CLIP, and transformers' "
            f"{', '.join(of_transformers)}. Describe it by hand"
        )
    return (
        f"{why}: wrap(model, embed=…, blocks={blocks}, readout=…, grid=(h, w), prefix=1, pooling='cls', heads=…, "
        f"classes={classes}, preprocess=Preprocess((H, W)))"
    )


def _reads_texts(model: nn.Module) -> bool:
    return any(hasattr(model, name) for name in ("get_text_features", "encode_text"))


def _reaches(model: nn.Module, path: str) -> bool:
    try:
        model.get_submodule(path)
    except AttributeError:
        return False
    return True


def _describe(model: nn.Module, about: dict[str, Any]) -> Anatomy:
    missing = [key for key in _DESCRIPTION if key not in about]
    if missing:
        raise PatchlightError(f"to describe a model by hand, also give {', '.join(missing)}")
    about.setdefault("preprocess", Preprocess((224, 224)))
    about.setdefault("name", type(model).__name__)
    return DescribedAnatomy(model, **about)


def _load_pocket(about: dict[str, Any], options: dict[str, Any], trained: bool) -> Anatomy:
    from patchlight.zoo import pocket

    if options:
        raise PatchlightError(f"pocket takes no '{next(iter(options))}'; {nearest(next(iter(options)), _LOADING)}")
    facts = pocket.description()
    own = Preprocess((32, 32), tuple(facts["mean"]), tuple(facts["std"]))
    preprocess = applied(about.pop("preprocess", own), lambda: own)
    return _wrapped(pocket.build(trained), {"labels": facts["classes"], "preprocess": preprocess, **about})


def _load_timm(
    name: str, fetch: bool, state: dict[str, Tensor] | None, options: dict[str, Any], about: dict[str, Any]
) -> Anatomy:
    import timm

    known = list_models()
    if not timm.is_model(name):
        raise PatchlightError(f"no model is called '{name}'; {nearest(name, known)}")
    reason = why_not(name.partition(".")[0], module_of(name))
    if reason is not None:
        raise PatchlightError(
            f"'{name}' is not a Vision Transformer that can be read: {reason}; {nearest(name, known)}"
        )
    if state is not None and "num_classes" not in options:
        head = state.get("head.weight", state.get("head.fc.weight"))
        if head is not None:
            options = {**options, "num_classes": int(head.shape[0])}
    try:
        where = _found_by_timm(name, options) if fetch else {}
        model = timm.create_model(name, pretrained=fetch, **{**options, **where})
        _check_options(type(model), options)
    except PatchlightError:
        raise
    except Exception as error:
        raise PatchlightError(_could_not(name, fetch, error)) from error
    return _wrapped(model, about)


def _found_by_timm(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Options with which timm finds pretrained weights where the hub is out of reach: the file in the local cache."""
    from timm.models import get_pretrained_cfg

    from patchlight.anatomy.hub import cached, endpoint, unreachable

    config = get_pretrained_cfg(name)
    if config is None or "pretrained_cfg" in options or "pretrained_cfg_overlay" in options:
        return {}
    classes = options.get("num_classes", config.num_classes)
    if classes not in (0, config.num_classes):
        raise PatchlightError(
            f"'{name}' is pretrained for {config.num_classes} classes, so that with num_classes={classes} its "
            "classifier would be random; give weights=FILE of one trained for them, or pretrained=False"
        )
    if not config.hf_hub_id or not (reason := unreachable()):
        return {}
    given = config.hf_hub_filename or "pytorch_model.bin"
    safe = "model.safetensors" if given == "pytorch_model.bin" else str(Path(given).with_suffix(".safetensors"))
    file = cached(config.hf_hub_id, safe, given)
    if file is None:
        raise PatchlightError(
            f"'{name}' could not be loaded: it is not in the local cache, and {endpoint()} cannot be reached "
            f"({reason}); give weights=FILE (--weights), or pretrained=False for random weights"
        )
    return {"pretrained_cfg_overlay": {"file": str(file), "custom_load": file.suffix == ".npz"}}


def _check_options(cls: type, options: dict[str, Any]) -> None:
    """Refuse options that a constructor with `**kwargs` would swallow."""
    from timm import create_model
    from timm.models import build_model_with_cfg

    if all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in inspect.signature(cls).parameters.values()):
        return
    makers = [kind for kind in cls.__mro__ if "__init__" in vars(kind)]  # what one swallows, the next may take
    known = {*inspect.signature(create_model).parameters}.union(
        *(inspect.signature(kind).parameters for kind in makers)
    )
    known |= {*inspect.signature(build_model_with_cfg).parameters}
    unknown = next((key for key in options if key not in known), None)
    if unknown is not None:
        raise TypeError(f"{cls.__name__}.__init__() got an unexpected keyword argument '{unknown}'")


def _load_hf(
    name: str, fetch: bool, state: dict[str, Tensor] | None, options: dict[str, Any], about: dict[str, Any]
) -> Anatomy:
    try:
        import transformers
    except ImportError as error:
        raise missing_extra("'hf:' models need", "transformers", "hf") from error
    from patchlight.anatomy.hf import check_complete, check_floating, read_processor
    from patchlight.anatomy.hub import endpoint, unreachable

    local = name != "" and Path(name).is_dir()
    if not local and (not name or name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise PatchlightError(f"no folder at '{name}'; give hf:FOLDER, or hf:OWNER/NAME for a model of the hub")
    if local and fetch:
        check_floating(Path(name))
    reason = "" if local else unreachable()
    where: dict[str, Any] = {"local_files_only": True} if reason else {}
    try:
        config, others = transformers.AutoConfig.from_pretrained(name, return_unused_kwargs=True, **options, **where)
        others = {key: value for key, value in others.items() if key != "local_files_only"}
        heads = ((state or {}).get(f"{part}.weight") for part in ("classifier", "cls_classifier"))
        head = next((weight for weight in heads if weight is not None), None)
        if head is not None and "num_labels" not in options:
            config.num_labels = int(head.shape[0])
        config.architectures = config.architectures or []
        kind, extra = _kind_of(next(iter(config.architectures), ""), name, state)
        cls: Any = getattr(transformers, kind or "AutoModelForImageClassification")
        if fetch:
            how = {**options, **where, **extra, "ignore_mismatched_sizes": True, "output_loading_info": True}
            model, info = cls.from_pretrained(name, **how)
        else:
            make = cls._from_config if kind else cls.from_config
            model, info = make(config, **others, **extra), {}
    except PatchlightError:
        raise
    except Exception as error:
        if reason and isinstance(error, OSError):
            raise PatchlightError(
                f"'hf:{name}' could not be loaded: it is not in the local cache, and {endpoint()} cannot be reached "
                f"({reason}); give hf:FOLDER of a model that lies here"
            ) from error
        raise PatchlightError(_could_not(f"hf:{name}", fetch, error)) from error
    check_complete(info, next(iter(config.architectures), ""), name)
    if not isinstance(about.get("preprocess"), Preprocess):
        about["processor"] = read_processor(name, where)
    if _reads_texts(model) and "tokenizer" not in about:
        from patchlight.anatomy.hf_backbones import read_tokenizer

        about["tokenizer"] = read_tokenizer(name, where)
    return _wrapped(model, about)


def _kind_of(saved: str, name: str, state: dict[str, Tensor] | None) -> tuple[str, dict[str, Any]]:
    """The class as which a transformers model is opened, with what it is made with; "" where a classifier is wanted.

    Weights that have a classifier make one of a backbone. A pooler behind a backbone, often not trained, is left out.
    """
    from patchlight.anatomy import hf, hf_backbones

    hf_backbones.check_kind(saved, f"'hf:{name}'")
    classifies = state is not None and "classifier.weight" in state
    if saved in hf.supported():
        return saved, {}
    kind = hf_backbones.PRETRAINED.get(saved, saved)
    if classifies or kind not in hf_backbones.supported():
        return "", {}
    return kind, {"add_pooling_layer": False} if kind in ("ViTModel", "DeiTModel") else {}


def _load_open_clip(name: str, tag: str | None, fetch: bool, options: dict[str, Any], about: dict[str, Any]) -> Anatomy:
    from patchlight.anatomy.open_clip import create

    try:
        model, tokenizer = create(name, tag, fetch, options)
    except PatchlightError:
        raise
    except Exception as error:
        raise PatchlightError(_could_not(f"open_clip:{name}", fetch, error)) from error
    return _wrapped(model, {"tokenizer": tokenizer, **about})


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
    return _wrapped(model, about)


def _could_not(name: str, fetch: bool, error: Exception) -> str:
    first = first_line(error)
    misspelt = re.search(r"unexpected keyword argument '(\w+)'", first)
    if misspelt is not None:
        return f"'{name}' takes no '{misspelt[1]}'; {nearest(misspelt[1], {*_LOADING, *_taken(error)})}"
    hint = "; without a hub give weights=FILE, or pretrained=False for random weights" if fetch else ""
    return f"'{name}' could not be loaded: {first}{hint}"


def _taken(error: Exception) -> set[str]:
    """What the constructor takes that complained of a keyword: it was called where the traceback ends."""
    names, step = {"img_size", "patch_size", "num_classes", "num_labels"}, error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    cls: Any = None if step is None else step.tb_frame.f_locals.get("model_cls", step.tb_frame.f_locals.get("cls"))
    return names | set(inspect.signature(cls).parameters) if isinstance(cls, type) else names
