"""Questions: scores read from a model's complete output, prepared for every image."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import patchlight as pl
from patchlight.anatomy.discovery import Inputs, find_blocks, run_plainly
from patchlight.anatomy.heads import Question
from patchlight.anatomy.tasks import TaskAnatomy
from patchlight.core.errors import PatchlightError

transformers = pytest.importorskip("transformers")


class _Detector(TaskAnatomy):
    task = "detection"


class _Surest(Question):
    """The logits of the first two labels at the query that is surest of one."""

    tasks = ("detection",)
    query = -1

    def prepare(self, vit: Any, image: Tensor, size: tuple[int, int] | None) -> None:
        self.query = int(vit.call(image).logits.amax(2).argmax())
        self.labels = [f"label {i} of query {self.query}" for i in range(2)]

    def read(self, output: Any, rows: int) -> tuple[Tensor, Tensor]:
        logits = output.logits[:, self.query, :2]
        return logits, logits.sigmoid()

    def about(self) -> dict[str, Any]:
        return {"head": "Surest"}


@pytest.fixture(scope="module")
def detector() -> pl.Anatomy:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.YolosConfig(**sizes, image_size=[64, 96], patch_size=16, num_detection_tokens=6, num_labels=5)
    model = transformers.YolosForObjectDetection(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    found = find_blocks(model, run_plainly, Inputs((3, 64, 96)), "yolos")
    about = {"name": "yolos", "preprocess": pl.Preprocess((64, 96))}
    vit = _Detector(model, **about, **found.located(0))
    vit.check()
    return vit


IMAGES = torch.randn(2, 3, 64, 96, generator=torch.Generator().manual_seed(1))


def test_gradients_equal_autograd_through_the_plain_model(detector: pl.Anatomy) -> None:
    att = pl.explain(detector, IMAGES, "ixg", head=_Surest(), level="pixel")
    assert att.several
    assert tuple(att.scores.shape[:2]) == (2, 2)
    for i, image in enumerate(IMAGES):
        leaf = image[None].clone().requires_grad_()
        logits = detector.model(leaf).logits
        query = int(logits.amax(2).argmax())
        assert att.labels[2 * i] == f"label 0 of query {query}"
        for t in range(2):
            (gradient,) = torch.autograd.grad(logits[0, query, t], leaf, retain_graph=True)
            torch.testing.assert_close(att.scores[i, t], (gradient * leaf)[0].sum(0).detach(), atol=1e-5, rtol=1e-4)


def test_every_image_has_the_question_prepared_for_it(detector: pl.Anatomy) -> None:
    together = pl.explain(detector, IMAGES, "rise", head=_Surest(), samples=8)
    alone = pl.explain(detector, IMAGES[1:], "rise", head=_Surest(), samples=8)
    assert together.labels[2:] == alone.labels
    torch.testing.assert_close(together.scores[1:], alone.scores)


def test_rows_of_the_score_are_read_by_its_gradient(detector: pl.Anatomy) -> None:
    """A query of YOLOS reads its own token alone."""
    asked = detector.ask(_Surest()).prepared(IMAGES[:1])
    with asked.steady():
        tokens = asked.run(asked.embed(IMAGES[:1]))
        row = asked.pool_row(asked.readout(tokens), None, tokens, torch.tensor([0]))
    query = asked.question.query  # type: ignore[union-attr]
    assert row[0, asked.prefix + asked.cells + query] == pytest.approx(1)


def test_metrics_measure_the_question_of_an_attribution(detector: pl.Anatomy) -> None:
    att = pl.explain(detector, IMAGES, "ixg", head=_Surest(), target=1)
    values = pl.evaluate(detector, IMAGES, att, "ins-del", steps=4).values
    again = pl.evaluate(detector, IMAGES, att, "ins-del", head=_Surest(), steps=4).values
    assert values.isfinite().all()
    torch.testing.assert_close(values, again)


def test_refusals(detector: pl.Anatomy, tmp_path: Any) -> None:
    with pytest.raises(PatchlightError, match="a model for detection, so it needs a question; give head="):
        pl.explain(detector, IMAGES)
    with pytest.raises(PatchlightError, match="question for models for detection, and pocket is a classifier"):
        pl.explain(pl.load("pocket"), torch.zeros(1, 3, 32, 32), head=_Surest())
