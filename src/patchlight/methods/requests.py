"""From `name[.composition][.rule]` and settings to a request, and whether a model supports it."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any, cast, get_args

from torch import nn

from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import PatchlightError, Unsupported, nearest
from patchlight.core.registry import Settings, TableList, resolve_settings
from patchlight.core.targets import SCORES, Score, ScoreName, Targets
from patchlight.evidence.fills import no_fill
from patchlight.evidence.precision import HALF, Decided, chosen
from patchlight.evidence.record import ATTENTION, BACKWARD
from patchlight.evidence.rules import PLAIN, RULES, Rule
from patchlight.evidence.runner import WHOLE, Course
from patchlight.methods.base import (
    COMPOSITIONS,
    METHODS,
    Ablates,
    Composition,
    LayerMap,
    Level,
    Method,
    OwnPasses,
    ReadsBlocks,
    follows_one_state,
)

AUTO = ("fullgrad-plus.libra", "decompx.plus", "genatt", "fullgrad-plus", "gradcam", "grad", "posterior")
"""What `method="auto"` means: the first of these that works on the model. All but the last take one pass."""


@dataclass(frozen=True)
class Request:
    """A method with name, composition, rule and settings resolved; `label` is the name of the result."""

    label: str
    name: str
    method: Method
    composition: Composition | None
    rule: Rule
    settings: dict[str, Any]
    score: Score
    chosen_score: bool = True
    """Whether the user chose the score; otherwise it is the method's default."""
    precision: Decided = "full"
    """The precision on the model, with `auto` resolved."""
    course: Course = WHOLE
    """The pass it is computed in."""
    choices: tuple[Request, ...] = field(default=(), repr=False)
    """What "auto" chooses from once the model is known."""
    resolved_for: tuple[Anatomy, bool] | None = field(default=None, repr=False, compare=False)
    """The model that all of this was resolved for, and whether float16 overflows there."""

    def suited(self, vit: Anatomy) -> Request:
        """The request for a model: settings that follow from the model, precision and course are resolved.

        If the model has no probabilities, a method that explains one by default explains the logit. A request that is
        already suited to the model is returned unchanged.
        """
        now = (vit, vit.overflows)
        if self.resolved_for is not None and self.resolved_for[0] is vit and self.resolved_for[1] == vit.overflows:
            return self
        if self.choices:
            order = {name: place for place, name in enumerate(vit.prefers)}
            suited = [choice.suited(vit) for choice in sorted(self.choices, key=lambda each: order.get(each.name, 9))]
            chosen = next((choice for choice in suited if refusal(choice, vit) is None), suited[0])
            return replace(chosen, label=self.label)
        adapts, method = self.method.adapts, self.method
        settings = self.settings if adapts is None else {**self.settings, **adapts(self.settings, vit)}
        unscored = self.score == "probability" and vit.outputs.no_probability(vit.classes) is not None
        return replace(
            self,
            settings=settings,
            score="logit" if unscored and not self.chosen_score else self.score,
            precision=_precision(method, settings, vit),
            course=method.course(settings, vit) if isinstance(method, LayerMap) else WHOLE,
            resolved_for=now,
        )

    @property
    def level(self) -> Level:
        """Whether scores belong to patches or pixels."""
        return cast(Level, self.settings.get("level", self.method.levels[0]))

    @property
    def needs(self) -> frozenset[str]:
        """The quantities that the method reads."""
        return self.method.needed(self.settings)

    @property
    def in_pass(self) -> bool:
        """Whether it is computed inside the shared pass."""
        return isinstance(self.method, LayerMap)

    @property
    def backward(self) -> bool:
        """Whether it reads a gradient."""
        return bool(self.needs & BACKWARD)

    @property
    def ignores_class(self) -> bool:
        """Whether every class gets the same map: the method reads no gradient and nothing else of the class."""
        if not self.in_pass:
            return self.method.ignores_class
        rows_differ = self.resolved_for is not None and self.resolved_for[0].rows_differ
        return not self.backward and not (rows_differ and isinstance(self.method, LayerMap) and self.method.matrix)


def _precision(method: Method, settings: Settings, vit: Anatomy) -> Decided:
    auto = "tf32" if vit.overflows and method.precision == "fp16" else method.precision
    found = chosen(settings.get("precision", "full"), vit.device, vit.dtype, auto)
    relevance = isinstance(method, OwnPasses) and not method.ruled  # the backward pass needs at least float32
    return "tf32" if relevance and found in HALF else found


def resolve(
    label: str, settings: Settings | None = None, score: Score | None = None, options: Sequence[str] = ()
) -> Request:
    """Read a method's name and settings.

    Args:
        label: Name of the result, and of the method unless there is a setting `method`. "auto" is the first of `AUTO`
            that takes the settings and works on the model; `Request.suited` chooses it. Settings that no method of
            one pass takes are refused.
        settings: The method's settings; `method`, `preset` and `score` may be among them.
        score: The number to explain; None: the method's default.
        options: Keywords of the caller. A wrong setting may be a misspelling of one.

    Raises:
        PatchlightError: The name or a setting is wrong; the message suggests what was meant.
    """
    given = dict(settings or {})
    asked = str(given.pop("method", label))
    base, *words = asked.split(".")
    if base == "auto":
        return _resolve_auto(label, asked, given, score, options)
    if base not in METHODS and (base in COMPOSITIONS or (base in RULES and base != "plain")):
        raise PatchlightError(f"'{base}' is not a method; it follows one, as in 'ixg.{base}'")
    method = METHODS.find(base)
    composed, ruled = _split_words(asked, words)
    rule = _find_rule(method, ruled)
    composition = method.composition if composed is None else _find_composition(method, composed)
    name = ".".join([method.name, *(word for word in (composed, ruled) if word is not None)])
    start = method.composed if isinstance(method, ReadsBlocks) and composed is not None else {}
    known = method.settings(composition)
    start = {**start, **method.preset(given.pop("preset", None))}
    given_score = given.pop("score", None)
    start_score = start.get("score")
    start = {key: value for key, value in start.items() if key in known}
    if isinstance(method, LayerMap) and {**start, **given}.get("level") == "pixel":
        _check_pixels(name, composed, given)
    values = resolve_settings(name, known, start, given, ["preset", "score", *options])
    own_score = given_score or start_score or score or method.score
    if not callable(own_score) and own_score not in get_args(ScoreName):
        raise PatchlightError(f"unknown score {own_score!r}; {SCORES}")
    chosen_score = given_score is not None or score is not None
    return Request(label, name, method, composition, rule, values, own_score, chosen_score)


def _resolve_auto(label: str, asked: str, settings: Settings, score: Score | None, options: Sequence[str]) -> Request:
    """A request for the first method of `AUTO` that takes the settings; the others are its `choices`."""
    if asked != "auto":
        raise PatchlightError(
            f"'{asked}' does not exist: 'auto' chooses the composition and the rule; use 'auto' alone"
        )
    choices: list[Request] = []
    errors: list[PatchlightError] = []
    for name in AUTO:
        try:
            choices.append(resolve(name, settings, score, options))
        except PatchlightError as error:
            errors.append(error)
    if not choices:
        raise errors[0]
    if choices[0].name == AUTO[-1]:
        raise PatchlightError(
            f"'auto' selects a one-pass method, and none of them has the setting {', '.join(map(repr, settings))}; "
            f"name the method, such as method='{AUTO[-1]}'"
        )
    return replace(choices[0], label=label, name="auto", choices=tuple(choices))


def _split_words(asked: str, words: Sequence[str]) -> tuple[str | None, str | None]:
    """The composition and the rule that follow a name."""
    composed: str | None = None
    ruled: str | None = None
    for word in words:
        rule, composition = RULES.lookup(word), COMPOSITIONS.lookup(word)
        if rule is not None and rule is not PLAIN:
            if ruled is not None:
                raise PatchlightError(f"'{asked}' has two backward rules, '{ruled}' and '{word}'; give one")
            ruled = rule.name
        elif composition is not None:
            if composed is not None:
                raise PatchlightError(f"'{asked}' has two compositions, '{composed}' and '{word}'; give one")
            composed = composition.name
        else:
            valid = [*COMPOSITIONS, *(name for name in RULES if name != PLAIN.name)]
            raise PatchlightError(f"no composition or rule is called '{word}' (in '{asked}'); {nearest(word, valid)}")
    return composed, ruled


def _find_rule(method: Method, ruled: str | None) -> Rule:
    own = method.rule if isinstance(method, LayerMap) else "plain"
    if ruled is None:
        return RULES[own]
    if isinstance(method, OwnPasses) and not method.ruled:
        raise PatchlightError(f"'{method.name}' has its own relevance rules; '{ruled}' cannot replace them")
    if isinstance(method, Ablates) or method.ignores_class or _without_gradient(method):
        raise PatchlightError(f"'{method.name}' uses no gradient, so the backward rule '{ruled}' changes nothing")
    if own not in ("plain", ruled):
        raise PatchlightError(f"'{method.name}' has its own backward rule ({own}); '{ruled}' cannot replace it")
    return RULES[ruled]


def _without_gradient(method: Method) -> bool:
    return isinstance(method, OwnPasses) and method.every_class


def _find_composition(method: Method, word: str) -> Composition:
    composition = COMPOSITIONS[word]
    if isinstance(method, ReadsBlocks) and method.composable is not None:
        raise PatchlightError(f"'{method.name}' cannot be followed by '.{word}': {method.composable}")
    if not isinstance(method, ReadsBlocks) or method.combine is None:
        raise PatchlightError(f"'{method.name}' has no layer maps, so '.{word}' does not apply to it")
    if composition.matrices_only and not method.matrix:
        raise PatchlightError(f"'.{word}' multiplies token-to-token matrices; '{method.name}' has one value per token")
    return composition


def _check_pixels(name: str, composed: str | None, given: Settings) -> None:
    """Refuse settings about blocks at level="pixel", where a layer map is that of the image itself."""
    if composed is not None:
        raise PatchlightError(f"'{name}' sums over blocks, but level='pixel' has no blocks; leave out level or the sum")
    if "start" in given:
        raise PatchlightError(
            f"'{name}' explains the image itself at level='pixel', so start={given['start']} does not apply"
        )


def refusal(request: Request, vit: Anatomy) -> str | None:
    """Why this model cannot be explained with this method; None if it can."""
    request = request.suited(vit) if request.choices else request
    method, needs = request.method, request.needs
    unscored = _no_score(request, vit)
    if unscored is not None:
        return unscored
    if vit.hierarchical and isinstance(method, ReadsBlocks) and method.features:
        return _no_feature_map(request, method, vit)
    if vit.depth == 0 and _reads_blocks(request):
        instead = "; level='pixel' works" if "pixel" in method.levels and request.in_pass else ""
        without = vit.can_attend or f"{vit.name} is opened as a feature map without blocks"
        return f"it reads single transformer blocks, and {without}{instead}"
    if (vit.hierarchical or vit.windows > 1) and _reads_blocks(request):
        several = _one_grid(request, method, vit)
        if several is not None:
            return several
    if vit.several_states and isinstance(method, LayerMap) and method.course(request.settings, vit).local is not None:
        return follows_one_state(request.settings, vit)
    if request.rule.name != "plain" and vit.can_rule is not None:
        return f"the backward rule '{request.rule.name}' does not hold for {vit.name}: {vit.can_rule}"
    if method.group == "decomposition" and vit.can_decompose is not None:
        return f"{vit.name} cannot be decomposed: {vit.can_decompose}"
    forward = isinstance(method, Ablates) or _without_gradient(method)
    differentiates = needs & BACKWARD or not (method.ignores_class or forward)
    if differentiates and vit.gradient is not None:
        return f"no gradient flows through {vit.name}: {vit.gradient}"
    if needs & ATTENTION and vit.attention is not None:
        return f"the attention of {vit.name} cannot be read: {vit.attention}"
    read = isinstance(method, LayerMap) and method.matrix
    if vit.pools_only and needs & (ATTENTION - {"A"} if read else ATTENTION):
        return f"{vit.name} uses attention only for pooling, not between tiles"
    settings = request.settings
    hidden = unavailable(needs, vit) or (
        None if settings.get("unit") == "token" else no_fill(settings.get("fill"), vit)
    )
    if hidden is not None:
        return f"{hidden}; layer='input' works" if "n" in needs and "layer" in settings else hidden
    return method.refuses(request.settings, vit) if method.refuses is not None else None


def unavailable(needs: AbstractSet[str], vit: Anatomy) -> str | None:
    """Why tokens inside the blocks (`n`, `o`, `u` of `Evidence`) cannot be read; None if they can."""
    parts = vit.parts(0)
    beyond = f": {parts.beyond}" if parts.beyond else ""
    if needs & {"n", "gn"} and parts.norm1 is None:
        return f"{vit.name} has no first norm in its blocks{beyond}"
    if needs & {"o", "go"} and parts.out is None:
        return f"the output of the attention modules of {vit.name} is not available{beyond}"
    if "u" in needs and parts.norm2 is None:
        return f"the tokens between attention and MLP are not available in {vit.name}{beyond}"
    return None


def _no_score(request: Request, vit: Anatomy) -> str | None:
    """Why the number to explain does not exist; None if it does."""
    if request.score == "probability" and request.chosen_score:
        reason = vit.outputs.no_probability(vit.classes)
        return None if reason is None else f"{vit.name} has no probabilities: {reason}; score='logit' works"
    if request.score == "cosine" and vit.outputs.scale is None:
        return f"the logits of {vit.name} are not computed from cosines; score='logit' explains them as they are"
    return None


def _no_feature_map(request: Request, method: ReadsBlocks, vit: Anatomy) -> str | None:
    """Why a request cannot use the single feature map of a hierarchical model; None if it can."""
    if request.composition is not method.combine:
        return f"it reads one feature map of {vit.name} and no blocks to sum over; '{method.name}' works"
    if request.rule.name != "plain" and vit.depth == 0:
        return f"backward rules need readable blocks, and {vit.name} has none; '{method.name}' works"
    if request.settings["layer"] != method.settings(method.combine)["layer"].default:
        return (
            f"it reads the feature map of {vit.name} and has no blocks to name as a layer; load it with another stage, "
            "and leave layer out"
        )
    return None


def _one_grid(request: Request, method: Method, vit: Anatomy) -> str | None:
    """Why a method that reads blocks cannot read those of stages or windows; None if it can."""
    if "v" in request.needs:
        return f"it reads the values of all tokens together, and attention of {vit.name} is between some of them"
    composition = request.composition
    one = bool(request.needs & {"A", "G"}) if composition is None else not composition.staged
    if one and vit.hierarchical:
        return f"it combines maps over one grid of tokens, and the stages of {vit.name} have several grids"
    return None


def _reads_blocks(request: Request) -> bool:
    """Whether a method reads blocks; methods that score variants check this in `refuses`."""
    method = request.method
    inside = request.in_pass or (isinstance(method, OwnPasses) and not method.ignores_class)
    return inside and (request.level == "token" or (isinstance(method, OwnPasses) and not method.ruled))


def check_supported(request: Request, vit: Anatomy) -> None:
    """Raise Unsupported, with a list of methods that work, if a model lacks what a method needs."""
    reason = refusal(request, vit)
    if reason is not None:
        others = [m.name for m in list_methods(vit) if m.supported]
        if request.name in others:  # only these settings do not work
            raise Unsupported(f"'{request.name}' does not work with these settings: {reason}")
        raise Unsupported(f"'{request.name}' does not work here: {reason}; methods that work: {', '.join(others)}")


def check_contrast(request: Request, targets: Targets | None, vit: Anatomy) -> None:
    """Raise Unsupported if a method that ignores the class is used for one class against another.

    The random baseline is allowed, because other methods are compared with it.
    """
    request = request.suited(vit)
    if targets is None or targets.against is None or not request.ignores_class or request.name == "random":
        return
    others = [f"'{name}'" for name in AUTO if refusal(resolve(name), vit) is None][:3]
    raise Unsupported(
        f"'{request.name}' ignores the class, so it cannot show one class against another; "
        f"these methods can: {', '.join(others)}"
    )


@dataclass(frozen=True)
class MethodInfo:
    """A row of the method table; `supported` and `reason` refer to the model, if one was given."""

    name: str
    aliases: tuple[str, ...]
    paper: str
    cost: str
    summary: str
    group: str
    """One of `patchlight.methods.base.GROUPS`."""
    settings: dict[str, str]
    """Type and default, by name."""
    setting_texts: dict[str, str]
    """What each setting does, by name."""
    supported: bool | None = None
    reason: str = ""

    def cells(self) -> dict[str, str]:
        """The row by column heading."""
        works = {} if self.supported is None else {"works": "yes" if self.supported else f"no: {self.reason}"}
        words = {"group": self.group, "what it shows": self.summary, "cost": self.cost, "paper": self.paper}
        return {"method": self.name, **works, **words, "settings": ", ".join(self.settings)}


def list_methods(vit: Anatomy | nn.Module | None = None) -> TableList[MethodInfo]:
    """All methods; with a model, which of them work on it and why the others do not.

    Args:
        vit: The model.

    Example:
        >>> "genatt" in [m.name for m in list_methods()]
        True
    """
    if vit is not None:
        from patchlight.anatomy.load import wrap

        vit = wrap(vit)
    rows: TableList[MethodInfo] = TableList()
    for name, method in METHODS.items():
        reason = refusal(resolve(name), vit) if vit is not None else None
        own = method.settings(method.composition)
        settings, texts = ({k: f(s) for k, s in own.items()} for f in (str, lambda setting: setting.text))
        supported = None if vit is None else reason is None
        rows.append(
            MethodInfo(
                name,
                method.aliases,
                method.paper,
                method.cost,
                method.summary,
                method.group,
                settings,
                texts,
                supported,
                reason or "",
            )
        )
    return rows
