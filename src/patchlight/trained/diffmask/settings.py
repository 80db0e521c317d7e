"""How DiffMask is trained: the settings with their presets, and what a training tells about itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from patchlight.errors import PatchlightError, nearest
from patchlight.trained.diffmask.objective import Penalty, Update
from patchlight.trained.settings import Positive, Training, read_settings


class Settings(Training):
    """How DiffMask is trained. The defaults are ours, made to converge from most seeds; `preset` gives the paper's."""

    free: ClassVar[frozenset[str]] = Training.free | {"finish"}

    alpha: Positive = 15.0
    beta: float = 8.0
    calibrate: Annotated[float, Field(gt=0, lt=1)] | None = 0.8
    """Shift beta so that this share of the first batch is kept at the start; None takes `beta` as it is."""
    baseline: Literal["learned", "zero"] = "learned"
    margin: Positive = 0.1
    """m: the divergence allowed."""
    penalty: Penalty = "log-keep"
    """Of what is kept: the mean over patches of log(floor + k), or of k itself, with k = prod_i P(z_i != 0)."""
    floor: Annotated[float, Field(ge=0, lt=1)] = 1e-3
    """With 0, as in the released code, patches that are shut are pushed on and so ordered further, but at times some
    that do not matter stay open for good. Of no use with `keep`."""
    gates: Literal["half", "prefix", "weighted", "all"] = "half"
    """The gates a batch uses: `prefix` 0 .. k for a random k, `weighted` the same with gates that are done drawn less,
    `all` all of them, as an explanation does; `half` is all of them for half of the batches, else a prefix."""
    lambda_update: Update = "ascent"
    lambda_start: Positive = 5.0
    lambda_low: Annotated[float, Field(ge=0)] = 0.5
    lambda_high: Positive = 200.0
    lambda_rate: Positive = 0.3
    prices: Annotated[float, Field(ge=1)] = 10.0
    """Every second image is trained at another price: lambda times a factor from 1/prices to prices, and its gates
    shifted with it. So u grades patches by the price at which they are kept, and no gate stays shut. 1: one price."""
    gate_rate: Positive | None = None
    baseline_rate: Positive | None = None
    """By default 5e-4 and 1e-2 up to a width of 256, and (256 / width)^2 of that beyond: the more inputs a gate has,
    the further a step of Adam moves it, and at 768 the full rates mask everything."""
    warmup: Annotated[int, Field(ge=0)] = 100
    finish: Annotated[int, Field(ge=0)] = 8
    """Batches on which beta is set at the end: raised, where need be, until the patches above 0.5 alone keep the mean
    divergence, and two standard errors more, within the margin. 0 leaves beta as trained."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.lambda_low <= self.lambda_start <= self.lambda_high:
            bounds = f"from lambda_low={self.lambda_low:g} to lambda_high={self.lambda_high:g}"
            raise ValueError(f"lambda_start={self.lambda_start:g} is not {bounds}")
        return self

    def rates(self, width: int) -> tuple[float, float]:
        """Adam's rates of the gates and of the baseline, for a model of this width."""
        scale = min(1.0, (256 / width) ** 2)
        return self.gate_rate or 5e-4 * scale, self.baseline_rate or 1e-2 * scale

    @staticmethod
    def preset(name: str = "default", **changes: Any) -> Settings:
        """`default`; `paper`: the published rates and ascent; `code`: what the released code does."""
        if name not in PRESETS:
            raise PatchlightError(f"no DiffMask preset is called '{name}'; {nearest(name, PRESETS)}")
        return read_settings(Settings, "DiffMask", {**PRESETS[name], **changes}, REMOVED)


_PAPER: dict[str, Any] = {
    "calibrate": None,
    "floor": 0.0,
    "prices": 1.0,
    "finish": 0,
    "gates": "prefix",
    "lambda_start": 20.0,
    "lambda_low": 0.0,
    "gate_rate": 2e-5,
    "baseline_rate": 1e-3,
    "warmup": 1200,
}
PRESETS: dict[str, dict[str, Any]] = {"default": {}, "paper": _PAPER, "code": {**_PAPER, "lambda_update": "code"}}
REMOVED = {"normalise", "clip"}


@dataclass(frozen=True)
class Progress:
    """Means over the batches since the last report."""

    step: int
    steps: int
    kl: float
    kept: float
    agreement: float
    """Share of images whose prediction the mask leaves."""
    loss: float
    multiplier: float
    """Mean of the multipliers lambda."""
    seconds: float


Callback = Callable[[Progress], None]
