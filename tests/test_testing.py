"""The contract test of metrics fails for a metric that breaks it, with the right message."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import Unsupported
from patchlight.metrics.base import METRICS, Evaluation, Measure, Measured, register_metric
from patchlight.testing import check_metric
from tests.families import build, images, shared
from tests.literal.toys import linear

Function = Callable[[Measure], Measured]


def share(ask: Measure) -> Tensor:
    """The share of the map's sum in its upper half [B]: a correct metric."""
    maps = ask.maps.double()
    total = maps.abs().sum((1, 2))
    return maps[:, : maps.shape[1] // 2].abs().sum((1, 2)) / torch.where(total > 0, total, 1)


def checked(function: Function, vit: Anatomy | None = None, **about: Any) -> Evaluation | None:
    """The message of check_metric for a function."""
    given = {key: about.pop(key) for key in ("better", "worse", "chance", "labels", "boxes", "masks") if key in about}
    facts: dict[str, Any] = {"paper": "an example", "higher_is_better": True, **about}
    function.__annotations__ = {"ask": Measure, "return": Measured}
    if inspect.getdoc(function) is None and facts.pop("documented", True):
        function.__doc__ = "The share of the upper half."
    facts.pop("documented", None)
    register_metric("upper-half", **facts)(function)
    vit = shared("vit") if vit is None else vit
    try:
        return check_metric("upper-half", vit, images(vit, 2), **given)
    finally:
        METRICS.remove("upper-half")


def upper_and_lower() -> tuple[Tensor, Tensor]:
    upper = torch.full((2, 4, 4), 0.1)
    upper[:, 0] = 1
    return upper, upper.flip(1)


def test_a_good_metric_passes() -> None:
    better, worse = upper_and_lower()
    chance = torch.full((2,), 0.5).double()
    found = checked(lambda ask: Measured(share(ask)), better=better, worse=worse, chance=chance)
    assert found is not None
    assert found.values.shape == (2,)


def read_batch(ask: Measure) -> Measured:
    return Measured((share(ask) + share(ask).mean()) / 2)


def read_seed(ask: Measure) -> Measured:
    noise = torch.rand(1, generator=torch.Generator().manual_seed(ask.seed)).double()
    return Measured((share(ask) + noise) / 2)


def read_global_state(ask: Measure) -> Measured:
    return Measured(share(ask) * torch.rand(len(ask.maps)))


def move_global_state(ask: Measure) -> Measured:
    torch.rand(1)
    return Measured(share(ask))


def read_others(ask: Measure) -> Measured:
    """The value depends on what another metric of the call has stored."""
    return Measured(share(ask) / (1 + len(ask.shared)))


def read_earlier(ask: Measure) -> Measured:
    """The value depends on what an earlier batch has stored."""
    ask.kept["seen"] = ask.kept.get("seen", 0) + 1
    return Measured(share(ask) / ask.kept["seen"])


def write_maps(ask: Measure) -> Measured:
    values = share(ask)
    ask.maps.clamp_(max=0.5)
    return Measured(values)


def write_shared(ask: Measure) -> Measured:
    for kept in ask.shared.values():
        kept.zero_()
    return Measured(share(ask))


def write_images(ask: Measure) -> Measured:
    ask.images.mul_(0.5)
    return Measured(share(ask))


def write_model(ask: Measure) -> Measured:
    with torch.no_grad():
        ask.vit.model.head.bias.add_(1.0)
    return Measured(share(ask))


def leave_training(ask: Measure) -> Measured:
    ask.vit.model.train()
    return Measured(share(ask))


def divide_by_spread(ask: Measure) -> Measured:
    """A constant map has no spread: torch and `evaluate` return inf or NaN, but an exception is a crash."""
    if bool((ask.maps.flatten(1).std(1) == 0).any()):
        raise ZeroDivisionError("no spread")
    return Measured(share(ask))


def mix_odd_maps(ask: Measure) -> Measured:
    """A constant map changes the other values of its batch."""
    dead = (ask.maps.flatten(1).std(1) == 0).any()
    return Measured(share(ask) * (0.5 if bool(dead) else 1.0))


def out_of_bounds_when_constant(ask: Measure) -> Measured:
    return Measured(torch.where(ask.maps.flatten(1).std(1) == 0, 7.0, share(ask)))


def patches_only(ask: Measure) -> Measured:
    return Measured(share(ask) * (3.0 if ask.maps.shape[-1] == 4 else 1.0))


FAULTS: dict[str, tuple[Function, dict[str, Any], str]] = {
    "below its bounds": (lambda ask: Measured(share(ask) - 1), {}, r"is not in \[0.0, 1.0\]"),
    "above its bounds": (lambda ask: Measured(share(ask) + 0.9), {}, r"is not in \[0.0, 1.0\]"),
    "out of its bounds on patches": (patches_only, {}, r"is not in \[0.0, 1.0\]"),
    "out of its bounds on a constant map": (out_of_bounds_when_constant, {}, r"is not in \[0.0, 1.0\]"),
    "another shape": (lambda ask: Measured(share(ask)[:, None].expand(-1, 2).flatten()), {}, "values have shape"),
    "no value at all": (lambda ask: Measured(share(ask) * torch.nan), {}, "no image has a value"),
    "a curve of another length": (
        lambda ask: Measured(share(ask), share(ask)[:, None].expand(-1, 3), torch.arange(4.0)),
        {},
        "the curve has shape",
    ),
    "a bare curve": (
        lambda ask: Measured(share(ask), share(ask)[:, None].expand(-1, 3)),
        {},
        "without an axis",
    ),
    "an axis that falls": (
        lambda ask: Measured(share(ask), share(ask)[:, None].expand(-1, 3), torch.tensor([0.0, 1.0, 0.5])),
        {},
        "axis does not rise",
    ),
    "a curve that is not finite": (
        lambda ask: Measured(share(ask), torch.full((len(ask.maps), 3), torch.inf), torch.arange(3.0)),
        {},
        "the curve of a value is not finite",
    ),
    "no direction": (lambda ask: Measured(share(ask)), {"higher_is_better": 1}, "no direction"),
    "a batch that is no loop": (read_batch, {}, "single calls and a batch"),
    "a mean that is no loop's": (
        lambda ask: Measured(share(ask), parts={"a": share(ask) * 0 + len(ask.maps)}),
        {"combine": lambda sums: sums["a"] / 10},
        "the mean of single calls",
    ),
    "among others": (read_others, {}, "among others and alone"),
    "batches to come": (read_earlier, {}, "batch_size=1 and one batch"),
    "a seed that is not told": (read_seed, {}, "another seed changes the values"),
    "a seed that is not there": (lambda ask: Measured(share(ask)), {"stochastic": True}, "does not change the values"),
    "the global random state read": (read_global_state, {}, "two equal calls differ"),
    "the global random state moved": (move_global_state, {}, "the global random state changed"),
    "maps written to": (write_maps, {}, "another metric after sparseness and before sparseness"),
    "what others share, written to": (write_shared, {}, "another metric after aopc and before aopc"),
    "others beside a constant map": (mix_odd_maps, {}, "beside a constant map and without"),
    "the wrong direction": (
        lambda ask: Measured(share(ask)),
        {"higher_is_better": False, **dict(zip(("better", "worse"), upper_and_lower(), strict=True))},
        "lower is better, but the better maps have",
    ),
    "chance": (
        lambda ask: Measured(share(ask)),
        {"chance": torch.full((2,), 0.55).double()},
        r"random maps have .*, not \[0.55",
    ),
    "no docstring": (lambda ask: Measured(share(ask)), {"documented": False}, "no docstring"),
    "no paper": (lambda ask: Measured(share(ask)), {"paper": ""}, "no paper"),
    "an empty preset": (
        lambda ask: Measured(share(ask)),
        {"bounds": (1.0, 0.0)},
        r"is not in \[1.0, 0.0\]",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_out(fault: str) -> None:
    function, about, sentence = FAULTS[fault]
    with pytest.raises(AssertionError, match=sentence):
        checked(function, **about)


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (write_images, "images changed|logits changed"),
        (write_model, "changed|differ"),
        (leave_training, "modes changed"),
    ],
)
def test_a_model_that_is_not_left_alone_is_found_out(function: Function, sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        checked(function, build("vit"))


def test_a_crash_on_a_constant_map_is_no_value() -> None:
    with pytest.raises(ZeroDivisionError):
        checked(divide_by_spread)


def test_a_crash_without_annotations_is_no_refusal() -> None:
    """A metric that reads labels without declaring them gets None."""

    def reads_labels(ask: Measure) -> Measured:
        return Measured(share(ask) * (ask.labels >= 0))  # type: ignore[operator]

    with pytest.raises(TypeError):
        checked(reads_labels)
    assert checked(reads_labels, labels=[0, 1], needs={"labels"}) is not None


def test_a_number_for_an_image_without_annotations_is_found_out() -> None:
    boxes = [[[0, 0, 9, 9]], [[3, 3, 20, 20]]]

    def silent(ask: Measure) -> Measured:
        return Measured(share(ask))

    def honest(ask: Measure) -> Measured:
        return Measured(share(ask), reasons={i: "it has no boxes" for i, b in enumerate(ask.boxes or ()) if not len(b)})

    def loud(ask: Measure) -> Measured:
        """One image without boxes, and none has a value."""
        nothing = any(not len(box) for box in ask.boxes or ())
        return Measured(share(ask), reasons=dict.fromkeys(range(len(ask.maps)), "no boxes") if nothing else {})

    with pytest.raises(AssertionError, match="an image without boxes has a value"):
        checked(silent, boxes=boxes, needs={"boxes"})
    with pytest.raises(AssertionError, match="beside an image without boxes and without: other images have a value"):
        checked(loud, boxes=boxes, needs={"boxes"})
    assert checked(honest, boxes=boxes, needs={"boxes"}) is not None


def test_a_metric_that_explains_needs_a_method() -> None:
    def moves(ask: Measure) -> Measured:
        again = ask.explain(ask.vit, ask.images * 1.01, ask.targets, ask.seed)
        return Measured((again - ask.maps).abs().mean((1, 2)))

    def reseeds(ask: Measure) -> Measured:
        noise = torch.rand(ask.images.shape[1:], generator=torch.Generator().manual_seed(ask.seed))
        again = ask.explain(ask.vit, ask.images + noise.to(ask.images), ask.targets, ask.seed)
        return Measured((again - ask.maps).abs().mean((1, 2)))

    about: dict[str, Any] = {"explains": True, "higher_is_better": False, "bounds": (0.0, torch.inf)}
    assert checked(moves, **about) is not None
    assert checked(reseeds, **about, stochastic=True) is not None
    with pytest.raises(AssertionError, match="another seed changes"):
        checked(reseeds, **about)


def test_a_refused_model_is_no_pass() -> None:
    def refuses(ask: Measure) -> Measured:
        raise Unsupported(f"{ask.vit.name} is not to its taste")

    def refuses_somebody(ask: Measure) -> Measured:
        raise Unsupported("no")

    assert checked(refuses) is None
    with pytest.raises(AssertionError, match="does not name the model"):
        checked(refuses_somebody)


def test_single_precision_may_differ_where_double_is_given() -> None:
    """If the order of nearly equal patches matters, a batch and single calls are compared in float64."""
    vit = linear(classes=2)
    batch = torch.randn(2, 3, 12, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    asked: list[torch.dtype] = []

    def notes(ask: Measure) -> Measured:
        asked.append(ask.images.dtype)
        return Measured(share(ask))

    notes.__annotations__ = {"ask": Measure, "return": Measured}
    notes.__doc__ = "The share of the upper half."
    register_metric("upper-half", paper="an example", higher_is_better=True)(notes)
    narrow = linear(classes=2)
    narrow.model.float()
    try:
        check_metric("upper-half", narrow, batch.float(), vit)
    finally:
        METRICS.remove("upper-half")
    assert set(asked) == {torch.float32, torch.float64}
