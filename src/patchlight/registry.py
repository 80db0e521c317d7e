"""The registry of methods: names and aliases, typed settings, wrappers, and what a model must have for a method.

A white-box method is a *layer map*, a function of the evidence of one block, and a *combiner* that makes one map of
the blocks' maps. Wrappers exchange the combiner (`.plus`, `.skipplus`, `.rollout`) or the backward rule (`.libra`, …).
Any other method is a function of an `Ask` that returns its map.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from patchlight.anatomy.base import Anatomy
from patchlight.errors import PatchlightError, Unsupported, nearest
from patchlight.evidence.ablation import Ablation, Count, Variants
from patchlight.evidence.passes import BACKWARD, EVIDENCE, PIXELS, LayerJob, Pass, run_pass
from patchlight.evidence.precision import Precision
from patchlight.evidence.rules import RULES, Rule
from patchlight.evidence.taps import Evidence
from patchlight.targets import Score, Targets

Level = Literal["token", "pixel"]
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class LayerMaps:
    """The layer maps of one class, as combiners read them.

    `values` by block: vectors [B,N] or matrices [B,N,N] (to, from); `pool` [B,N] is how the classifier reads the last
    tokens; `end` has the bias terms behind the last block.
    """

    values: dict[int, Any]
    vit: Anatomy
    pool: Tensor
    end: Evidence
    base: Callable[[LayerMaps, int], Tensor] | None = None
    """The method's own map restricted to the blocks from one on, where it has such a start."""

    def start_row(self, readout: str = "pooling") -> Tensor:
        """The row vector a product of matrices begins with: the classifier's own, or the CLS or mean patch row."""
        if readout == "pooling":
            return self.pool
        row = self.pool.new_zeros(self.pool.shape)
        if readout == "cls":
            if self.vit.prefix == 0:
                raise Unsupported(f"{self.vit.name} has no CLS token; readout 'pooling' and 'patches' work")
            row[:, 0] = 1
        else:
            row[:, self.vit.prefix :] = 1 / (row.shape[1] - self.vit.prefix)
        return row

    def vector(self, layer: int, readout: str = "pooling") -> Tensor:
        """A block's map [B,N]; of a matrix, the row the classifier reads."""
        value = self.values[layer]
        if not isinstance(value, Tensor):
            raise PatchlightError("these layer maps only sum over tails of the model; use terms='tail'")
        return value if value.ndim == 2 else times(self.start_row(readout), value)


def times(row: Tensor, matrix: Tensor) -> Tensor:
    """row [B,N] times matrix [B,N,N]."""
    return (row[:, None] @ matrix)[:, 0]


@dataclass(frozen=True)
class Composition:
    """How layer maps become one: a function of LayerMaps, and the blocks it reads, given depth and settings."""

    function: Callable[..., Tensor]
    span: Callable[[int, Settings], Iterable[int]]
    name: str = ""
    matrices_only: bool = False


@dataclass(frozen=True)
class Ask:
    """What a method that is not a layer map is given: the model, the images, one class per image, and a seed."""

    vit: Anatomy
    images: Tensor
    targets: Targets
    score: Score
    seed: int
    rule: Rule
    layers: tuple[int, ...] = ()
    how: Settings = field(default_factory=dict)

    @property
    def ablation(self) -> Ablation:
        """The engine that scores variants of these images, as the settings `chunk`, `precision`, `compile` say."""
        return Ablation(self.vit, self.images, **self.how)

    def score_variants(self, variants: Variants | Sequence[Variants]) -> Tensor:
        """The score of every variant for every class asked [V,T]."""
        return self.ablation.scores(variants, self.targets, self.score)

    def generator(self) -> torch.Generator:
        """A CPU generator for small draws, seeded by the seed alone: one per image, so that a batch equals a loop."""
        return torch.Generator().manual_seed(self.seed)

    def run(self, jobs: Iterable[LayerJob], images: Tensor | None = None, tokens: Tensor | None = None) -> Pass:
        """A pass over other images, or over tokens that enter block 0, with the same classes and score.

        Either may hold k variants of each image: k batches of B, one after another.
        """
        images = self.images if images is None else images
        targets = self.targets.repeat(len(images if tokens is None else tokens) // len(self.images))
        return run_pass(self.vit, images, targets, self.score, self.rule, list(jobs), tokens)


@dataclass(frozen=True)
class Method:
    """A registered method.

    `exact`: a batch equals single calls to rounding (else only in rank, since rounding flips a choice or is amplified).
    `unsigned`: the score's sign does not matter to it. `quick`: settings for a cheap run, used by tests and quick
    benchmarks. `composable`: why no composition may follow, where none may. `composed`: defaults that change under a
    composition. `advice`: why a map is degenerate, known beforehand; `constant`: why it may turn out constant, and what
    to use instead. `refuses`: why a model cannot be explained with these settings, beyond what `needs` says.
    `features`: it reads the activations of one place, which of a hierarchical model is its feature map.
    `own_pass`: its rules are its own, so it runs its own pass: the function takes an Ask, and with a combiner returns a
    Pass with maps of the blocks `ask.layers`. `ablates`: it scores variants of the images; it takes an Ask with all
    classes at once and returns [B,T,h,w]. `depends`: what its maps depend on besides code, settings and model, such as
    the weights of an explainer, as text.
    """

    name: str
    function: Callable[..., Any]
    paper: str
    aliases: tuple[str, ...] = ()
    needs: frozenset[str] | Callable[[Settings], frozenset[str]] = frozenset()
    combine: Composition | None = None
    class_specific: bool = True
    exact: bool = True
    stochastic: bool = False
    nonnegative: bool = False
    unsigned: bool = False
    quick: Mapping[str, Any] = field(default_factory=dict)
    rule: str = "plain"
    levels: tuple[Level, ...] = ("token",)
    cost: str = "1 forward + 1 backward"
    composable: str | None = None
    composed: Mapping[str, Any] = field(default_factory=dict)
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    advice: Callable[[Settings, Anatomy], str | None] | None = None
    constant: str = ""
    refuses: Callable[[Settings, Anatomy], str | None] | None = None
    features: bool = False
    own_pass: bool = False
    ablates: bool = False
    matrix: bool = False
    adds_end: bool = False
    default_score: Literal["logit", "probability"] = "logit"
    depends: Callable[[Settings], Any] | None = None

    @property
    def whitebox(self) -> bool:
        return self.combine is not None

    @cached_property
    def summary(self) -> str:
        return (inspect.getdoc(self.function) or "").split("\n")[0]

    def needed(self, settings: Settings) -> frozenset[str]:
        return self.needs(settings) if callable(self.needs) else self.needs


@dataclass(frozen=True)
class MethodInfo:
    """A line of the method table; `supported` and `reason` are about one model, where one was given."""

    name: str
    aliases: tuple[str, ...]
    paper: str
    cost: str
    summary: str
    settings: dict[str, str]
    supported: bool | None = None
    reason: str = ""


_METHODS: dict[str, Method] = {}
_ALIASES: dict[str, str] = {}
_COMBINERS: dict[str, Composition] = {}


def register_method(name: str, **about: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a method; its keyword arguments with their types and defaults are its settings.

    With `combine`, the function is a layer map: it takes the Evidence of one block, of which `needs` names the parts
    it reads. Without, it takes an Ask and returns maps [B,h,w].
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        needs = about.pop("needs", frozenset())
        fixed = needs if callable(needs) else frozenset(needs)
        unknown = frozenset() if callable(fixed) else fixed - EVIDENCE
        if unknown:
            raise PatchlightError(f"method '{name}' needs {sorted(unknown)}; evidence is {sorted(EVIDENCE)}")
        entry = Method(name, function, needs=fixed, **about)
        for key in (name, *entry.aliases):
            if key in _METHODS or key in _ALIASES:
                raise PatchlightError(f"a method called '{key}' is registered already")
        _METHODS[name] = entry
        _ALIASES.update(dict.fromkeys(entry.aliases, name))
        return function

    return register


def unregister(name: str) -> None:
    """Take a method out again."""
    entry = _METHODS.pop(name)
    for alias in entry.aliases:
        del _ALIASES[alias]


def register_composition(name: str, combiner: Composition) -> None:
    """Register a combiner as a wrapper that stands behind a method's name."""
    _COMBINERS[name] = combiner


def registered() -> dict[str, Method]:
    """All methods by name, the bundled ones loaded."""
    import patchlight.methods  # noqa: F401

    return _METHODS


@dataclass(frozen=True)
class Request:
    """A method as asked: name, wrappers and settings resolved."""

    asked: str
    method: Method
    combine: Composition | None
    rule: Rule
    settings: dict[str, Any]
    score: Score
    name: str

    @property
    def level(self) -> Level:
        level: Level = self.settings.get("level", self.method.levels[0])
        return level

    def job(self, vit: Anatomy) -> LayerJob:
        """What a pass has to compute for this request."""
        assert self.combine is not None
        settings = _accepted(self.method.function, self.settings)
        layers = (PIXELS,) if self.level == "pixel" else tuple(self.combine.span(vit.depth, self.settings))
        function = self.method.function
        return LayerJob(lambda e: function(e, **settings), self.method.needed(self.settings), layers)

    def ask(self, vit: Anatomy, images: Tensor, targets: Targets, seed: int) -> Tensor:
        """The map [B,h,w] of a method that takes an Ask; [B,T,h,w] of one that ablates."""
        layers = tuple(self.combine.span(vit.depth, self.settings)) if self.combine is not None else ()
        how = {key: self.settings[key] for key in HOW if key in self.settings}
        if not self.method.ablates:
            vit = vit.wide()
            images = images.to(vit.dtype)
        given = Ask(vit, images, targets, self.score, seed, self.rule, layers, how)
        result = self.method.function(given, **_accepted(self.method.function, self.settings))
        return self.finish(result.values[0][0], vit, result, 0) if isinstance(result, Pass) else result

    def finish(self, values: dict[int, Any], vit: Anatomy, seen: Pass, t: int) -> Tensor:
        """The map [B,h,w] of the t-th class from the layer maps of a pass."""
        assert self.combine is not None
        if self.level == "pixel":
            image: Tensor = values[PIXELS]
            return image
        pool = vit.pool_row(seen.logits, seen.pool)
        maps = LayerMaps(values, vit, pool, seen.end[t], self._tail())
        result = self.combine.function(maps, **_accepted(self.combine.function, self.settings))
        if self.method.adds_end and self.settings.get("include_bias", True) and maps.end.bias is not None:
            result = result + maps.end.bias
        return vit.patches(result)

    def _tail(self) -> Callable[[LayerMaps, int], Tensor] | None:
        own = self.method.combine
        if own is None or "start" not in _parameters(own.function):
            return None
        settings = {k: v for k, v in _accepted(own.function, self.settings).items() if k != "start"}
        return lambda maps, start: own.function(maps, start=start, **settings)

    def needs_backward(self) -> bool:
        return bool(self.method.needed(self.settings) & BACKWARD)


def resolve(
    asked: str, settings: Settings | None = None, score: Score | None = None, options: Sequence[str] = ()
) -> Request:
    """Read `name[.wrapper…]` and settings into a Request, or say what is wrong with it.

    `options` are the caller's own keywords, of which a wrong setting may be a misspelling.
    """
    base, *wrappers = asked.split(".")
    known = registered()
    entry = known.get(_ALIASES.get(base, base))
    if entry is None:
        raise PatchlightError(f"no method is called '{base}'; {nearest(base, [*known, *_ALIASES])}")
    rule, combine, composed = RULES[entry.rule], entry.combine, ""
    ruled = ""
    for word in wrappers:
        if word in RULES and word != "plain":
            if ruled:
                raise PatchlightError(f"'{asked}' has two backward rules, '{ruled}' and '{word}'; give one")
            rule, ruled = RULES[word], word
        elif word in _COMBINERS:
            if composed:
                raise PatchlightError(f"'{asked}' has two compositions, '{composed}' and '{word}'; give one")
            combine, composed = _composition(entry, word), word
        else:
            valid = [*_COMBINERS, *(r for r in RULES if r != "plain")]
            raise PatchlightError(f"no wrapper is called '{word}' (in '{asked}'); {nearest(word, valid)}")
    if ruled and not entry.class_specific:
        raise PatchlightError(f"'{entry.name}' uses no gradient, so the backward rule '{ruled}' changes nothing")
    if ruled and entry.rule != "plain" and entry.rule != ruled:
        raise PatchlightError(f"'{entry.name}' has its own backward rule ({entry.rule}); '{ruled}' cannot replace it")
    if ruled and entry.own_pass:
        raise PatchlightError(f"'{entry.name}' has relevance rules of its own; '{ruled}' cannot replace them")
    name = ".".join([entry.name, *([composed] if composed else []), *([ruled] if ruled else [])])
    values = _settings(name, entry, combine, bool(composed), dict(settings or {}), options)
    score = values.pop("score", None) or score or entry.default_score
    if not callable(score) and score not in ("logit", "probability"):
        raise PatchlightError(f"score {score!r} is not known; give 'logit', 'probability' or a callable of the logits")
    return Request(asked, entry, combine, rule, values, score, name)


def _composition(entry: Method, word: str) -> Composition:
    combiner = _COMBINERS[word]
    if entry.composable is not None:
        raise PatchlightError(f"'{entry.name}' cannot be followed by '.{word}': {entry.composable}")
    if not entry.whitebox:
        raise PatchlightError(f"'{entry.name}' has no layer maps, so '.{word}' does not apply to it")
    if combiner.matrices_only and not entry.matrix:
        raise PatchlightError(f"'.{word}' multiplies token-to-token matrices; '{entry.name}' has one value per token")
    return combiner


def _settings(
    name: str,
    entry: Method,
    combine: Composition | None,
    composed: bool,
    given: dict[str, Any],
    options: Sequence[str],
) -> dict[str, Any]:
    """Defaults, then the composition's, then a preset's, then what was given; each checked against its type."""
    allowed = parameters(entry, combine)
    values = {key: p.default for key, (p, _) in allowed.items()}
    if composed:
        values |= {k: v for k, v in entry.composed.items() if k in values}
    preset = given.pop("preset", None)
    if preset is not None:
        if preset not in entry.presets:
            hint = nearest(str(preset), entry.presets) if entry.presets else "it has none"
            raise PatchlightError(f"'{entry.name}' has no preset '{preset}'; {hint}")
        values |= {k: v for k, v in entry.presets[preset].items() if k in values or k == "score"}
    if "score" in given:
        values["score"] = given.pop("score")
    pixels = given.get("level", values.get("level")) == "pixel" and entry.whitebox
    if pixels and composed:
        raise PatchlightError(f"'{name}' sums over blocks, and level='pixel' has none; leave out level or the sum")
    for key, value in given.items():
        if pixels and key == "start":
            raise PatchlightError(
                f"'{name}' explains the image itself at level='pixel', so start={value} means nothing"
            )
        if key not in allowed:
            hint = nearest(key, [*allowed, "preset", "score", *options])
            raise PatchlightError(f"'{name}' has no setting '{key}'; {hint}")
        values[key] = checked(name, key, value, allowed[key][1])
    return values


def checked(name: str, key: str, value: Any, kind: Any) -> Any:
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise PatchlightError(f"setting {key}={value!r} of '{name}' is not valid: {reason}") from error


def parameters(entry: Method, combine: Composition | None) -> dict[str, tuple[inspect.Parameter, Any]]:
    """The settings of a method under a combiner: parameter and type by name."""
    found: dict[str, tuple[inspect.Parameter, Any]] = {}
    for function in (entry.function, combine.function if combine else None):
        if function is None:
            continue
        found |= _parameters(function)
    if "pixel" in entry.levels and len(entry.levels) > 1:
        default = inspect.Parameter("level", inspect.Parameter.KEYWORD_ONLY, default=entry.levels[0])
        found["level"] = (default, Level)
    if entry.ablates:
        found |= HOW
    return found


def _option(name: str, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)


HOW: dict[str, tuple[inspect.Parameter, Any]] = {
    "chunk": (_option("chunk", None), Count | None),
    "precision": (_option("precision", "auto"), Precision),
    "compile": (_option("compile", False), bool),
}


def _accepted(function: Callable[..., Any], settings: Settings) -> dict[str, Any]:
    return {key: settings[key] for key in _parameters(function) if key in settings}


@cache
def _parameters(function: Callable[..., Any]) -> dict[str, tuple[inspect.Parameter, Any]]:
    """Parameter and type by name of all but a function's first."""
    hints = get_type_hints(function, include_extras=True)
    return {key: (p, hints.get(key, Any)) for key, p in list(inspect.signature(function).parameters.items())[1:]}


def refusal(request: Request, vit: Anatomy) -> str | None:
    """Why this model cannot be explained with this method; None when it can."""
    needs = request.method.needed(request.settings)
    if vit.depth == 0 and request.method.features:
        return _no_feature_map(request, vit)
    if vit.depth == 0 and _reads_blocks(request):
        pixels = "pixel" in request.method.levels and not request.method.own_pass
        instead = "; level='pixel' works" if pixels else ""
        return f"it reads single transformer blocks, and {vit.name} is opened as a feature map with none{instead}"
    differentiates = needs & BACKWARD or (request.method.class_specific and not request.method.ablates)
    if differentiates and vit.gradient is not None:
        return f"no gradient flows through {vit.name}: {vit.gradient}"
    if needs & {"A", "G", "v"} and vit.attention is not None:
        return f"the attention of {vit.name} cannot be read: {vit.attention}"
    if needs & {"n", "gn"} and vit.parts(0).norm1 is None:
        return f"{vit.name} has no first norm in its blocks"
    if "u" in needs and vit.parts(0).norm2 is None:
        return f"{vit.name} has no second norm in its blocks, where the tokens after attention are read"
    return request.method.refuses(request.settings, vit) if request.method.refuses is not None else None


def _no_feature_map(request: Request, vit: Anatomy) -> str | None:
    """Why a hierarchical model's one feature map does not serve a request that reads one."""
    if request.combine is not request.method.combine:
        return (
            f"it sums over blocks, and {vit.name} is opened as a feature map with none; '{request.method.name}' works"
        )
    if request.rule.name != "plain":
        return f"backward rules are for plain blocks, which {vit.name} has not; '{request.method.name}' works"
    if request.settings["layer"] != parameters(request.method, request.combine)["layer"][0].default:
        return f"{vit.name} has no blocks to name as a layer; load it with another stage, and leave layer out"
    return None


def _reads_blocks(request: Request) -> bool:
    """Whether a method looks inside the model; one that scores variants says so itself, in `refuses`."""
    entry = request.method
    inside = request.combine is not None or (entry.class_specific and not entry.ablates)
    return inside and (request.level == "token" or entry.own_pass)


def check_supported(request: Request, vit: Anatomy) -> None:
    """Raise Unsupported, naming methods that do work, where a model lacks what a method needs."""
    reason = refusal(request, vit)
    if reason is not None:
        others = [m.name for m in list_methods(vit) if m.supported]
        raise Unsupported(f"'{request.name}' does not work here: {reason}; these do: {', '.join(others)}")


def list_methods(vit: Anatomy | None = None) -> list[MethodInfo]:
    """All methods; with a model, which of them work on it and why the others do not.

    >>> "genatt" in [m.name for m in list_methods()]                  # doctest: +SKIP
    True
    """
    if vit is not None and not isinstance(vit, Anatomy):
        from patchlight.anatomy.load import wrap

        vit = wrap(vit)
    rows = []
    for name, entry in sorted(registered().items()):
        reason = refusal(resolve(name), vit) if vit is not None else None
        settings = {k: f"{type_name(t)} = {p.default!r}" for k, (p, t) in parameters(entry, entry.combine).items()}
        supported = None if vit is None else reason is None
        rows.append(
            MethodInfo(name, entry.aliases, entry.paper, entry.cost, entry.summary, settings, supported, reason or "")
        )
    return rows


def type_name(kind: Any) -> str:
    """A type in words: "int >= 1 or 'all' or None"."""
    origin, inside = get_origin(kind), get_args(kind)
    if hasattr(kind, "__metadata__"):
        signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
        limits = [m for field_info in kind.__metadata__ for m in getattr(field_info, "metadata", ())]
        told = [f"{sign} {getattr(m, name)}" for m in limits for name, sign in signs.items() if hasattr(m, name)]
        return " ".join([type_name(kind.__origin__), " and ".join(told)]).strip()
    if origin is Literal:
        return " | ".join(map(repr, inside))
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(type_name, inside)))
    if origin is list:
        return f"list of {type_name(inside[0])}"
    return "None" if kind is NoneType else kind.__name__ if isinstance(kind, type) else str(kind)
