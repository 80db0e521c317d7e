"""Questions are read from the complete output of a model: a box, a region, the words of an answer.

A question is prepared for each image from the model's plain output: which detection, which region, which words. What it
finds there is held, so for this image it is an ordinary head: methods and metrics see logits and a target.
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
    """A score that is read from the output of a model.

    A subclass defines `prepare`, what is held for an image, and `read`, the scores. `tasks` are the kinds of models
    that it can be asked of (`Anatomy.task`). `pooling` is "gradient": which tokens are read differs between questions,
    and is found from the gradient of the score.
    """

    outputs = Outputs("paired")
    pooling = "gradient"
    tasks: Sequence[str] = ()
    general: Self | None = None
    """The question for any image, of which this is the one for an image; None if it is not prepared."""
    words: Sequence[Any] = ()
    """The words of an answer in words."""
    image: tuple[str, ...] = ()
    """The hash of the image that it is prepared for."""
    annotations: Sequence[str] = ()
    """What a metric of places reads of the object in question: "boxes" or "masks"; empty if there is no object."""
    regions: Sequence[Tensor] = ()
    """The pixels [H,W] of the model's input, from 0 to 1, that each label is about; empty if about the whole image."""

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
            size: Width and height of its photograph; None if a tensor was given. What users give in pixels of the
                photograph is in pixels of the tensor then.
        """
        prepared = copy(self)
        prepared.general, prepared.image = self, hash_images(image)
        prepared.prepare(vit, image, size)
        return prepared

    def measured(self) -> Self:
        """The question whose scores metrics follow."""
        return self

    def check_measured(self, labels: Sequence[int]) -> None:
        """Refuse labels whose curve would say nothing."""

    @abstractmethod
    def prepare(self, vit: Any, image: Tensor, size: tuple[int, int] | None) -> None:
        """Set what is held for an image, and `labels`, from the model's plain output; changes this copy."""

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
        """What the calls of the blocks depend on beside the image; None if on nothing."""
        return None

    def object_of(self, index: Tensor) -> Tensor:
        """Whether pixels [B,H,W] belong to the object that the labels `index` [B] are about."""
        if not self.regions:
            raise PatchlightError(f"{type(self).__name__} explains the complete image here; give a region")
        return torch.stack([self.regions[i] > 0 for i in index.tolist()])

    def default_target(self) -> Target:
        """What is explained by default of one image: all labels, with an axis if there are several."""
        count = len(self.labels)
        return 0 if count == 1 else [list(range(count))]
