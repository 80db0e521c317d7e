"""What a method is. There are three kinds, each with a decorator: `layer_map`, `own_passes`, `ablates`.

A *layer map* is a function of the `Evidence` of one block; it runs inside the pass, and a `Composition` combines the
maps of the blocks. `.plus`, `.skipplus`, `.rollout` after a name replace the composition, `.libra`, … the rule. A
method with *its own passes* is a function of an `Ask`: the model, the images and one class for each. A method that
*ablates* scores variants of the images; its function takes an `Ask` with all classes at once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import torch
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

Level = Literal["token", "pixel"]
"""The resolution of a map: one value for each patch token, or for each pixel."""
Reads = frozenset[tuple[str, int]]
"""Parts of the evidence by letter and block, such as ("y", 3)."""
GROUPS: Mapping[str, str] = {
    "attention": "attention eclip legrad tokentm transition",
    "gradients": "dave gradients",
    "decomposition": "decomposition decompx position relevance",
    "CAM": "cams scorecam token_activation",
    "perturbation": "atman caap hsic lime mda occlusion pami posterior rise search tis vitcx",
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
    """The layer maps of one class, as compositions read them.

    In a hierarchical model the blocks of each stage have their own N. `merged` turns a row over the tokens that enter
    block l + 1 into one over those that leave block l; `lifted` turns values into those of the tokens that enter block
    0. A merged token's share is split equally among its children.

    Args:
        values: By block, vectors [B,N] or matrices [B,N,N] (to, from), which may be `Rows`.
        vit: The model.
        rows: Returns how the readout reads the states x_l [B,N_l], by l; the last is what the classifier reads.
        end: The bias terms after the last block.
        base: The method's map restricted to the blocks from one on, if it has a start.
    """

    values: Mapping[int, Any]
    vit: Anatomy
    rows: Callable[[], Mapping[int, Tensor]]
    end: EndBias = field(default_factory=EndBias)
    base: Callable[[LayerMaps, int], Tensor] | None = None

    @property
    def pool(self) -> Tensor:
        """How the classifier reads the last tokens [B,N]."""
        return self.rows()[self.vit.depth]

    def arriving(self, row: Tensor, layer: int) -> Tensor:
        """A row over the tokens that enter block `layer` as one over those that leave the block before it.

        What the readout reads of these itself is added.
        """
        row, rows = self.merged(row, layer), self.rows()
        return row + rows[layer] if layer in rows and layer < self.vit.depth else row

    def merged(self, row: Tensor, layer: int) -> Tensor:
        """Turn a row over the tokens that enter block `layer` into one over those that leave the block before it."""
        merging = self.vit.merging(layer)
        return row if merging is None else merging.pull(row)

    def lifted(self, values: Tensor, layer: int) -> Tensor:
        """Turn values [B,N] of the tokens entering block `layer` into those of block 0, with the same sum."""
        for index in range(layer, 0, -1):
            values = self.merged(values, index)
        return values

    def end_bias(self) -> Tensor | None:
        """The bias terms after the last block, as values of the tokens that enter block 0."""
        return None if self.end.bias is None else self.lifted(self.end.bias, self.vit.depth)

    def start_row(self, readout: str = "pooling") -> Tensor:
        """The row vector that a product of matrices begins with: the classifier's, the CLS row, or a mean row."""
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
        """A block's map [B,N], lifted; for a matrix, the row that the classifier reads."""
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
    """Why a method that starts at the tokens of the last block does not explain a readout of several."""
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
        span: The blocks that it reads, from the model's depth and the settings.
        name: The name, which may follow that of a method.
        matrices_only: Whether the layer maps must be matrices.
        aliases: Other names.
        staged: Whether it works on the stages of a hierarchical model, which have different tokens: it reads the maps
            with `vector`, or pulls rows with `merged` and `lifted`.
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
    """Maps [B,T,h,w], or of one class [B,h,w], with their sampling error.

    `error` is the standard error of each value, NaN if not known, and `samples` [B] the number of masks, coalitions or
    noises of each image's map; None if nothing was sampled. `facts` are other numbers that the method reports per image
    [B], by name, such as "masks", the number of masks of ViT-CX after clustering.
    """

    maps: Tensor
    error: Tensor | None = None
    samples: Tensor | None = None
    facts: Mapping[str, Tensor] = field(default_factory=dict)
    precision: str = ""
    """The precision it was computed in; "fp16+tf32" if batches differ."""

    @staticmethod
    def stacked(parts: Sequence[Estimate]) -> Estimate:
        """Join the maps of each class [B,h,w] to [B,T,h,w]."""
        errors = [part.error for part in parts if part.error is not None]
        return Estimate(
            torch.stack([part.maps for part in parts], 1),
            torch.stack(errors, 1) if errors else None,
            Estimate._most([part.samples for part in parts if part.samples is not None]),
            {name: torch.stack([part.facts[name] for part in parts]).amax(0) for name in parts[0].facts},
        )

    @staticmethod
    def concat(parts: Sequence[Estimate]) -> Estimate:
        """Join the maps of several batches of images."""
        errors = [part.error for part in parts if part.error is not None]
        counts = [part.samples for part in parts if part.samples is not None]
        maps, known = torch.cat([part.maps for part in parts]), len(errors) == len(parts)
        facts = {name: torch.cat([part.facts[name] for part in parts]) for name in _shared_names(parts)}
        precision = "+".join(dict.fromkeys(word for part in parts for word in part.precision.split("+")))
        error, samples = torch.cat(errors) if known else None, torch.cat(counts) if counts else None
        return Estimate(maps, error, samples, facts, precision)

    def select(self, images: Tensor) -> Estimate:
        """The estimate of some of the images, by index or by a boolean mask."""
        here, there = images.to(self.maps.device), images.cpu()
        return Estimate(
            self.maps[here],
            None if self.error is None else self.error[here],
            None if self.samples is None else self.samples[there],
            {name: values[there] for name, values in self.facts.items()},
        )

    @staticmethod
    def _most(counts: Sequence[Tensor]) -> Tensor | None:
        return torch.stack(list(counts)).amax(0) if counts else None


def _shared_names(parts: Sequence[Estimate]) -> list[str]:
    """The names of the facts that all parts report."""
    return [name for name in parts[0].facts if all(name in part.facts for part in parts)]


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
        together: What several of these methods read of the forward pass of the images.
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
        """The same for some of the images, by index."""
        return replace(
            self,
            images=self.images[images.to(self.images.device)],
            targets=self.targets[images],
            shared={},
            together=Reads(),
        )

    def score_variants(self, variants: Variants | Sequence[Variants]) -> Tensor:
        """The score of every variant for every class [V,T]."""
        return self.ablation.scores(variants, self.targets, self.score)

    def generator(self) -> torch.Generator:
        """A CPU generator seeded by the seed alone: the same for each image, so that a batch equals a loop."""
        return torch.Generator().manual_seed(self.seed)

    def once(self, name: Hashable, compute: Callable[[], V]) -> V:
        """A result that several methods share, computed once for each score, rule and precision.

        `name` must identify everything else it depends on, except the model, the images, the classes and the seed.
        """
        key = (name, self.score, self.rule.name, self.precision)
        if key not in self.shared:
            self.shared[key] = compute()
        return self.shared[key]  # type: ignore[no-any-return]

    def forward(self, reads: Reads) -> tuple[Mapping[tuple[str, int], Tensor], Tensor]:
        """Parts of the evidence, by letter and block, of a forward over the images; and their scores [B,T].

        Methods that explain the same images share that forward.
        """
        shares = bool(self.together) and reads <= self.together
        wanted = self.together if shares else reads

        def run() -> tuple[Mapping[tuple[str, int], Tensor], Tensor]:
            parts = sorted({part for part, _ in wanted})
            layers = [tuple(layer for p, layer in wanted if p == part) for part in parts]
            jobs = [
                LayerJob(lambda b, part=part: b.read(part), frozenset({part}), own)  # type: ignore[misc]
                for part, own in zip(parts, layers, strict=True)
            ]
            seen = self.run(jobs)
            values = {(part, layer): v for j, part in enumerate(parts) for layer, v in seen.layers(j).items()}
            return values, seen.scores

        return self.once("forward", run) if shares else run()

    def run(self, jobs: Iterable[LayerJob], images: Tensor | None = None, tokens: Tensor | None = None) -> Pass:
        """Run a pass over other images, or over tokens that enter block 0, with the same classes and score.

        Either may contain k variants of each image: k batches of B, one after another.
        """
        images = self.images if images is None else images
        targets = self.targets.repeat(len(images if tokens is None else tokens) // len(self.images))
        course = Course(tokens=tokens)
        return run_pass(self.vit, images, targets, self.score, self.rule, list(jobs), self.precision, course)


@dataclass(frozen=True, kw_only=True)
class Method(Entry):
    """Fields that all kinds of method have.

    `levels`: resolutions of its map, the default first. `score`: what it explains by default. `exact`: a batch equals
    single calls up to rounding (otherwise only in rank, because rounding flips a choice or is amplified). `unsigned`:
    the sign of the score does not matter. `advice`: why a map is degenerate, known beforehand; `constant`: why a map
    may be constant, and what to use instead. `refuses`: why a model cannot be explained with these settings. `depends`:
    what its maps depend on besides code, settings and model, such as the weights of an explainer, as text. `precision`:
    the meaning of "auto" on CUDA, the fastest that keeps the order of the patches. `adapts`: the values of settings
    that follow from the model.
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
        """The group of `GROUPS` that it is listed in."""
        return _GROUP_OF.get(self.function.__module__, "other")

    @property
    def ignores_class(self) -> bool:
        """Whether every class gets the same map, with default settings."""
        return False

    @property
    def composition(self) -> Composition | None:
        """How its layer maps are combined, if it has some."""
        return None

    def needed(self, settings: Settings) -> frozenset[str]:
        """The parts of the evidence that it reads."""
        return frozenset()

    def settings(self, composition: Composition | None) -> dict[str, Setting]:
        """Its settings under a composition."""
        own = {**settings_of(self.function), **(composition.settings if composition is not None else {})}
        if len(self.levels) > 1 and "level" not in own:
            own["level"] = Setting("level", Level, self.levels[0], "One value for each patch token, or for each pixel.")
        return own


PASSES = {"precision": Setting("precision", PassPrecision, "auto", PRECISION)}
"""Settings of everything that runs passes."""
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
    """What layer maps and methods with their own passes share.

    `needs`: the parts of the evidence it reads. `combine`: how its layer maps are combined; `matrix`: they are
    matrices. `composable`: why no other composition may follow its name, if so; `composed`: defaults that change under
    one. `features`: it reads the activations of one place, in a hierarchical model its feature map.
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
        """The settings of the method and its composition."""
        return {**super().settings(composition), **PASSES}

    def needed(self, settings: Settings) -> frozenset[str]:
        """The quantities that the method reads."""
        return frozenset(self.needs(settings) if callable(self.needs) else self.needs)


def _full_course(settings: Settings, vit: Anatomy) -> Course:
    return WHOLE


@dataclass(frozen=True, kw_only=True)
class LayerMap(ReadsBlocks):
    """A method inside the pass: a function of the Evidence of one block, and its composition.

    `rule`: the backward rule that is part of it. `adds_end`: the bias terms after the last block belong to the map.
    `course`: the pass it is computed in, if that does not explain the model's own score.
    """

    needs: Needs = field()
    combine: Composition = field()
    rule: str = "plain"
    adds_end: bool = False
    course: Callable[[Settings, Anatomy], Course] = _full_course

    def settings(self, composition: Composition | None) -> dict[str, Setting]:
        """The settings of the method and its composition."""
        return {**super().settings(composition), **CAPTURED}

    @property
    def ignores_class(self) -> bool:
        """Whether it reads no gradient, with its default settings."""
        defaults = {key: setting.default for key, setting in self.settings(self.combine).items()}
        return not self.needed(defaults) & BACKWARD


@dataclass(frozen=True, kw_only=True)
class OwnPasses(ReadsBlocks):
    """A method with its own passes: a function of an Ask with one class per image, to maps [B,h,w] or an Estimate.

    With `combine` it returns a Pass with the maps of the blocks `ask.layers`. `ruled`: backward rules apply to its
    passes. `ignores_class`: every class gets the same map. `every_class`: its function takes all classes at once and
    returns [B,T,h,w], without gradients.
    """

    ruled: bool = True
    ignores_class: bool = False
    every_class: bool = False


@dataclass(frozen=True, kw_only=True)
class Ablates(Method):
    """A method that scores variants of the images: a function of an Ask with all classes at once.

    It returns maps [B,T,h,w], or an Estimate of them. `reads`: what it reads of the images' forward by `Ask.forward`,
    which several such methods share.
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
    """Register a function of LayerMaps as a composition that may follow a method's name.

    Args:
        name: Name of the composition.
        span: The blocks it reads, from the model's depth and the settings.
        matrices_only: Whether the layer maps must be matrices.
        aliases: Other names.
        staged: Whether it reads the blocks' maps by `LayerMaps.vector`, or pulls rows by `merged` and `lifted`, so that
            it works on hierarchical models too.
    """

    def register(function: Callable[..., Tensor]) -> Composition:
        return COMPOSITIONS.add(Composition(function, span, name, matrices_only, aliases, staged))

    return register
