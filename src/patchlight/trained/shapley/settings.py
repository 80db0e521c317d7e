"""The settings of a ViT-Shapley training with their presets, and its progress reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from patchlight.trained.recipe import TrainingRecipe
from patchlight.trained.settings import Count, Positive, Training

Coalitions = Literal["kernel", "binomial", "code"]
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
    """The settings of a ViT-Shapley training.

    The defaults are ours, for small networks that train quickly. The preset `paper` trains full weights with the
    published rates; `code` also uses the coalitions of the released code.
    """

    title: ClassVar[str] = "ViT-Shapley"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "default": {},
        "paper": _PAPER,
        "code": {**_PAPER, "coalitions": "code"},
    }
    free: ClassVar[frozenset[str]] = Training.free - {"steps", "epochs"} | {"check"}
    """Without the number of steps, on which the learning rates depend."""

    surrogate: Literal["trained", "model"] = "trained"
    """The model of the values of coalitions: a copy that is trained to work without patches, or the model itself."""
    surrogate_steps: Count | None = None
    """Number of batches for the surrogate; by default `surrogate_epochs` over the data."""
    surrogate_epochs: Positive = 1.0
    backbone: Literal["trained", "frozen"] = "trained"
    """The input of the explainer's last layers: a copy of the model that is trained with them, or the model itself,
    which gives a smaller explainer that trains faster."""
    rank: Count | None = 16
    """Rank of the changes to the matrices of the blocks, in the surrogate and in the explainer; None: full matrices."""
    ratio: Positive = 2.0
    """Ratio of the hidden widths of the explainer's last layers to the model's width."""
    coalitions: Coalitions = "kernel"
    """`kernel`: sizes and subsets of the Shapley kernel, whose least-squares solution is the Shapley values;
    `binomial` and `code`: independent patches, as in the released code without and with its off-by-one."""
    masks: Annotated[int, Field(ge=2, multiple_of=2)] = 32
    """Coalitions per image and step, in pairs of complements."""
    rate: Positive = 1e-3
    surrogate_rate: Positive = 1e-3
    weight_decay: Annotated[float, Field(ge=0)] = 1e-5
    warmup: Annotated[int, Field(ge=0)] = 100
    check: Annotated[int, Field(ge=0)] = 8
    """Number of batches of `held_out` images on which the loss is measured at the end."""


class ShapleyRecipe(TrainingRecipe):
    """The recipe of `patchlight shapley train`; `held_out` is used for the loss at the end."""

    command: ClassVar[str] = "shapley"
    training_kind: ClassVar[type[Training]] = ShapleySettings


@dataclass(frozen=True)
class SurrogateProgress:
    """The progress of the surrogate: means over the batches since the last report."""

    step: int
    steps: int
    loss: float
    """KL(p_clean || p_masked) under random masks."""
    untrained: float
    """The same for the model itself."""
    agreement: float
    """Share of images whose prediction the masks do not change."""
    seconds: float


@dataclass(frozen=True)
class ShapleyProgress:
    """The progress of the explainer: means over the batches since the last report."""

    step: int
    steps: int
    loss: float
    """d times the mean squared error of v(empty) + sum of phi over S as a prediction of v(S)."""
    even: float
    """The same for equal values of all patches."""
    seconds: float


Callback = Callable[[ShapleyProgress | SurrogateProgress], None]
