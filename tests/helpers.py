"""What tests of unusual models, inputs and files share: small models, refusals in one sentence, commands."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from typer.testing import CliRunner

import patchlight as pl
from patchlight.cli import app
from patchlight.core.errors import PatchlightError
from patchlight.methods.base import METHODS
from patchlight.methods.requests import refusal, resolve
from patchlight.zoo import pocket
from tests.families import CLASSES, randomise

SMALL: dict[str, Any] = {"img_size": 64, "patch_size": 16, "embed_dim": 48, "depth": 3, "num_heads": 4}


def tiny(kind: type[VisionTransformer] = VisionTransformer, **options: Any) -> Any:
    """A small plain ViT with nothing left at a degenerate start."""
    torch.manual_seed(0)
    return randomise(kind(**{**SMALL, "num_classes": CLASSES, **options}))


def tiny_timm(name: str, **options: Any) -> Any:
    """A small model of timm by its name."""
    torch.manual_seed(0)
    options = {**SMALL, "num_classes": CLASSES, **options}
    return randomise(timm.create_model(name, **{k: v for k, v in options.items() if v is not None}))


def timm_pocket() -> VisionTransformer:
    """The bundled model as one of timm's, with the same weights."""
    model = VisionTransformer(**pocket.description()["architecture"])
    model.load_state_dict(pocket.build().state_dict())
    return model.eval()


def quick_map(vit: Any, batch: Tensor, name: str, **options: Any) -> Tensor:
    """The scores of a method in its quick settings; warnings are ignored."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pl.explain(vit, batch, name, **{**resolve(name).method.quick, **options}).scores


def working_methods(vit: pl.Anatomy) -> list[str]:
    """The methods that a model supports, without those that need a trained explainer."""
    return [name for name in sorted(METHODS) if refusal(resolve(name, dict(resolve(name).method.quick)), vit) is None]


def assert_near(a: Tensor, b: Tensor, limit: float = 1e-4) -> None:
    """Assert that tensors differ by at most a fraction of the second one's largest value."""
    worst = float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))
    assert worst <= limit, f"they differ by {worst:.1e} of the maximum"


def refuses(words: str | tuple[str, ...], call: Callable[..., object], /, *args: Any, **kwargs: Any) -> str:
    """Assert that a call is refused in one sentence that contains `words`; return the sentence."""
    try:
        result = call(*args, **kwargs)
    except PatchlightError as error:
        sentence = str(error)
    else:
        raise AssertionError(f"this should have been refused, but gave {result!r}")
    assert "\n" not in sentence.strip(), f"more than one sentence: {sentence}"
    missing = [word for word in ([words] if isinstance(words, str) else words) if word not in sentence]
    assert not missing, f"the refusal does not say {missing}: {sentence}"
    return sentence


def command(*words: str, code: int = 0, says: tuple[str, ...] = ()) -> str:
    """Run `patchlight WORDS`; assert its exit code, its words and that it shows no traceback; return its output."""
    result = CliRunner().invoke(app, list(words))
    broken = result.exception is not None and not isinstance(result.exception, SystemExit)
    assert not broken, f"{' '.join(words)} broke: {result.exception!r}"
    assert "Traceback" not in result.output, result.output
    assert result.exit_code == code, f"exit code {result.exit_code}, not {code}: {result.output}"
    flat = " ".join(result.output.split())
    missing = [word for word in says if word not in flat]
    assert not missing, f"the output does not say {missing}: {result.output}"
    return result.output
