"""How ViT-Shapley is trained: the settings with their presets, and what a training tells about itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from patchlight.trained.recipe import TrainingRecipe
from patchlight.trained.settings import Count, Positive, Training
from patchlight.trained.shapley.coalitions import Coalitions

_PAPER: dict[str, Any] = {
    "rank": None,
    "ratio": 4.0,
    "rate": 1e-4,
    "surrogate_rate": 1e-5,
    "warmup": 500,
    "epochs": 100.0,
    "surrogate_epochs": 50.0,
}


class ShapleySettings(Training):
    """How ViT-Shapley is trained.

    The defaults are ours, for small networks that are soon trained. The preset `paper` has whole weights and the
    published rates, and `code` also the released code's coalitions.
    """

    title: ClassVar[str] = "ViT-Shapley"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "default": {},
        "paper": _PAPER,
        "code": {**_PAPER, "coalitions": "code"},
    }
    free: ClassVar[frozenset[str]] = Training.free - {"steps", "epochs"} | {"check"}
    """The rates fall over all steps, so that their number is part of a run."""

    surrogate: Literal["trained", "model"] = "trained"
    """What says what a coalition is worth: a copy of the model trained to do without patches, or the model itself."""
    surrogate_steps: Count | None = None
    """Batches for the surrogate in all; by default `surrogate_epochs` over the data."""
    surrogate_epochs: Positive = 1.0
    backbone: Literal["trained", "frozen"] = "trained"
    """What the explainer's last layers read: a copy of the model that is trained with them, or the model itself, which
    makes a smaller explainer that is sooner trained."""
    rank: Count | None = 16
    """Of what is added to every matrix of the blocks, in the surrogate and in the explainer; None adds a whole one."""
    ratio: Positive = 2.0
    """Of the hidden widths of the explainer's last layers to the model's width."""
    coalitions: Coalitions = "kernel"
    """`kernel`: sizes and subsets of the Shapley kernel, whose least-squares solution are the Shapley values;
    `binomial` and `code`: patches join one by one, as in the released code without and with its sizes off by one."""
    masks: Annotated[int, Field(ge=2, multiple_of=2)] = 32
    """Coalitions an image and step, in pairs of complements."""
    rate: Positive = 1e-3
    surrogate_rate: Positive = 1e-3
    weight_decay: Annotated[float, Field(ge=0)] = 1e-5
    warmup: Annotated[int, Field(ge=0)] = 100
    check: Annotated[int, Field(ge=0)] = 8
    """Batches of `held_out` images on which the loss is measured at the end."""


class ShapleyRecipe(TrainingRecipe):
    """Everything `patchlight shapley train` needs; `held_out` is for the loss at the end."""

    command: ClassVar[str] = "shapley"
    training_kind: ClassVar[type[Training]] = ShapleySettings


@dataclass(frozen=True)
class SurrogateProgress:
    """Of the surrogate: means over the batches since the last report."""

    step: int
    steps: int
    loss: float
    """KL(p_clean || p_masked) of random masks."""
    untrained: float
    """The same of the model itself."""
    agreement: float
    """Share of images whose prediction the masks leave."""
    seconds: float


@dataclass(frozen=True)
class ShapleyProgress:
    """Of the explainer: means over the batches since the last report."""

    step: int
    steps: int
    loss: float
    """d times the mean squared error of v(empty) + sum of phi over S, as a value of v(S)."""
    even: float
    """The same of equal values for all patches."""
    seconds: float


Callback = Callable[[ShapleyProgress | SurrogateProgress], None]
