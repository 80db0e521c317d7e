"""User modules: their forward is crossed at the blocks of a known backbone, or at the blocks found by running it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor, nn

from patchlight.anatomy.contract import Parts
from patchlight.anatomy.crossing import CrossedAnatomy
from patchlight.anatomy.discovery import Inputs, find_blocks, run_plainly
from patchlight.anatomy.families import read_anatomy
from patchlight.anatomy.names import known_as, why_not
from patchlight.anatomy.opened import Anatomy
from patchlight.anatomy.parts import parts_of_timm
from patchlight.anatomy.probe import BY_HAND, alike, random_image
from patchlight.core.errors import AssumedPreprocess, PatchlightError, first_line, warn
from patchlight.core.images import Preprocess

if TYPE_CHECKING:
    from patchlight.anatomy.heads import Head

CUSTOM = ("output", "grid", "prefix", "pooling", "channels", "extent")
"""Keywords of `wrap` for a user's module, in addition to those for every model."""
Output = Callable[[Any], Any]


class CustomAnatomy(CrossedAnatomy):
    """A user's module, whose forward is crossed at the blocks of a Vision Transformer inside it.

    `backbone` is the anatomy of that transformer, at `path`, if a family recognises it: its blocks and their parts are
    then used as that family reads them. Otherwise the blocks are those that are found in the forward.
    """

    library = "own"

    def __init__(
        self,
        model: nn.Module,
        *,
        path: str = "",
        backbone: Anatomy | None = None,
        output: Output | None,
        assumed: bool = False,
        **facts: Any,
    ) -> None:
        self.path, self.backbone, self.output = path, backbone, output
        code = getattr(output, "__code__", None)
        self.reading = "" if output is None else repr(output if code is None else (code.co_code, code.co_consts))
        self._assumed = assumed
        if backbone is not None:
            facts = {
                "paths": _block_paths(path, backbone),
                "pools": backbone.pooling == "map",
                "grid": backbone.grid,
                "prefix": backbone.prefix,
                "channels": backbone.channels,
                "extent": _scaled(backbone, facts["preprocess"]),
                "heads": backbone.heads,
                **facts,
            }
            self.blocks_name = f"backbone '{path}'"
        super().__init__(model, **facts)

    @property
    def _inside(self) -> Anatomy | None:
        """The anatomy of the backbone, over its part of the twin; None if no family recognises it."""
        running = self.running
        if self.backbone is not None and running.part[0] is not running.net:
            running.part = running.net, self.backbone.over(running.net.get_submodule(self.path), self)
        return cast("Anatomy | None", running.part[1])

    def watch(self) -> None:
        inside = self._inside
        if inside is not None:
            inside.watch()
            self.make_skippable()
        else:
            super().watch()

    def record_calls(self) -> None:
        super().record_calls()
        if isinstance(self._inside, CrossedAnatomy):
            with self._inside.own_cast():
                self._inside.record_calls()

    def block(self, index: int, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        inside = self._inside
        if inside is None:
            return super().block(index, tokens, positions)
        if index not in self.breaks:
            self.note_state(index, tokens)
        if isinstance(inside, CrossedAnatomy):
            inside.masked = self.masked
        return inside.block(index, tokens, positions)

    def features(self, tokens: Tensor) -> Tensor:
        """The backbone's features, for heads other than the module's own."""
        return super().features(tokens) if self._inside is None else self._inside.features(tokens)

    def ask(self, head: Head, bind: bool = True) -> Self:
        """Use another head on the backbone's features, which the module's own head does not limit."""
        asked = super().ask(head, bind)
        if self.backbone is not None:
            bound = cast("Head", asked.head)
            asked.pooling, asked.can_drop = bound.pooling or self.backbone.pooling, self.backbone.can_drop
        return asked

    def parts(self, index: int) -> Parts:
        return parts_of_timm(self.blocks[index]) if self._inside is None else self._inside.parts(index)

    def projection(self) -> nn.Module | None:
        return super().projection() if self._inside is None else self._inside.projection()

    def logits_of(self, out: Any, rows: int) -> Tensor:
        return logits_of(out, rows, self.output, self.name)

    def check(self) -> None:
        super().check()
        if self._assumed and self.bare is None:
            self._warn_assumed()

    def _warn_assumed(self) -> None:
        """Warn if images are changed before the backbone, whose preprocessing may then not be the module's."""
        self._assumed = False
        image = random_image(self)
        try:
            with torch.no_grad(), self.steady():
                tokens, plain = self.embed(image), cast(Anatomy, self._inside).embed(image)
        except Exception:
            return
        if plain.shape == tokens.shape and not alike(plain, tokens):
            preprocess = self.preprocess
            warn(
                f"{self.name} changes images, or their tokens, before the blocks of '{self.path}', whose preprocessing "
                f"(mean {list(preprocess.mean)}, std {list(preprocess.std)}) is assumed; give preprocess=pl.Preprocess("
                f"{preprocess.size}, mean=…, std=…) if it takes other images",
                AssumedPreprocess,
            )


def _block_paths(path: str, backbone: Anatomy) -> list[str]:
    """The paths of a backbone's blocks in the module around it."""
    paths = {id(module): name for name, module in backbone.net.named_modules()}
    return [f"{path}.{paths[id(block)]}".strip(".") for block in backbone.blocks]


def read_custom(model: nn.Module, overrides: dict[str, Any]) -> Anatomy | None:
    """The anatomy of a module that contains exactly one known Vision Transformer; None if it contains none."""
    kind = str(overrides.get("name") or type(model).__name__)
    backbones = _backbones(model, overrides)
    if not backbones:
        return _discovered(model, overrides, kind)
    anatomies = {path: _around(model, path, backbone, overrides, kind) for path, backbone in backbones.items()}
    if len(anatomies) > 1:
        anatomies = {path: vit for path, vit in anatomies.items() if _enters(vit)} or anatomies
    if len(anatomies) > 1:
        named = " and ".join(f"'{path}' ({type(backbones[path].model).__name__})" for path in anatomies)
        raise PatchlightError(
            f"{kind} contains several Vision Transformers: {named}; wrap a module that runs one of them, or " + BY_HAND
        )
    return next(iter(anatomies.values()))


def _discovered(model: nn.Module, overrides: dict[str, Any], kind: str) -> Anatomy | None:
    """The anatomy of a module whose blocks are found in its forward; None if nothing is known of its inputs.

    Inputs of four dimensions are volumes [C,depth,rows,columns], or videos [frames,C,rows,columns] where `axes` begins
    with "time".
    """
    facts = {key: value for key, value in overrides.items() if key not in ("output", "name", "processor", "stage")}
    if "input_shape" in facts:
        shape = tuple(int(side) for side in facts["input_shape"])
        moves = len(shape) == 4 and facts.get("axes", ("",))[0] == "time"
        dims = (0, 2, 3) if moves else tuple(range(1, len(shape)))
        inputs = Inputs(shape, dims, tuple(facts.pop("axes", ("depth", "row", "column")[-len(dims) :])))
        facts = {"preprocess": Preprocess((shape[-2], shape[-1]), (0.0,), (1.0,)), "channels": shape[moves], **facts}
    elif "preprocess" in facts:
        inputs = Inputs((int(facts.get("channels", 3)), *facts["preprocess"].size))
    else:
        return None
    *_, last = model.modules()
    if isinstance(last, nn.Tanh) and "output" not in overrides and not facts.get("regression"):
        raise PatchlightError(
            f"{kind} ends in a Tanh, so its outputs are values from -1 to 1, not logits; set regression=True or "
            "remove the Tanh"
        )
    located = find_blocks(model, run_plainly, inputs, kind).located(overrides.get("stage", -2))
    return CustomAnatomy(model, output=overrides.get("output"), name=kind, **{**located, **facts})


def _around(model: nn.Module, path: str, backbone: Anatomy, overrides: dict[str, Any], kind: str) -> CustomAnatomy:
    if backbone.hierarchical and backbone.depth == 0:
        inner = type(backbone.model).__name__
        raise PatchlightError(
            f"{kind} is built around '{path}', a {inner}, which has no transformer blocks; wrap the backbone alone"
        )
    if backbone.hierarchical:
        facts = {"preprocess": backbone.preprocess, "channels": backbone.channels, **overrides}
        return cast(CustomAnatomy, _discovered(model, facts, kind))
    taken = {key: overrides[key] for key in ("labels", "sigmoid", "regression", *CUSTOM[1:]) if key in overrides}
    return CustomAnatomy(
        model,
        path=path,
        backbone=backbone,
        output=overrides.get("output"),
        assumed="preprocess" not in overrides and "processor" not in overrides,
        name=kind,
        preprocess=overrides.get("preprocess", backbone.preprocess),
        **taken,
    )


def _backbones(model: nn.Module, overrides: dict[str, Any]) -> dict[str, Anatomy]:
    """The outermost modules that a family recognises, by their paths in the uncompiled twin."""
    backbones: dict[str, Anatomy] = {}
    visited: set[int] = set()
    waiting = [("", model)]
    while waiting:
        path, module = waiting.pop()
        module = module._modules.get("_orig_mod") or module
        if id(module) in visited:
            continue
        visited.add(id(module))
        backbone = _read_backbone(module, overrides)
        if backbone is not None:
            backbones[path] = backbone
            continue
        waiting += [(f"{path}.{name}".lstrip("."), m) for name, m in module._modules.items() if m is not None]
    return dict(sorted(backbones.items()))


def _read_backbone(module: nn.Module, overrides: dict[str, Any]) -> Anatomy | None:
    """The anatomy of a module, for the given images if its grid adapts to them, otherwise for its native size."""
    known, of = known_as(module)
    if of and (why_not(known, of) is not None or not hasattr(module, "forward_features")):
        return None  # another network of timm, or a part of one
    stage = {key: overrides[key] for key in ("stage",) if key in overrides}
    options: dict[str, Any] = {key: overrides[key] for key in ("preprocess", "processor") if key in overrides}
    if "preprocess" in options:
        native = _native(module)
        if native is not None and native != options["preprocess"].size:
            options = {"preprocess": replace(options["preprocess"], size=native)}
    return read_anatomy(module, {**stage, **options})


def _native(module: Any) -> tuple[int, int] | None:
    """The image size of a backbone that takes only one."""
    config = getattr(module, "config", None)
    if getattr(module, "dynamic_img_size", False) or type(module).__name__.startswith("Dinov2"):
        return None
    size = getattr(getattr(module, "patch_embed", None), "img_size", None)
    size = getattr(getattr(config, "vision_config", config), "image_size", size)
    if isinstance(size, int):
        return size, size
    return None if size is None else (int(size[0]), int(size[1]))


def _scaled(backbone: Anatomy, preprocess: Preprocess) -> tuple[int, int]:
    """The pixels that the grid covers, if the module resizes its images for the backbone."""
    sides = zip(backbone.extent, preprocess.size, backbone.preprocess.size, strict=True)
    height, width = (round(covered * given / taken) for covered, given, taken in sides)
    return height, width


def _enters(vit: CustomAnatomy) -> bool:
    """Whether the forward reaches the backbone."""
    image = vit.place(torch.zeros(1, *vit.input_shape))
    try:
        with torch.no_grad(), vit.steady():
            vit.embed(image)
    except Exception:
        return False
    return True


def logits_of(out: Any, rows: int, output: Output | None, name: str) -> Tensor:
    """The logits [rows,C] in the output of the forward; one number per image is one class."""
    if output is not None:
        try:
            logits = output(out)
        except Exception as error:
            raise PatchlightError(
                f"output= fails on the result of {name}, which is {_describe(out)}: {first_line(error)}"
            ) from error
        if not isinstance(logits, Tensor):
            raise PatchlightError(
                f"output= returns {_describe(logits)} for the output of {name}, which is {_describe(out)}; "
                "it must return the tensor of logits [B,C]"
            )
    else:
        logits = _pick_logits(out, name)
    logits = logits[:, None] if logits.ndim == 1 and len(logits) == rows else logits
    if logits.ndim != 2 or len(logits) != rows or logits.shape[1] == 0 or not logits.is_floating_point():
        kind = "" if logits.is_floating_point() else f" of {str(logits.dtype).removeprefix('torch.')}"
        images = "one image" if rows == 1 else f"{rows} images"
        raise PatchlightError(
            f"{name} gives a tensor {list(logits.shape)}{kind} for {images}, not logits [{rows},C]; choose "
            "them with output=lambda out: …"
        )
    return logits


def _pick_logits(out: Any, name: str) -> Tensor:
    """The logits in the output of a forward: the entry called logits, the only tensor, or the first of a tuple."""
    if isinstance(out, Tensor):
        return out
    logits = out.get("logits") if isinstance(out, Mapping) else getattr(out, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    values = list(out.values()) if isinstance(out, Mapping) else list(out) if isinstance(out, tuple | list) else []
    tensors = [value for value in values if isinstance(value, Tensor)]
    if len(tensors) == 1 or (tensors and not isinstance(out, Mapping) and tensors[0] is values[0]):
        return tensors[0]
    choose = "out['…']" if isinstance(out, Mapping) else "…"
    raise PatchlightError(f"{name} gives {_describe(out)}; choose the logits [B,C] with output=lambda out: {choose}")


def _describe(value: Any) -> str:
    """Describe a value: a tensor by its shape, a dictionary by its keys."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    kind = type(value).__name__
    if isinstance(value, Mapping):
        return f"a {kind} with the keys {', '.join(map(repr, value))}" if value else f"an empty {kind}"
    if isinstance(value, tuple | list):
        return f"a {kind} of {', '.join(type(v).__name__ for v in value)}" if value else f"an empty {kind}"
    return "None" if value is None else f"a {kind}"
