"""Training DiffMask beside a frozen model: a short loop that can be killed at any moment and goes on where it was.

Every draw is a function of the seed and the step alone, so a checkpoint holds weights and optimiser, no random state.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn

from patchlight.anatomy import wrap
from patchlight.anatomy.base import Anatomy
from patchlight.diffmask.gates import DiffMask, Gates, aggregate, masked_logits, new_gates, observe, why_not
from patchlight.diffmask.objective import Lookahead, Multipliers, Penalty, Update, divergence, penalty
from patchlight.errors import PatchlightError, Unsupported, nearest
from patchlight.files import check_writable, write_whole

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


class TrainingWarning(UserWarning):
    """Training has drifted into one of its two failures, with what to change."""


class Settings(BaseModel):
    """How DiffMask is trained. The defaults are ours, made to converge from any seed; `preset` gives the paper's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: Count | None = None
    """Batches in all; by default `epochs` over the data."""
    epochs: Positive = 1.0
    batch_size: Count = 32
    seed: int = 0
    alpha: Positive = 15.0
    beta: float = 8.0
    calibrate: Annotated[float, Field(gt=0, lt=1)] | None = 0.95
    """Shift beta so that this share of the first batch is kept at the start; None takes `beta` as it is."""
    normalise: bool = True
    baseline: Literal["learned", "zero"] = "learned"
    margin: Positive = 0.1
    """m: the divergence allowed."""
    penalty: Penalty = "keep"
    layers: Literal["prefix", "weighted", "all"] = "prefix"
    """The gates a batch uses: 0 .. k for one random k, the same with layers that are done drawn less, or all."""
    lambda_update: Update = "log-ascent"
    lambda_start: Positive = 20.0
    lambda_low: Annotated[float, Field(ge=0)] = 0.5
    lambda_high: Positive = 200.0
    lambda_rate: Positive = 0.017
    """Of log-ascent: the largest rise of log lambda a step, on average over the layers; of the others, Adam's rate."""
    prices: Annotated[float, Field(ge=1)] = 10.0
    """Every second image is trained at another price: lambda times a factor from 1/prices to prices, and its gates
    shifted with it. So u grades patches by the price at which they are kept, and no gate stays shut. 1: one price."""
    gate_rate: Positive = 5e-4
    baseline_rate: Positive = 1e-2
    warmup: Annotated[int, Field(ge=0)] = 100
    clip: Positive | None = 1.0
    """The gradient's largest norm."""
    precision: Literal["full", "bf16"] = "full"
    """Of the frozen model's forwards and backward; the gates stay in float32."""
    log_every: Count = 20
    checkpoint_minutes: Positive = 5.0
    checkpoint_steps: Count | None = None
    tensorboard: bool = False

    @staticmethod
    def preset(name: str = "default", **changes: Any) -> Settings:
        """`default`; `paper`: the published rates and ascent; `code`: what the released code does."""
        if name not in PRESETS:
            raise PatchlightError(f"no DiffMask preset is called '{name}'; {nearest(name, PRESETS)}")
        return read_settings({**PRESETS[name], **changes})


_PAPER: dict[str, Any] = {
    "calibrate": None,
    "normalise": False,
    "prices": 1.0,
    "penalty": "log-keep",
    "lambda_update": "ascent",
    "lambda_start": 20.0,
    "lambda_low": 0.0,
    "lambda_rate": 0.3,
    "gate_rate": 2e-5,
    "baseline_rate": 1e-3,
    "warmup": 1200,
    "clip": None,
}
PRESETS: dict[str, dict[str, Any]] = {"default": {}, "paper": _PAPER, "code": {**_PAPER, "lambda_update": "code"}}
SLOPE = 6.0
"""Over alpha: how far a factor e of the price shifts the gates."""
_FREE = {"steps", "epochs", "log_every", "checkpoint_minutes", "checkpoint_steps", "tensorboard"}
"""Settings that may change between a checkpoint and its resumption."""


def read_settings(values: dict[str, Any]) -> Settings:
    """Settings from a dict, or one sentence about the first that is wrong."""
    try:
        return Settings(**values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            raise PatchlightError(f"DiffMask has no setting '{key}'; {nearest(key, Settings.model_fields)}") from error
        raise PatchlightError(f"setting {key}={first['input']!r} of DiffMask is not valid: {first['msg']}") from error


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


def train(
    vit: Anatomy | nn.Module,
    loader: Iterable[Any],
    settings: Settings | None = None,
    callback: Callback | None = None,
    out: str | Path | None = None,
    start: DiffMask | None = None,
    resume: bool = True,
) -> DiffMask:
    """Train gates for a frozen model on batches of images, or of (images, labels): labels are only checked.

    Minimise mean keep subject to KL(p_clean || p_masked) <= m: with lambda_k of the last gate k used,
    loss = (penalty + lambda_k (KL - m)) / (1 + lambda_k) (the paper's presets leave the denominator out). A step is two
    forwards and one backward of the model. With `out`, checkpoints and `metrics.csv` go there, and a run that was
    killed goes on from its last checkpoint to the same weights. `start` are gates to begin with. Under `accelerate
    launch` every process takes its share of the batches.
    """
    vit, settings = wrap(vit), settings or Settings()
    reason = why_not(vit)
    if reason is not None:
        raise Unsupported(f"DiffMask cannot be trained here: {reason}")
    _check_data(vit, loader)
    run = _Run(vit, loader, settings, Path(out) if out is not None else None, start, callback)
    if run.out is not None:
        check_writable(run.out)
        run.resume(resume)
    with vit.steady(), torch.inference_mode(False), torch.enable_grad():
        run.go()
    explainer = DiffMask.of(run.gates, vit, settings=settings.model_dump(), result=run.summary())
    if run.out is not None and run.main:
        explainer.save(run.out)
    return explainer


class _Run:
    """The state of one training."""

    def __init__(
        self,
        vit: Anatomy,
        loader: Iterable[Any],
        settings: Settings,
        out: Path | None,
        start: DiffMask | None,
        callback: Callback | None,
    ) -> None:
        self.vit, self.settings, self.out, self.callback = vit, settings, out, callback
        self.accelerator = _accelerator(vit)
        self.main = bool(self.accelerator.is_main_process)
        if self.accelerator.num_processes > 1:
            vit.model.to(self.accelerator.device)
            loader = self.accelerator.prepare(loader)
        self.loader, self.device = loader, vit.device
        self.gates = self._first_gates(start)
        self.multipliers = Multipliers(
            self.gates.count,
            settings.lambda_start,
            settings.lambda_low,
            settings.lambda_high,
            settings.lambda_rate * (self.gates.count if settings.lambda_update == "log-ascent" else 1),
            settings.lambda_update,
            self.device,
        )
        names = {n: p for n, p in self.gates.named_parameters() if p.requires_grad}
        groups = [
            {"params": [p for n, p in names.items() if n != "baseline"], "lr": settings.gate_rate},
            {"params": [p for n, p in names.items() if n == "baseline"], "lr": settings.baseline_rate},
        ]
        for group in groups:
            group["initial_lr"] = group["lr"]
        self.optimiser = Lookahead(torch.optim.Adam([g for g in groups if g["params"]]), names)
        self.step, self.saved, self.epoch_length = 0, 0, 0
        self.steps = settings.steps or math.ceil(settings.epochs * _length(loader))
        self.done = torch.zeros(3, self.gates.count)
        """By layer: running agreement and kept share, and how often it was drawn; `weighted` draws read them."""
        self.window: list[Tensor] = []
        self.last: Progress | None = None
        self.began = time.monotonic()
        self.warned: set[str] = set()

    def _first_gates(self, start: DiffMask | None) -> Gates:
        s, vit = self.settings, self.vit
        options = {
            "alpha": s.alpha,
            "beta": s.beta,
            "normalise": s.normalise,
            "learn_baseline": s.baseline == "learned",
        }
        gates = new_gates(vit, s.seed, **options)
        if start is not None:
            if (start.gates.count, start.gates.width) != (gates.count, gates.width):
                raise PatchlightError(
                    f"the gates to start from are {start.gates.count} of width {start.gates.width}; "
                    f"{vit.name} needs {gates.count} of width {gates.width}"
                )
            gates.load_state_dict(start.gates.state_dict())
        elif s.calibrate is not None:
            images, _ = _parts(next(_epoch(self.loader, s.seed, 0)))
            with vit.steady(), self._cast():
                seen = observe(vit, vit.place(images))
            calibrate(gates, seen.h0, torch.stack(seen.states), s.calibrate)
        return gates

    def go(self) -> None:
        """All steps from where the run stands."""
        model = self.accelerator.prepare_model(self.gates) if self.accelerator.num_processes > 1 else self.gates
        saved_at = time.monotonic()
        while self.step < self.steps:
            epoch = self.step // self.epoch_length if self.epoch_length else 0
            position = epoch * self.epoch_length
            for batch in _epoch(self.loader, self.settings.seed, epoch):
                position += 1
                if position <= self.step:
                    continue
                self._one(model, batch)
                if self.step % self.settings.log_every == 0 or self.step == self.steps:
                    self._report()
                due = time.monotonic() - saved_at > 60 * self.settings.checkpoint_minutes
                every = self.settings.checkpoint_steps
                if due or self.step == self.steps or (every is not None and self.step % every == 0):
                    self._save()
                    saved_at = time.monotonic()
                if self.step == self.steps:
                    return
            if position == epoch * self.epoch_length:
                raise PatchlightError("the loader gave no batch; give one that can be walked once for each epoch")
            self.epoch_length = position if not self.epoch_length else self.epoch_length

    def _one(self, model: nn.Module, batch: Any) -> None:
        vit, s = self.vit, self.settings
        images, _ = _parts(batch)
        images = vit.place(images)
        rng = np.random.default_rng([s.seed, self.step])
        k = self._draw(rng)
        noise = int(rng.integers(2**62)) + int(self.accelerator.process_index)
        self.optimiser.set_rates(min(1.0, (self.step + 1) / s.warmup) if s.warmup else 1.0)
        with self._cast():
            seen = observe(vit, images)
        generator = torch.Generator(self.device).manual_seed(noise)
        uniform = torch.rand(k + 1, *seen.h0.shape[:2], generator=generator, device=self.device, dtype=seen.h0.dtype)
        price = self._prices(len(images), generator)
        patches, log_keep = model(seen.h0, torch.stack(seen.states[: k + 1]), uniform, price * (s.alpha / SLOPE))
        with self._cast():
            logits = masked_logits(vit, images, patches)
        kl = divergence(seen.logits, logits, vit.sigmoid)
        kept = penalty(log_keep, s.penalty)
        weight = self.multipliers[k] * price.exp()
        loss = kept + weight * (kl - s.margin)
        loss = (loss / (1 + weight) if s.lambda_update == "log-ascent" else loss).mean()
        self.accelerator.backward(loss)
        if s.clip is not None:
            nn.utils.clip_grad_norm_(list(self.optimiser.names.values()), s.clip)
        self.optimiser.step()
        self.optimiser.adam.zero_grad(set_to_none=True)
        with torch.no_grad():
            same = (logits > 0) == (seen.logits > 0) if vit.sigmoid else logits.argmax(1) == seen.logits.argmax(1)
            share = log_keep[::2].exp().mean()
            told = torch.stack([kl[::2].mean(), share, same[::2].float().mean(), loss.detach()]).float()
            if self.accelerator.num_processes > 1:
                told = self.accelerator.reduce(told, "mean")
            self.multipliers.step(k, told[0], s.margin)
        self.window.append(told)
        if s.layers == "weighted":
            self._remember(k, told)
        self.step += 1

    def _prices(self, count: int, generator: torch.Generator) -> Tensor:
        """The logarithm of every image's price [B]: 0 for the even ones, uniform for the odd."""
        price = (torch.rand(count, generator=generator, device=self.device) * 2 - 1) * math.log(self.settings.prices)
        price[::2] = 0
        return price

    def _draw(self, rng: np.random.Generator) -> int:
        count = self.gates.count
        if self.settings.layers == "all":
            return count - 1
        weights = np.ones(count)
        if self.settings.layers == "weighted":
            agreement, kept, drawn = self.done.numpy()
            weights[(agreement > 0.75) & (kept < 0.1) & (drawn > 100)] = 0.1
        return int(rng.choice(count, p=weights / weights.sum()))

    def _remember(self, k: int, told: Tensor, decay: float = 0.9) -> None:
        new = torch.stack([told[2], told[1]]).cpu()
        self.done[:2, k] = torch.where(self.done[2, k] > 0, decay * self.done[:2, k] + (1 - decay) * new, new)
        self.done[2, k] += 1

    def _cast(self) -> contextlib.AbstractContextManager[Any]:
        if self.settings.precision == "bf16":
            return torch.autocast(self.vit.device.type, torch.bfloat16)
        return contextlib.nullcontext()

    def _report(self) -> None:
        kl, kept, agreement, loss = torch.stack(self.window).mean(0).tolist()
        self.window.clear()
        self._check_finite(loss)
        lambdas = torch.stack([v.detach() for v in self.multipliers.values]).mean().item()
        seconds = time.monotonic() - self.began
        self.last = Progress(self.step, self.steps, kl, kept, agreement, loss, lambdas, seconds)
        self._warn(self.last)
        if not self.main:
            return
        if self.out is not None:
            _append(self.out / "metrics.csv", self.last)
            if self.settings.tensorboard:
                self._tensorboard(self.last)
        if self.callback is not None:
            self.callback(self.last)

    def _check_finite(self, loss: float) -> None:
        if math.isfinite(loss) and all(bool(torch.isfinite(p).all()) for p in self.optimiser.names.values()):
            return
        kept = f"; the checkpoint of step {self.saved} is kept in '{self.out}'" if self.saved else ""
        raise PatchlightError(
            f"the loss became {loss} by step {self.step}{kept}; check the images, or lower gate_rate and baseline_rate"
        )

    def _warn(self, now: Progress) -> None:
        if now.step < max(2 * self.settings.warmup, 200):
            return
        told = {
            "everything": now.kept < 0.01 and now.kl > 2 * self.settings.margin,
            "nothing": now.kept > 0.99,
        }
        advice = {
            "everything": "everything is masked and the output is lost: raise beta or calibrate, or lambda_start",
            "nothing": "nothing is masked: lower beta or calibrate, raise margin, or lower lambda_start",
        }
        for name in (n for n, is_so in told.items() if is_so and n not in self.warned):
            self.warned.add(name)
            share = f"kept {now.kept:.1%}, KL {now.kl:.3g}"
            warnings.warn(f"step {now.step}: {advice[name]} ({share})", TrainingWarning, stacklevel=2)

    def _tensorboard(self, now: Progress) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise PatchlightError("tensorboard is not installed; pip install patchlight[train]") from error
        with SummaryWriter(str(self.out)) as writer:  # type: ignore[no-untyped-call]
            for name in ("kl", "kept", "agreement", "loss", "multiplier"):
                writer.add_scalar(name, getattr(now, name), now.step)  # type: ignore[no-untyped-call]

    def summary(self) -> dict[str, Any]:
        return {} if self.last is None else {f.name: getattr(self.last, f.name) for f in fields(self.last)}

    def _save(self) -> None:
        """One file, whole or not at all; nothing that is not finite is ever written."""
        if self.out is None:
            return
        if self.window:
            self._check_finite(float(torch.stack(self.window)[:, 3].mean()))
        if self.main:
            from safetensors.torch import save

            parts = {
                "gates": dict(self.gates.state_dict()),
                "optimiser": self.optimiser.state(),
                "multipliers": self.multipliers.state(),
                "layers": {"done": self.done},
                "window": {"told": torch.stack(self.window) if self.window else torch.empty(0, 4)},
            }
            tensors = {f"{a}/{b}": t.detach().cpu().contiguous() for a, part in parts.items() for b, t in part.items()}
            about = {"step": self.step, "settings": _fixed(self.settings), "epoch": self.epoch_length}
            write_whole(self.out / "checkpoint.safetensors", save(tensors, {"about": json.dumps(about)}))
        self.saved = self.step

    def resume(self, wanted: bool) -> None:
        """Take up the checkpoint in `out`, where there is one."""
        assert self.out is not None
        path = self.out / "checkpoint.safetensors"
        if not wanted or not path.is_file():
            if (self.out / "metrics.csv").exists():
                (self.out / "metrics.csv").unlink()
            return
        about, parts = _read_checkpoint(path)
        if about["settings"] != _fixed(self.settings):
            mine = _fixed(self.settings)
            other = sorted(k for k in mine if mine[k] != about["settings"].get(k))
            raise PatchlightError(
                f"'{self.out}' holds a run with another {', '.join(other)}; choose another folder, or do not resume"
            )
        try:
            self.gates.load_state_dict(parts["gates"])
            self.optimiser.restore(parts["optimiser"])
            self.multipliers.restore(parts["multipliers"])
            self.done = parts["layers"]["done"]
        except (KeyError, RuntimeError) as error:
            raise PatchlightError(f"the checkpoint in '{self.out}' was made for another model") from error
        self.window = list(parts["window"]["told"].to(self.device))
        self.step = self.saved = int(about["step"])
        self.epoch_length = int(about["epoch"])
        _cut(self.out / "metrics.csv", self.step)


def calibrate(gates: Gates, h0: Tensor, states: Tensor, share: float) -> float:
    """Set every beta_i to the one value at which the mean of prod_i P(z_i != 0) is `share`; returns it."""
    with torch.no_grad():
        u = gates.locations(h0, states) - gates.beta[:, None, None].to(h0)
        low, high = -2 * gates.alpha - 20.0, 2 * gates.alpha + 20.0
        for _ in range(40):
            middle = (low + high) / 2
            if float(aggregate(u + middle, "keep").mean()) < share:
                low = middle
            else:
                high = middle
        gates.beta.fill_(high)
    return high


def _accelerator(vit: Anatomy) -> Any:
    try:
        from accelerate import Accelerator
    except ImportError as error:
        raise PatchlightError(
            "training needs accelerate, which is not installed; pip install patchlight[train]"
        ) from error
    return Accelerator(cpu=vit.device.type == "cpu", device_placement=False)


def _parts(batch: Any) -> tuple[Tensor, Tensor | None]:
    if isinstance(batch, Tensor):
        return batch, None
    if isinstance(batch, tuple | list) and batch and isinstance(batch[0], Tensor):
        labels = batch[1] if len(batch) > 1 and isinstance(batch[1], Tensor) else None
        return batch[0], labels
    raise PatchlightError(f"a batch is a {type(batch).__name__}; give [B,C,H,W] tensors, or (images, labels) pairs")


def _epoch(loader: Iterable[Any], seed: int, epoch: int) -> Iterator[Any]:
    """The batches of an epoch; a shuffling loader draws its order from the seed and the epoch alone."""
    draw = int(np.random.default_rng([seed, epoch, 7]).integers(2**62))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(draw)
        batches = iter(loader)
        first = next(batches, None)
    if first is not None:
        yield first
        yield from batches


def _length(loader: Iterable[Any]) -> int:
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError as error:
        raise PatchlightError("the loader does not say how many batches it has; give settings with steps") from error


def _check_data(vit: Anatomy, loader: Iterable[Any], look: int = 8) -> None:
    """Refuse, before any work, batches of a wrong shape, labels the model has not, and data of one class."""
    from patchlight.images import to_batch

    if isinstance(loader, Iterator):
        raise PatchlightError("the loader can be walked only once; give a DataLoader, or a list of batches")
    found: set[int] = set()
    count, labelled = 0, True
    for batch in itertools.islice(_epoch(loader, 0, 0), look):
        images, labels = _parts(batch)
        to_batch(images, vit.preprocess, vit.channels)
        count += len(images)
        labelled = labelled and labels is not None
        if labels is not None:
            found |= set(labels.flatten().tolist())
    if count == 0:
        raise PatchlightError("there are no images to train on; the loader is empty")
    if not labelled:
        return
    highest, known = max(found), max(vit.classes, 2)
    if highest >= known:
        raise PatchlightError(f"the data has a label {highest}, but {vit.name} has {known} classes (0 to {known - 1})")
    if len(found) == 1:
        raise PatchlightError(
            f"the first {count} images are all of class {highest}; DiffMask needs several classes, in mixed order"
        )


def _fixed(settings: Settings) -> dict[str, Any]:
    return {k: v for k, v in settings.model_dump().items() if k not in _FREE}


def _read_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            about: dict[str, Any] = json.loads(file.metadata()["about"])
            parts: dict[str, dict[str, Tensor]] = {"gates": {}, "optimiser": {}, "multipliers": {}}
            for key in file.keys():  # noqa: SIM118
                part, _, name = key.partition("/")
                parts.setdefault(part, {})[name] = file.get_tensor(key)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise PatchlightError(f"'{path}' is damaged; remove it to start again") from error
    return about, parts


_COLUMNS = [f.name for f in fields(Progress)]


def _append(path: Path, now: Progress) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = not path.exists()
    with path.open("a", encoding="utf-8") as file:
        if fresh:
            file.write(",".join(_COLUMNS) + "\n")
        file.write(",".join(f"{getattr(now, c):.6g}" for c in _COLUMNS) + "\n")


def _cut(path: Path, step: int) -> None:
    """Drop what was reported after the checkpoint, and a line that was cut short."""
    if not path.is_file():
        return
    head, *rows = path.read_text(encoding="utf-8").splitlines()
    whole = [r for r in rows if r.count(",") == head.count(",") and float(r.split(",")[0]) <= step]
    write_whole(path, ("\n".join([head, *whole]) + "\n").encode())
