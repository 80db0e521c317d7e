"""The settings of a DiffMask training with their presets, and its progress reports."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from patchlight.trained.diffmask.objective import Penalty, Update
from patchlight.trained.recipe import TrainingRecipe
from patchlight.trained.settings import Positive, Training

_PUBLISHED: dict[str, Any] = {
    "steps": None,
    "calibrate": None,
    "lambda_start": 20.0,
    "lambda_low": 0.0,
    "prices": 1.0,
    "gate_rate": 2e-5,
    "baseline_rate": 1e-3,
    "finish": 0,
    "restarts": 0,
}
"""Settings that the paper's text and the released code share."""
_PAPER: dict[str, Any] = {
    **_PUBLISHED,
    "epochs": 25,
    "batch_size": 16,
    "learn_beta": False,
    "penalty": "count",
    "gates": "all",
    "lambda_high": None,
    "warmup": 0,
}
_AUTHORS: dict[str, Any] = {
    **_PUBLISHED,
    "epochs": 20,  # of the command in their README; the default of their parser is 5
    "batch_size": 32,
    "floor": 0.0,
    "gates": "prefix",
    "lambda_update": "descent",
    "warmup": 1200,
}


class DiffMaskSettings(Training):
    """The settings of a DiffMask training.

    The defaults are ours; the preset `paper` follows the paper's text, and `authors` the released code.
    """

    title: ClassVar[str] = "DiffMask"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"default": {}, "paper": _PAPER, "authors": _AUTHORS}
    removed: ClassVar[frozenset[str]] = frozenset({"normalise", "clip"})
    free: ClassVar[frozenset[str]] = Training.free | {"finish", "restarts"}

    alpha: Positive = 15.0
    """Scale of the linear stretch u = alpha tanh(...) + beta."""
    beta: float = 8.0
    """Shift of the linear stretch, before `calibrate`."""
    learn_beta: bool = True
    """Train one beta per gate, as the released code does; False keeps it constant, as the paper's text does."""
    calibrate: Annotated[float, Field(gt=0, lt=1)] | None = 0.8
    """Shift beta so that this share of the first batch is kept at the start; None leaves `beta` as it is."""
    baseline: Literal["learned", "zero"] = "learned"
    """What replaces a masked patch: a learned vector, or zeros."""
    margin: Positive = 0.1
    """m: the maximum divergence."""
    penalty: Penalty = "log-keep"
    """`count`: the paper's L0, the sum over patches of k = prod_i P(z_i != 0). `log-keep`: mean of log(floor + k)."""
    floor: Annotated[float, Field(ge=0, lt=1)] = 1e-3
    """For `log-keep`. With 0, as in the released code, closed patches are pushed further and thus ordered, but some
    patches that do not matter can stay open."""
    gates: Literal["half", "prefix", "weighted", "all"] = "half"
    """The gates a batch uses: `all` as in the paper's text, `prefix` 0 .. k for a random k as in the released code,
    `weighted` the same with finished gates sampled less often, `half` all of them for half of the batches."""
    lambda_update: Update = "ascent"
    """The direction in which lambda moves along the Lagrangian: `ascent`, or the released code's `descent`."""
    lambda_start: Positive = 5.0
    """First value of every lambda."""
    lambda_low: Annotated[float, Field(ge=0)] = 0.5
    """Lower bound of lambda."""
    lambda_high: Positive | None = 200.0
    """Upper bound of lambda; None for no bound."""
    lambda_rate: Positive = 0.3
    """Adam's learning rate of lambda."""
    prices: Annotated[float, Field(ge=1)] = 10.0
    """Every second image is trained at another price: lambda times a factor from 1/prices to prices, with shifted
    gates. Then u orders patches by the price at which they are kept, and no gate stays closed. 1: one price."""
    gate_rate: Positive | None = None
    """Adam's learning rate of the gates; by default 5e-4 up to a width of 256, times (256 / width)^2 beyond."""
    baseline_rate: Positive | None = None
    """Adam's learning rate of the baseline; by default 1e-2, scaled in the same way."""
    warmup: Annotated[int, Field(ge=0)] = 100
    """Steps over which both rates rise from 0."""
    finish: Annotated[int, Field(ge=0)] = 8
    """Number of batches for the last calibration: beta is raised until the patches above 0.5 alone keep the mean
    divergence plus two standard errors within the margin. 0 leaves beta as trained."""
    restarts: Annotated[int, Field(ge=0)] = 2
    """How often a failed training may start again with a new seed."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        high = math.inf if self.lambda_high is None else self.lambda_high
        if not self.lambda_low <= self.lambda_start <= high:
            bounds = f"from lambda_low={self.lambda_low:g} to lambda_high={high:g}"
            raise ValueError(f"lambda_start={self.lambda_start:g} is not {bounds}")
        return self

    def rates(self, width: int) -> tuple[float, float]:
        """Adam's learning rates of the gates and of the baseline, for a model of this width.

        A step moves a gate further the more inputs it has; at a width of 768 the unscaled rates mask everything.
        """
        scale = min(1.0, (256 / width) ** 2)
        return self.gate_rate or 5e-4 * scale, self.baseline_rate or 1e-2 * scale


class DiffMaskRecipe(TrainingRecipe):
    """The recipe of `patchlight diffmask train`; `held_out` is used for the last calibration."""

    command: ClassVar[str] = "diffmask"
    training_kind: ClassVar[type[Training]] = DiffMaskSettings
    initial: str | None = None
    """An explainer whose gates training starts from."""


@dataclass(frozen=True)
class DiffMaskProgress:
    """Means over the batches since the last report."""

    step: int
    steps: int
    kl: float
    kept: float
    agreement: float
    """Share of images whose prediction the mask does not change."""
    loss: float
    multiplier: float
    """Mean of the active multipliers lambda."""
    seconds: float
    restarts: int = 0
    """Number of restarts so far."""


Callback = Callable[[DiffMaskProgress], None]
