"""The three kinds of methods and their decorators: `layer_map`, `own_passes` and `ablates`.

A *layer map* is a function of the `Evidence` of one block. It runs inside the pass, and a `Composition` combines the
maps of the blocks. A suffix of the name replaces the composition (`.plus`, `.skipplus`, `.rollout`) or the backward
rule (`.libra`, …). A method with *its own passes* is a function of an `Ask`: the model, the images and one class per
image. A method that *ablates* scores variants of the images; its `Ask` has all classes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import PatchlightError, Unsupported
from patchlight.core.registry import Entry, Registry, Setting, Settings, make_decorator, settings_of
from patchlight.core.targets import Score, Targets
from patchlight.evidence.ablation import ABLATION, Ablation, Variants
from patchlight.evidence.passes import Pass, run_pass
from patchlight.evidence.precision import PRECISION, Decided, PassPrecision
from patchlight.evidence.record import BACKWARD, PARTS, EndBias
from patchlight.evidence.rows import Matrix, times
from patchlight.evidence.rules import Rule
from patchlight.evidence.runner import WHOLE, Course, LayerJob

LEVEL = "The resolution of the map: one value for each patch token, or for each pixel."
Level = Annotated[Literal["token", "pixel"], Field(description=LEVEL)]
Reads = frozenset[tuple[str, int]]
"""Parts of the evidence by letter and block, such as ("y", 3)."""
GROUPS: Mapping[str, str] = {
    "attention": "attention eclip legrad tokentm transition",
    "gradients": "dave gradients",
    "decomposition": "decomposition decompx position relevance",
    "CAM": "cams token_activation",
    "perturbation": "atman caap hsic lime mda occlusion posterior rise search tis vitcx",
    "Shapley": "shapley",
    "trained": "trained.diffmask.method trained.shapley.method",
    "baseline": "random",
    "other": "",
}
"""The groups of method lists, in order, with the modules that register their methods; plugins are in "other"."""
_GROUP_OF = {
    f"patchlight.{name if '.' in name else f'methods.{name}'}": group
    for group, names in GROUPS.items()
    for name in names.split()
}
V = TypeVar("V")
Needs = AbstractSet[str] | Callable[[Settings], AbstractSet[str]]


@dataclass(frozen=True)
class LayerMaps:
    """The layer maps of one class: the input of a composition.

    In a hierarchical model, N differs between stages. `merged` converts a row over the tokens that enter block l + 1 to
    a row over the tokens that leave block l; `lifted` converts values to the tokens that enter block 0. The share of a
    merged token is split equally among the tokens that were merged.

    Args:
        values: Vectors [B,N] or matrices [B,N,N] (to, from), which may be `Rows`, by block.
        vit: The model.
        rows: Returns the weights [B,N_l] with which the readout reads the states x_l, by l.
        end: The bias terms after the last block.
        base: Computes the method's map restricted to the blocks from a given one on, if it has a start.
    """

    values: Mapping[int, Any]
    vit: Anatomy
    rows: Callable[[], Mapping[int, Tensor]]
    end: EndBias = field(default_factory=EndBias)
    base: Callable[[LayerMaps, int], Tensor] | None = None

    @property
    def pool(self) -> Tensor:
        """The weights [B,N] with which the classifier reads the last tokens."""
        return self.rows()[self.vit.depth]

    def arriving(self, row: Tensor, layer: int) -> Tensor:
        """`merged`, plus the weights with which the readout itself reads the tokens that leave the previous block."""
        row, rows = self.merged(row, layer), self.rows()
        return row + rows[layer] if layer in rows and layer < self.vit.depth else row

    def merged(self, row: Tensor, layer: int) -> Tensor:
        """Convert a row over the tokens that enter block `layer` to the tokens that leave the previous block."""
        merging = self.vit.merging(layer)
        return row if merging is None else merging.pull(row)

    def lifted(self, values: Tensor, layer: int) -> Tensor:
        """Convert values [B,N] of the tokens that enter block `layer` to those of block 0, with the same sum."""
        for index in range(layer, 0, -1):
            values = self.merged(values, index)
        return values

    def end_bias(self) -> Tensor | None:
        """The bias terms after the last block, converted to the tokens that enter block 0."""
        return None if self.end.bias is None else self.lifted(self.end.bias, self.vit.depth)

    def start_row(self, readout: str = "pooling") -> Tensor:
        """The first row vector of a product of matrices: that of the classifier, the CLS row, or a mean."""
        if readout == "pooling":
            return self.pool
        row = self.pool.new_zeros(self.pool.shape)
        if readout == "cls":
            if self.vit.prefix == 0:
                raise Unsupported(f"{self.vit.name} has no CLS token; readout 'pooling', 'patches' and 'tokens' work")
            row[:, 0] = 1
            return row
        ends = (self.vit.prefix, row.shape[1] - self.vit.suffix) if readout == "patches" else (0, row.shape[1])
        row[:, slice(*ends)] = 1 / (ends[1] - ends[0])
        return row

    def vector(self, layer: int, readout: str = "pooling") -> Tensor:
        """The map [B,N] of a block, `lifted`; of a matrix, the row that the classifier reads."""
        value = self.values[layer]
        if not isinstance(value, Matrix):
            raise PatchlightError("these layer maps only sum over tails of the model; use terms='tail'")
        if not isinstance(value, Tensor) or value.ndim > 2:
            row = self.start_row(readout)
            for index in range(self.vit.depth - 1, layer, -1):
                row = self.arriving(row, index)
            value = times(row, value)
        return self.lifted(value, layer)


def follows_one_state(settings: Settings, vit: Anatomy) -> str | None:
    """Why a method that starts at the last block cannot explain a readout of several blocks; None if it can."""
    if not vit.several_states:
        return None
    blocks = f"{len(vit.reads)} blocks" if len(vit.reads) > 1 else "a block before the last"
    return (
        f"{vit.name} reads tokens of {blocks}, and this method follows attention from the last block only; 'genatt' "
        "starts at all of them"
    )


@dataclass(frozen=True)
class Composition:
    """How the layer maps of several blocks are combined.

    Args:
        function: A function of LayerMaps.
        span: Returns the blocks that it reads, given the model's depth and the settings.
        name: The suffix for names of methods.
        matrices_only: Whether the layer maps must be matrices.
        aliases: Other names.
        staged: Whether it works on hierarchical models, because it uses `LayerMaps.vector`, `merged` and `lifted`.
    """

    function: Callable[..., Tensor]
    span: Callable[[int, Settings], Iterable[int]]
    name: str = ""
    matrices_only: bool = False
    aliases: tuple[str, ...] = ()
    staged: bool = False

    @property
    def settings(self) -> Mapping[str, Setting]:
        """The settings of the composition."""
        return settings_of(self.function)

    def blocks(self, vit: Anatomy, settings: Settings) -> tuple[int, ...]:
        """The blocks that are composed."""
        return tuple(self.span(vit.depth, settings))


@dataclass(frozen=True)
class Estimate:
    """Maps with their sampling errors.

    Args:
        maps: Maps [B,T,h,w], or of one class [B,h,w].
        error: The standard error of each value, NaN if not known; None if nothing was sampled.
        samples: The number [B] of masks, coalitions or noise samples of each image; None if nothing was sampled.
        facts: Other numbers [B] that the method reports for each image, by name, such as "masks" of ViT-CX.
        precision: The precision of the computation; "fp16+tf32" if batches differ.
    """

    maps: Tensor
    error: Tensor | None = None
    samples: Tensor | None = None
    facts: Mapping[str, Tensor] = field(default_factory=dict)
    precision: str = ""

    @staticmethod
    def stack(parts: Sequence[Estimate]) -> Estimate:
        """Stack the maps [B,h,w] of the classes to [B,T,h,w]."""
        errors = [part.error for part in parts if part.error is not None]
        counts = [part.samples for part in parts if part.samples is not None]
        return Estimate(
            torch.stack([part.maps for part in parts], 1),
            torch.stack(errors, 1) if errors else None,
            torch.stack(counts).amax(0) if counts else None,
            {name: torch.stack([part.facts[name] for part in parts]).amax(0) for name in parts[0].facts},
        )

    @staticmethod
    def concat(parts: Sequence[Estimate]) -> Estimate:
        """Concatenate the maps of several batches of images."""
        errors = [part.error for part in parts if part.error is not None]
        counts = [part.samples for part in parts if part.samples is not None]
        names = [name for name in parts[0].facts if all(name in part.facts for part in parts)]
        return Estimate(
            torch.cat([part.maps for part in parts]),
            torch.cat(errors) if len(errors) == len(parts) else None,
            torch.cat(counts) if counts else None,
            {name: torch.cat([part.facts[name] for part in parts]) for name in names},
            "+".join(dict.fromkeys(word for part in parts for word in part.precision.split("+"))),
        )

    def select(self, images: Tensor) -> Estimate:
        """The estimate of some of the images, given by index or by a boolean mask."""
        on_device, on_cpu = images.to(self.maps.device), images.cpu()
        return Estimate(
            self.maps[on_device],
            None if self.error is None else self.error[on_device],
            None if self.samples is None else self.samples[on_cpu],
            {name: values[on_cpu] for name, values in self.facts.items()},
        )


@dataclass(frozen=True)
class Ask:
    """The input of a method that is not a layer map.

    Args:
        vit: The model.
        images: Preprocessed images [B,C,H,W].
        targets: The classes to explain.
        score: What is explained of a class.
        seed: Random seed.
        rule: The backward rule.
        layers: The blocks whose maps a method with a composition returns.
        ablation_settings: The settings chunk, precision and compile of a method that ablates.
        precision: The precision of the passes of a method that does not ablate.
        shared: A cache for the methods that explain the same images and classes.
        together: The evidence that several of these methods read from one forward pass over the images.
    """

    vit: Anatomy
    images: Tensor
    targets: Targets
    score: Score
    seed: int
    rule: Rule
    layers: tuple[int, ...] = ()
    ablation_settings: Settings = field(default_factory=dict)
    precision: Decided = "full"
    shared: dict[Hashable, Any] = field(default_factory=dict)
    together: Reads = frozenset()

    @property
    def ablation(self) -> Ablation:
        """The ablation that scores variants of these images."""
        return Ablation(self.vit, self.images, **self.ablation_settings)

    def of(self, images: Tensor) -> Ask:
        """The same request for some of the images, given by index."""
        return replace(
            self,
            images=self.images[images.to(self.images.device)],
            targets=self.targets[images],
            shared={},
            together=Reads(),
        )

    def score_variants(self, variants: Variants | Sequence[Variants]) -> Tensor:
        """The scores [V,T] of all variants for all classes."""
        return self.ablation.scores(variants, self.targets, self.score)

    def generator(self) -> torch.Generator:
        """A CPU generator seeded by `seed` alone, so that a batch equals a loop over its images."""
        return torch.Generator().manual_seed(self.seed)

    def once(self, name: Hashable, compute: Callable[[], V]) -> V:
        """A result that several methods share, computed once for each score, rule and precision.

        `name` must identify all its other inputs, except the model, the images, the classes and the seed.
        """
        key = (name, self.score, self.rule.name, self.precision)
        if key not in self.shared:
            self.shared[key] = compute()
        return self.shared[key]  # type: ignore[no-any-return]

    def forward(self, reads: Reads) -> tuple[Mapping[tuple[str, int], Tensor], Tensor]:
        """Evidence by letter and block, and the scores [B,T], from a forward over the images.

        Methods that explain the same images share the forward.
        """
        shares = bool(self.together) and reads <= self.together
        reads = self.together if shares else reads

        def run() -> tuple[Mapping[tuple[str, int], Tensor], Tensor]:
            parts = sorted({part for part, _ in reads})
            jobs = [
                LayerJob(
                    lambda b, part=part: b.read(part),  # type: ignore[misc]
                    frozenset({part}),
                    tuple(layer for p, layer in reads if p == part),
                )
                for part in parts
            ]
            result = self.run(jobs)
            values = {(part, layer): v for j, part in enumerate(parts) for layer, v in result.layers(j).items()}
            return values, result.scores

        return self.once("forward", run) if shares else run()

    def run(self, jobs: Iterable[LayerJob], images: Tensor | None = None, tokens: Tensor | None = None) -> Pass:
        """Run a pass over other images, or over tokens that enter block 0, for the same classes and score.

        Both may contain k variants of each image, as k batches of B.
        """
        images = self.images if images is None else images
        targets = self.targets.repeat(len(images if tokens is None else tokens) // len(self.images))
        course = Course(tokens=tokens)
        return run_pass(self.vit, images, targets, self.score, self.rule, list(jobs), self.precision, course)


@dataclass(frozen=True, kw_only=True)
class Method(Entry):
    """The fields of all kinds of methods.

    Args:
        cost: The number of passes, in words.
        levels: Resolutions of the map, the default first.
        score: The default of what is explained.
        exact: Whether a batch equals single calls up to rounding; otherwise only in rank, as rounding is amplified.
        stochastic: Whether the map depends on the seed.
        nonnegative: Whether the map has no negative values.
        unsigned: Whether the sign of the score does not matter.
        advice: Why the map is degenerate with these settings; None if it is not.
        constant: Why a map may be constant, and what to use instead.
        refuses: Why a model cannot be explained with these settings; None if it can.
        depends: What the maps depend on besides code, settings and model, such as the weights of an explainer.
        precision: The meaning of "auto" on CUDA: the fastest precision that keeps the order of the patches.
        adapts: The values of settings that follow from the model.
    """

    paper: str = field()
    cost: str = "1 forward + 1 backward"
    levels: tuple[Level, ...] = ("token",)
    score: Literal["logit", "probability"] = "logit"
    exact: bool = True
    stochastic: bool = False
    nonnegative: bool = False
    unsigned: bool = False
    advice: Callable[[Settings, Anatomy], str | None] | None = None
    constant: str = ""
    refuses: Callable[[Settings, Anatomy], str | None] | None = None
    depends: Callable[[Settings], Any] | None = None
    precision: Decided = "fp16"
    adapts: Callable[[Settings, Anatomy], Settings] | None = None

    @property
    def group(self) -> str:
        """The group in `GROUPS`."""
        return _GROUP_OF.get(self.function.__module__, "other")

    @property
    def ignores_class(self) -> bool:
        """Whether every class gets the same map, with default settings."""
        return False

    @property
    def composition(self) -> Composition | None:
        """The default composition, if it has layer maps."""
        return None

    def evidence(self, settings: Settings) -> frozenset[str]:
        """The parts of the evidence that it reads."""
        return frozenset()

    def settings(self, composition: Composition | None) -> dict[str, Setting]:
        """The settings of the method and of a composition."""
        settings = {**settings_of(self.function), **(composition.settings if composition is not None else {})}
        if len(self.levels) > 1 and "level" not in settings:
            settings["level"] = Setting("level", Level, self.levels[0], LEVEL)
        return settings


PASSES = {"precision": Setting("precision", PassPrecision, "auto", PRECISION)}
"""Settings of all methods that run passes."""
CAPTURED = {
    "compile": Setting(
        "compile",
        bool,
        False,
        "Whether the shared pass is captured as a CUDA graph, which is faster where small batches of one shape repeat.",
    )
}


@dataclass(frozen=True, kw_only=True)
class ReadsBlocks(Method):
    """The common fields of layer maps and methods with their own passes.

    Args:
        needs: The parts of the evidence that it reads, or a function of the settings.
        combine: The default composition.
        matrix: Whether the layer maps are matrices.
        composable: Why no other composition can be used; None if it can.
        composed: Defaults under other compositions.
        features: Whether it reads activations at one place, which is the feature map of a hierarchical model.
    """

    needs: Needs = frozenset()
    combine: Composition | None = None
    matrix: bool = False
    composable: str | None = None
    composed: Settings = field(default_factory=dict)
    features: bool = False

    def __post_init__(self) -> None:
        unknown = set() if callable(self.needs) else set(self.needs) - PARTS
        if unknown:
            raise PatchlightError(f"method '{self.name}' needs {sorted(unknown)}; evidence is {sorted(PARTS)}")

    @property
    def composition(self) -> Composition | None:
        """The default composition."""
        return self.combine

    def settings(self, composition: Composition | None) -> dict[str, Setting]:
        """The settings of the method and of a composition."""
        return {**super().settings(composition), **PASSES}

    def evidence(self, settings: Settings) -> frozenset[str]:
        """The parts of the evidence that it reads."""
        return frozenset(self.needs(settings) if callable(self.needs) else self.needs)


@dataclass(frozen=True, kw_only=True)
class LayerMap(ReadsBlocks):
    """A method inside the pass: a function of the Evidence of one block, and its composition.

    Args:
        rule: The backward rule of the method.
        adds_end: Whether the bias terms after the last block are added to the map.
        course: The pass it is computed in, if that does not explain the model's own score.
    """

    needs: Needs = field()
    combine: Composition = field()
    rule: str = "plain"
    adds_end: bool = False
    course: Callable[[Settings, Anatomy], Course] = lambda settings, vit: WHOLE

    def settings(self, composition: Composition | None) -> dict[str, Setting]:
        """The settings of the method and of a composition."""
        return {**super().settings(composition), **CAPTURED}

    @property
    def ignores_class(self) -> bool:
        """Whether it reads no gradient with default settings."""
        defaults = {key: setting.default for key, setting in self.settings(self.combine).items()}
        return not self.evidence(defaults) & BACKWARD


@dataclass(frozen=True, kw_only=True)
class OwnPasses(ReadsBlocks):
    """A method with its own passes: a function of an Ask with one class per image.

    It returns maps [B,h,w] or an Estimate; with `combine`, a Pass with the maps of the blocks `ask.layers`.

    Args:
        ruled: Whether backward rules apply to its passes.
        ignores_class: Whether all classes have the same map.
        every_class: Whether its function uses no gradients, takes all classes and returns [B,T,h,w].
    """

    ruled: bool = True
    ignores_class: bool = False
    every_class: bool = False


@dataclass(frozen=True, kw_only=True)
class Ablates(Method):
    """A method that scores variants of the images: a function of an Ask with all classes.

    It returns maps [B,T,h,w] or an Estimate.

    Args:
        reads: The evidence that it reads with `Ask.forward`, so that several methods can share one forward.
    """

    cost: str = "many forwards"
    precision: Decided = "bf16"
    score: Literal["logit", "probability"] = "probability"
    reads: Callable[[Settings, Anatomy], Reads] | None = None

    def settings(self, composition: Composition | None) -> dict[str, Setting]:
        """The settings of the method."""
        return {**super().settings(composition), **ABLATION}


METHODS: Registry[Method] = Registry("method", list(_GROUP_OF))
COMPOSITIONS: Registry[Composition] = Registry("composition", ["patchlight.methods.compositions"])


layer_map = make_decorator(METHODS, LayerMap)
own_passes = make_decorator(METHODS, OwnPasses)
ablates = make_decorator(METHODS, Ablates)


def register_composition(
    name: str,
    *,
    span: Callable[[int, Settings], Iterable[int]],
    matrices_only: bool = False,
    aliases: tuple[str, ...] = (),
    staged: bool = False,
) -> Callable[[Callable[..., Tensor]], Composition]:
    """Register a function of LayerMaps as a composition whose name can be the suffix of a method's name.

    Args:
        name: Name of the composition.
        span: Returns the blocks that it reads, given the model's depth and the settings.
        matrices_only: Whether the layer maps must be matrices.
        aliases: Other names.
        staged: Whether it works on hierarchical models, because it uses `LayerMaps.vector`, `merged` and `lifted`.
    """

    def register(function: Callable[..., Tensor]) -> Composition:
        return COMPOSITIONS.add(Composition(function, span, name, matrices_only, aliases, staged))

    return register
