"""Resolves `name[.composition][.rule]` and settings to a request, and checks whether a model supports it."""

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
"""The methods of "auto": the first one that works on the model is used. All but the last take one pass."""


@dataclass(frozen=True)
class Request:
    """A method with its composition, rule and settings; `label` is the name of the result."""

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
    """The precision on the model, with "auto" resolved."""
    course: Course = WHOLE
    """The pass it is computed in."""
    choices: tuple[Request, ...] = field(default=(), repr=False)
    """The methods that "auto" chooses from when the model is known."""
    resolved_for: tuple[Anatomy, bool] | None = field(default=None, repr=False, compare=False)
    """The model that the request was resolved for, and whether float16 overflows there."""

    def suited(self, vit: Anatomy) -> Request:
        """The request for a model, with precision, course and the settings that follow from the model resolved.

        If the model has no probabilities, a method that explains a probability by default explains the logit.
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
        """The resolution of the map: "token" or "pixel"."""
        return cast(Level, self.settings.get("level", self.method.levels[0]))

    @property
    def needs(self) -> frozenset[str]:
        """The parts of the evidence that the method reads."""
        return self.method.evidence(self.settings)

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
        """Whether all classes have the same map, because the method reads nothing that depends on the class."""
        if not self.in_pass:
            return self.method.ignores_class
        rows_differ = self.resolved_for is not None and self.resolved_for[0].rows_differ
        return not self.backward and not (rows_differ and isinstance(self.method, LayerMap) and self.method.matrix)


def _precision(method: Method, settings: Settings, vit: Anatomy) -> Decided:
    auto = "tf32" if vit.overflows and method.precision == "fp16" else method.precision
    precision = chosen(settings.get("precision", "full"), vit.device, vit.dtype, auto)
    relevance = isinstance(method, OwnPasses) and not method.ruled  # the backward pass needs at least float32
    return "tf32" if relevance and precision in HALF else precision


def resolve(
    label: str, settings: Settings | None = None, score: Score | None = None, options: Sequence[str] = ()
) -> Request:
    """Resolve the name and settings of a method.

    Args:
        label: Name of the result, and of the method unless there is a setting `method`. "auto" is the first of `AUTO`
            that has the settings and works on the model, chosen by `Request.suited`.
        settings: The method's settings; `method`, `preset` and `score` may be among them.
        score: The score to explain; None: the method's default.
        options: Keywords of the caller. A wrong setting may be a misspelling of one.

    Raises:
        PatchlightError: The name or a setting is not valid; the message suggests valid ones.
    """
    settings = dict(settings or {})
    full_name = str(settings.pop("method", label))
    base, *suffixes = full_name.split(".")
    if base == "auto":
        return _resolve_auto(label, full_name, settings, score, options)
    if base not in METHODS and (base in COMPOSITIONS or (base in RULES and base != "plain")):
        raise PatchlightError(f"'{base}' is not a method; it follows one, as in 'ixg.{base}'")
    method = METHODS.find(base)
    composition_name, rule_name = _split_suffixes(full_name, suffixes)
    rule = _find_rule(method, rule_name)
    composition = method.composition if composition_name is None else _find_composition(method, composition_name)
    name = ".".join([method.name, *(word for word in (composition_name, rule_name) if word is not None)])
    defaults = dict(method.composed) if isinstance(method, ReadsBlocks) and composition_name is not None else {}
    defaults |= method.preset(settings.pop("preset", None))
    chosen_score = settings.pop("score", None)
    explained = chosen_score or defaults.get("score") or score or method.score
    valid = method.settings(composition)
    defaults = {key: value for key, value in defaults.items() if key in valid}
    if isinstance(method, LayerMap) and {**defaults, **settings}.get("level") == "pixel":
        _check_pixels(name, composition_name, settings)
    values = resolve_settings(name, valid, defaults, settings, ["preset", "score", *options])
    if not callable(explained) and explained not in get_args(ScoreName):
        raise PatchlightError(f"unknown score {explained!r}; {SCORES}")
    is_chosen = chosen_score is not None or score is not None
    return Request(label, name, method, composition, rule, values, explained, is_chosen)


def _resolve_auto(label: str, name: str, settings: Settings, score: Score | None, options: Sequence[str]) -> Request:
    """A request for the first method of `AUTO` that has the settings; all of these are its `choices`."""
    if name != "auto":
        raise PatchlightError(f"'{name}' does not exist: 'auto' chooses the composition and the rule; use 'auto' alone")
    choices: list[Request] = []
    errors: list[PatchlightError] = []
    for method in AUTO:
        try:
            choices.append(resolve(method, settings, score, options))
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


def _split_suffixes(name: str, suffixes: Sequence[str]) -> tuple[str | None, str | None]:
    """The names of the composition and of the rule among the suffixes of a name."""
    composition_name: str | None = None
    rule_name: str | None = None
    for word in suffixes:
        rule, composition = RULES.lookup(word), COMPOSITIONS.lookup(word)
        if rule is not None and rule is not PLAIN:
            if rule_name is not None:
                raise PatchlightError(f"'{name}' has two backward rules, '{rule_name}' and '{word}'; give one")
            rule_name = rule.name
        elif composition is not None:
            if composition_name is not None:
                raise PatchlightError(f"'{name}' has two compositions, '{composition_name}' and '{word}'; give one")
            composition_name = composition.name
        else:
            valid = [*COMPOSITIONS, *(valid_name for valid_name in RULES if valid_name != PLAIN.name)]
            raise PatchlightError(f"no composition or rule is called '{word}' (in '{name}'); {nearest(word, valid)}")
    return composition_name, rule_name


def _find_rule(method: Method, name: str | None) -> Rule:
    default = method.rule if isinstance(method, LayerMap) else "plain"
    if name is None:
        return RULES[default]
    if isinstance(method, OwnPasses) and not method.ruled:
        raise PatchlightError(f"'{method.name}' has its own relevance rules; '{name}' cannot replace them")
    if method.ignores_class or _is_forward_only(method):
        raise PatchlightError(f"'{method.name}' uses no gradient, so the backward rule '{name}' changes nothing")
    if default not in ("plain", name):
        raise PatchlightError(f"'{method.name}' has its own backward rule ({default}); '{name}' cannot replace it")
    return RULES[name]


def _is_forward_only(method: Method) -> bool:
    return isinstance(method, Ablates) or (isinstance(method, OwnPasses) and method.every_class)


def _find_composition(method: Method, name: str) -> Composition:
    composition = COMPOSITIONS[name]
    if isinstance(method, ReadsBlocks) and method.composable is not None:
        raise PatchlightError(f"'{method.name}' cannot be followed by '.{name}': {method.composable}")
    if not isinstance(method, ReadsBlocks) or method.combine is None:
        raise PatchlightError(f"'{method.name}' has no layer maps, so '.{name}' does not apply to it")
    if composition.matrices_only and not method.matrix:
        raise PatchlightError(f"'.{name}' multiplies token-to-token matrices; '{method.name}' has one value per token")
    return composition


def _check_pixels(name: str, composition: str | None, settings: Settings) -> None:
    """Raise an error if settings select blocks although the map is that of the image (level="pixel")."""
    if composition is not None:
        raise PatchlightError(f"'{name}' sums over blocks, but level='pixel' has no blocks; leave out level or the sum")
    if "start" in settings:
        raise PatchlightError(
            f"'{name}' explains the image itself at level='pixel', so start={settings['start']} does not apply"
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
    differentiates = needs & BACKWARD or not (method.ignores_class or _is_forward_only(method))
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
    """Why a model does not have the score to explain; None if it has."""
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
    """A row of the method table; `supported` and `reason` refer to the model of the table, if it has one."""

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
    """List all methods; with a model, also whether each works on it, and if not, why.

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
        settings = method.settings(method.composition)
        rows.append(
            MethodInfo(
                name=name,
                aliases=method.aliases,
                paper=method.paper,
                cost=method.cost,
                summary=method.summary,
                group=method.group,
                settings={key: str(setting) for key, setting in settings.items()},
                setting_texts={key: setting.text for key, setting in settings.items()},
                supported=None if vit is None else reason is None,
                reason=reason or "",
            )
        )
    return rows
