"""Questions score the complete output of a model: a box, a region, or the words of an answer.

A question is prepared for each image: it selects the detection, region or words from the output for the unchanged
image. The selection is then fixed, so that methods and metrics use the question like a head with logits and a target.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from patchlight.anatomy.heads.features import Head
from patchlight.core.errors import PatchlightError
from patchlight.core.fingerprints import hash_images
from patchlight.core.targets import Outputs, Target

if TYPE_CHECKING:
    from patchlight.anatomy.crossing import CrossedAnatomy
    from patchlight.anatomy.opened import Anatomy


class Question(Head):
    """A score that is computed from the output of a model.

    A subclass defines `prepare`, which selects what is scored in an image, and `read`, which computes the scores.
    `tasks` are the kinds of models that it supports (`Anatomy.task`). `pooling` is "gradient": the tokens that a
    question depends on are detected from the gradient of the score.
    """

    outputs = Outputs("paired")
    pooling = "gradient"
    tasks: Sequence[str] = ()
    general: Self | None = None
    """The question before it was prepared for an image; None if it is not prepared."""
    words: Sequence[Any] = ()
    """The words of an answer; empty for other questions."""
    image: tuple[str, ...] = ()
    """The hash of the image that it is prepared for."""
    annotations: Sequence[str] = ()
    """The annotations of the explained object for localisation metrics: "boxes" or "masks"; empty if there is none."""
    regions: Sequence[Tensor] = ()
    """The region [H,W] of each label in the model's input, from 0 to 1; empty for the complete image."""
    missed = False
    """Whether the question is about the first label, which was missed, and the second is the predicted one."""

    def bound(self, vit: Anatomy) -> Self:
        if vit.task not in self.tasks:
            what = f"a model for {vit.task}" if vit.task else "a classifier"
            kinds = " or ".join(self.tasks)
            raise PatchlightError(
                f"pl.heads.{type(self).__name__} is a question for models for {kinds}, and {vit.name} is {what}"
            )
        return self

    def for_image(self, vit: Anatomy, image: Tensor, size: tuple[int, int] | None = None) -> Self:
        """The question for one preprocessed image [1,...].

        Args:
            vit: The model, without a question.
            image: The image.
            size: Width and height of the photograph; None for a tensor. Coordinates are then in pixels of the tensor.
        """
        prepared = copy(self)
        prepared.general, prepared.image = self, hash_images(image)
        prepared.prepare(vit, image, size)
        return prepared

    def measured(self) -> Self:
        """The question whose scores metrics follow."""
        return self

    def check_measured(self, labels: Sequence[int]) -> None:
        """Raise an error for labels whose curve would be meaningless."""

    @abstractmethod
    def prepare(self, vit: Any, image: Tensor, size: tuple[int, int] | None) -> None:
        """Select what is scored in an image, and set `labels`, from the output for the unchanged image."""

    @abstractmethod
    def read(self, output: Any, rows: int) -> tuple[Tensor, Tensor]:
        """The logits [rows,Q] and the probabilities [rows,Q] of the Q labels, differentiable.

        Args:
            output: The output of the model.
            rows: The number of images or variants that it was run on.
        """

    def __call__(self, output: Any) -> Tensor:
        raise TypeError("a question reads the output of a model: use `logits`")

    def logits(self, output: Any, rows: int) -> Tensor:
        """Logits and probabilities side by side [rows,2Q], or logits alone if `outputs` has no probabilities."""
        logits, probabilities = self.read(output, rows)
        return torch.cat([logits, probabilities], 1) if self.outputs.kind == "paired" else logits

    def call(self, vit: CrossedAnatomy, images: Tensor) -> Any:
        """Run the model; a question may add texts, points or a prompt."""
        return vit.call(images)

    @property
    def call_key(self) -> Any:
        """What the calls of the blocks depend on in addition to the image; None if nothing."""
        return None

    def object_of(self, index: Tensor) -> Tensor:
        """Whether pixels [B,H,W] belong to the objects of the labels `index` [B]."""
        if not self.regions:
            raise PatchlightError(f"{type(self).__name__} explains the complete image here; give a region")
        return torch.stack([self.regions[i] > 0 for i in index.tolist()])

    def default_target(self) -> Target:
        """The default target of one image: all labels, with an axis if there are several, or the missed one."""
        count = len(self.labels)
        return 0 if count == 1 or self.missed else [list(range(count))]
