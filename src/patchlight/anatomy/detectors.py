"""Anatomy of transformers' object detectors.

YOLOS, DETR, Conditional DETR, OWL-ViT, OWLv2, RF-DETR and LW-DETR are opened at the blocks of their encoder; everything
behind them (queries, decoder, heads) is the readout. RT-DETR, D-FINE, Deformable DETR, DAB-DETR and Grounding DINO are
opened at a map of their backbone. A detector has no classes of its own: `pl.heads.Box` and `pl.heads.Boxes` read its
output.
"""

from __future__ import annotations

import copy
import threading
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from patchlight.anatomy.contract import Parts
from patchlight.anatomy.families import register_family
from patchlight.anatomy.feature_maps import FeatureMapAnatomy, read_feature_map
from patchlight.anatomy.heads.boxes import Box, corners
from patchlight.anatomy.hf import CLIP, HuggingFaceAnatomy, PublishedFor, as_processed, model_facts, read_options
from patchlight.anatomy.opened import Anatomy
from patchlight.anatomy.probe import alike
from patchlight.anatomy.tasks import TaskAnatomy
from patchlight.anatomy.texts import NoTokenizer
from patchlight.anatomy.watching import Unseen
from patchlight.core.errors import AssumedPreprocess, PatchlightError, Unsupported, first_line, warn
from patchlight.core.images import IMAGENET_MEAN, IMAGENET_STD, Preprocess, in_batches

_LOCAL = threading.local()
"""The cells that are left in the run of this thread, which the readout of a detector needs to know."""
_BEGIN, _END, _DOT, _UNKNOWN = 101, 102, 1012, 100
"""Tokens of Grounding DINO, whose forward has their numbers: texts end with a dot."""
_FAR = -1e4
"""The logit of a query that was removed together with its patch."""


@dataclass(frozen=True)
class Detection:
    """A detected object.

    Args:
        box: Left, top, right and bottom, in pixels of the photograph.
        label: The name of the class.
        score: The probability of the class.
        query: The number of the query that found it.
    """

    box: tuple[float, float, float, float]
    label: str
    score: float
    query: int

    def __str__(self) -> str:
        return f"{self.label} {self.score:.2f} at {' '.join(f'{side:.0f}' for side in self.box)}"


class Detections(tuple[Detection, ...]):
    """The detections of an image, highest score first; prints as a table."""

    def __str__(self) -> str:
        rows = [(str(i), d.label, f"{d.score:.2f}", *(f"{side:.0f}" for side in d.box)) for i, d in enumerate(self)]
        table = [("", "label", "score", "left", "top", "right", "bottom"), *rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in table)

    __repr__ = __str__


class Detector(TaskAnatomy):
    """A detector: `logits` [B,Q,C] of Q queries and their boxes `pred_boxes` [B,Q,4] (centre and size, from 0 to 1).

    `class_names` are the names of its classes. `softmax`: whether the logits are a softmax with "no object" last, not
    sigmoids. `selects`: whether its queries are selected again for every image, so that query 3 of a changed image
    is a different one.
    """

    task = "detection"
    prefers = ("genatt",)  # see docs/results/detection.md
    classifies = False
    softmax = False
    selects = False

    def __init__(self, model: Any, labels: Sequence[str] | None = None, **overrides: Any) -> None:
        self.class_names = names_of(model, labels)
        super().__init__(model, **overrides)

    def class_logits(self, output: Any) -> Tensor:
        """The logits [B,Q,C(+1)] of an output."""
        return output.logits  # type: ignore[no-any-return]

    def logits_of(self, out: Any, rows: int) -> Tensor:
        """Logits and boxes side by side [rows,K]."""
        return torch.cat([self.class_logits(out).flatten(1), out.pred_boxes.flatten(1)], 1)

    def detect(self, image: Any, threshold: float = 0.5) -> Detections:
        """The objects in one image whose score is at least the threshold, highest score first.

        Args:
            image: A path, PIL image, array, or a preprocessed tensor [1,C,H,W] or [C,H,W].
            threshold: The lowest score.
        """
        image = image[None] if isinstance(image, Tensor) and image.ndim == 3 else image
        images = image if isinstance(image, Tensor) else [image]
        sizes: list[tuple[int, int] | None] = []
        _, batches = in_batches(
            images, 1, self.preprocess, self.channels, lambda each: sizes.append(None if each is None else each.size)
        )
        tensors = list(batches)
        if len(tensors) != 1:
            raise PatchlightError(f"detect takes one image, and {len(tensors)} were given")
        bare = self if self.bare is None else self.bare
        detections = bare.detections_of(bare.plain(bare.place(tensors[0])), sizes[0])
        return Detections(each for each in detections if each.score >= threshold)

    def detections_of(self, output: Any, size: tuple[int, int] | None) -> list[Detection]:
        """Every query of the first image as a detection of its most probable class, highest score first.

        Args:
            output: The output of the model.
            size: Width and height of the photograph; None: boxes are in pixels of the tensor.
        """
        scores, labels = self.probabilities_of(output)[0].float().max(1)
        boxes = self.to_photograph(corners(output.pred_boxes[0].float()), size).tolist()
        order = scores.argsort(descending=True, stable=True).tolist()
        return [
            Detection((b[0], b[1], b[2], b[3]), self.class_names[int(labels[q])], float(scores[q]), q)
            for q in order
            for b in [boxes[q]]
        ]

    def probabilities_of(self, output: Any) -> Tensor:
        """The probability [B,Q,C] of every class at every query."""
        logits = self.class_logits(output)
        return logits.softmax(2)[..., :-1] if self.softmax else logits.sigmoid()

    def log_odds(self, output: Any) -> Tensor:
        """log p / (1 - p) of every class at every query [B,Q,C]."""
        logits = self.class_logits(output)
        if not self.softmax:
            return logits
        count = logits.shape[2]
        diagonal = torch.eye(count, dtype=torch.bool, device=logits.device)
        others = logits[:, :, None].expand(-1, -1, count, -1).masked_fill(diagonal, -torch.inf).logsumexp(3)
        return (logits - others)[..., :-1]

    def to_photograph(self, boxes: Tensor, size: tuple[int, int] | None) -> Tensor:
        """Boxes [n,4] from parts of the model's input (0 to 1) to pixels of the photograph, clipped to it."""
        height, width = self.preprocess.size
        preprocess, size = self.framed(size)
        return preprocess.boxes_on_photograph(boxes * boxes.new_tensor([width, height, width, height]), size)

    def default_question(self) -> Any:
        return Box()


PUBLISHED = PublishedFor(Preprocess((800, 1066), IMAGENET_MEAN, IMAGENET_STD, 1.0, "bilinear", "squash", "down"), True)
"""The preprocessing if a model has no processor."""


class DetectorAnatomy(HuggingFaceAnatomy, Detector):
    """A detector that is opened at the blocks of its encoder."""

    published = PUBLISHED

    def __init__(self, model: Any, processor: Any = None, **overrides: Any) -> None:
        super().__init__(model, **prepared_by(model, processor, overrides))

    def block(self, index: int, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        _LOCAL.kept = positions
        return super().block(index, tokens, positions)

    def kept(self, tokens: Tensor) -> Tensor | None:
        """The places [B,k] of tokens of which some were dropped; None if all are there."""
        positions: Tensor | None = getattr(_LOCAL, "kept", None)
        if positions is None or tokens.shape[1] == self.tokens:
            return None
        return self.places(positions).expand(len(tokens), -1)

    def why_not_drop(self, tokens: Tensor) -> str | None:
        """Why tokens cannot be dropped: dropping must equal hiding their keys from all attention."""
        if self.selects:
            return f"the queries of {self.name} are chosen anew for every image"
        try:
            kept, hidden = self.drop_and_hide(tokens, torch.arange(0, self.cells, 2, device=tokens.device)[None])
            logits = self.classified(kept)
        except Exception as error:
            return f"its blocks need every token ({first_line(error)})"
        if not alike(hidden, kept, 1e-4):
            return "its blocks compute other tokens when some are left out than when these are hidden from attention"
        return None if bool(logits.isfinite().all()) else "its decoder needs every token"


class YolosAnatomy(DetectorAnatomy):
    """YOLOS: detection tokens behind the patches, and tables of positions that are added between blocks."""

    softmax = True

    def merge(self, index: int, tokens: Tensor) -> Tensor:
        places = self.kept(tokens) if index in self.breaks else None
        if places is None:
            return super().merge(index, tokens)
        table = super().merge(index, tokens.new_zeros(1, self.tokens, tokens.shape[2]))  # added to every image
        return tokens + table[0, places]


class DetrAnatomy(DetectorAnatomy):
    """DETR and Conditional DETR: cells of a convolutional backbone, an encoder, and a decoder whose keys are its cells.

    A cell has a receptive field: dropping it removes what the encoder reads there, not the influence of its pixels on
    neighbouring cells.
    """

    def __init__(self, model: Any, **overrides: Any) -> None:
        self.softmax = type(model).__name__ == "DetrForObjectDetection"
        super().__init__(model, **overrides)

    def watch(self) -> None:
        super().watch()
        self.net.model.decoder.register_forward_pre_hook(self._read_cells, with_kwargs=True)

    def _read_cells(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Give the decoder one row per variant, and the positions of the cells that are left.

        Images are never padded, so that its mask is not needed.
        """
        memory: Tensor = kwargs["encoder_hidden_states"]
        places = self.kept(memory)
        changed: dict[str, Any] = {"encoder_attention_mask": None}
        for name in ("inputs_embeds", "spatial_position_embeddings", "object_queries_position_embeddings"):
            changed[name] = kwargs[name].expand(len(memory), -1, -1)
        if places is not None:
            table = changed["spatial_position_embeddings"]
            changed["spatial_position_embeddings"] = table.gather(1, places[..., None].expand(-1, -1, table.shape[2]))
        return args, {**kwargs, **changed}

    def parts(self, index: int) -> Parts:
        return replace(super().parts(index), norm1=None, norm2=None, beyond="its norms follow attention and MLP")


class WindowedDetector(DetectorAnatomy):
    """RF-DETR and LW-DETR, whose blocks take windows of the image in the batch axis."""

    selects = True

    def __init__(self, model: Any, **overrides: Any) -> None:
        side = model.config.backbone_config.image_size
        self.published = PublishedFor(replace(self.published.preprocess, size=(side, side)), True)
        super().__init__(model, **overrides)


class DetectorMap(FeatureMapAnatomy, Detector):
    """A detector that is opened at a feature map of its backbone."""

    library = "transformers"

    def __init__(self, model: Any, **overrides: Any) -> None:
        scales = hasattr(model.config, "feat_strides")
        self.selects = getattr(model.config, "two_stage", scales)
        super().__init__(model, **{"pooling": "gradient", **overrides})
        if scales:
            self.can_attend = (
                f"{self.name} reads the image beside its tokens (other scales of its backbone), so its blocks are not "
                "all it decides on; methods on pixels and feature maps work"
            )
        elif hasattr(model.config, "two_stage"):
            self.can_attend = "deformable attention looks at points between cells, so it has no rows"


class TextDetector(Detector):
    """A detector whose classes are texts."""

    ids: Any = None
    """Arguments of the model with the tokens of the texts."""

    def __init__(self, model: Any, tokenizer: Any = None, **overrides: Any) -> None:
        self.tokenizer: Any = tokenizer or getattr(overrides.get("processor"), "tokenizer", None)
        super().__init__(model, **overrides)

    @abstractmethod
    def read_texts(self, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        """The tokens of texts, as arguments of the model."""

    def with_texts(self, texts: Sequence[str], template: str | Sequence[str] = "{}") -> Self:
        """The same model with these sentences as its classes.

        Args:
            texts: What is to be detected.
            template: Text around each sentence.
        """
        if self.tokenizer is None or isinstance(self.tokenizer, NoTokenizer):
            raise PatchlightError(f"{self.name} has no tokenizer; give tokenizer=, or processor= one that contains it")
        if not isinstance(template, str):
            raise PatchlightError("a detector takes one template; give a string such as 'a photo of a {}'")
        prompts = [template.format(text) for text in texts]
        if not prompts:
            raise PatchlightError("no texts were given; give texts=['dog', …], what is to be detected")
        other = copy.copy(self)  # without a twin, which is made with the new texts
        other.ids, other.class_names = self.read_texts(prompts), list(texts)
        return other


class GroundingMap(DetectorMap, TextDetector):
    """Grounding DINO, which gives every token of its texts a logit; that of a text is their maximum."""

    def __init__(self, model: Any, **overrides: Any) -> None:
        self.ids = {"input_ids": torch.tensor([[_BEGIN, _UNKNOWN, _DOT, _END]])}
        super().__init__(model, **{**overrides, "labels": ["object"]})

    def read_texts(self, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        texts = [self.tokenizer([prompt], add_special_tokens=False)["input_ids"][0] for prompt in prompts]
        tokens = [_BEGIN, *(token for text in texts for token in (*map(int, text), _DOT)), _END]
        config: Any = self.model.config
        if len(tokens) > config.max_text_len:
            raise PatchlightError(f"the texts make {len(tokens)} tokens; {self.name} reads {config.max_text_len}")
        return {"input_ids": torch.tensor([tokens])}

    def call(self, images: Tensor) -> Any:
        return self.net(pixel_values=images, input_ids=self.ids["input_ids"].to(self.device).expand(len(images), -1))

    def _of_texts(self, output: Any) -> list[Tensor]:
        """The logits [B,Q,n] of the tokens of each text."""
        ends = (self.ids["input_ids"][0] == _DOT).nonzero().flatten().tolist()
        return [output.logits[..., a + 1 : b] for a, b in zip([0, *ends], ends, strict=False)]

    def class_logits(self, output: Any) -> Tensor:
        return torch.stack([tokens.amax(-1) for tokens in self._of_texts(output)], 2)

    def log_odds(self, output: Any) -> Tensor:
        return torch.stack([tokens.mean(-1) for tokens in self._of_texts(output)], 2)


def read_map(model: Any, backbone: str, scales: bool, stage: int | None = None, **overrides: Any) -> Anatomy:
    """A detector opened at the first map of its backbone that it reads, or at an earlier one.

    Args:
        model: The detector.
        backbone: The path of the module that runs the backbone.
        scales: Whether it reads all maps that the backbone returns, not only the last.
        stage: The stage of the backbone.
        overrides: Keywords for `wrap`.
    """
    part: Any = model.get_submodule(backbone)
    kind, processor = DetectorMap, overrides.pop("processor", None)
    if type(model).__name__.startswith("Grounding"):
        kind = GroundingMap
        overrides.setdefault("tokenizer", getattr(processor, "tokenizer", None))
    facts = {"name": None, "labels": None, **prepared_by(model, processor, overrides)}
    facts = model_facts(model, PUBLISHED, False, processor=None, **facts)
    first = -len(part.intermediate_channel_sizes) if scales else -1
    if stage is not None and first < stage < 0:
        raise PatchlightError(
            f"{facts['name']} also reads earlier maps of its backbone than that of stage {stage}; give stage={first} "
            "or less"
        )
    paths = [f"swin.encoder.layers.{i}" for i in range(-first)] if kind is GroundingMap else None
    return read_feature_map(model, first if stage is None else stage, kind, facts, paths, f"{backbone}.model")


class OwlAnatomy(TextDetector, DetectorAnatomy):
    """OWL-ViT and OWLv2: every patch is a query, and `texts` are the classes."""

    published = PublishedFor(replace(CLIP, size=(768, 768), fit="squash"))

    def read_texts(self, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        config: Any = self.model.config
        length = config.text_config.max_position_embeddings
        tokens = self.tokenizer(prompts, padding="max_length", max_length=length, return_tensors="pt")
        ids = {key: tokens[key] for key in ("input_ids", "attention_mask") if key in tokens}
        if ids["input_ids"].shape[1] > length:
            raise PatchlightError(
                f"the longest text makes {ids['input_ids'].shape[1]} tokens; {self.name} reads {length}"
            )
        return ids

    def watch(self) -> None:
        super().watch()
        net: Any = self.net
        if self.ids is None:
            width = net.config.text_config.hidden_size
            net.patchlight_texts = torch.eye(1, width, device=self.device, dtype=self.dtype)[None]
            return
        with torch.no_grad():
            ids = {key: value.to(self.device) for key, value in self.ids.items()}
            net.patchlight_texts = net(pixel_values=self.blank(1), **ids).text_embeds

    def forward_of(self, net: Any, images: Tensor) -> Any:
        features = net.image_embedder(pixel_values=images)[0].flatten(1, 2)
        texts = getattr(net, "patchlight_texts", None)
        if texts is None:  # while its blocks are looked for
            texts = images.new_zeros(1, 1, net.config.text_config.hidden_size)
        logits = net.class_predictor(features, texts.to(features).expand(len(features), -1, -1))[0]
        out = SimpleNamespace(logits=logits, pred_boxes=net.box_predictor(features, features))
        if hasattr(net, "objectness_predictor"):
            out.objectness_logits = net.objectness_predictor(features)
        return out

    def _query_patches(self, keep: Tensor) -> Tensor:
        """The patches [n] of the question's queries, which are always kept."""
        queries = sorted({r.query for r in getattr(self.question, "references", ())})
        return torch.tensor(queries, dtype=torch.long, device=keep.device)

    def places(self, keep: Tensor) -> Tensor:
        places = self._query_patches(keep) + self.prefix
        return torch.cat([super().places(keep), places.expand(len(keep), -1)], 1)

    def block(self, index: int, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is None or len(patches := self._query_patches(positions)) == 0:
            return super().block(index, tokens, positions)
        seen = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        seen[:, -len(patches) :] = (positions[:, :, None] != patches).all(1)  # a kept patch must not count twice
        with Unseen(seen):
            return super().block(index, tokens, positions)

    def classified(self, tokens: Tensor) -> Tensor:
        places = self.kept(tokens)
        if places is None:
            return super().classified(tokens)
        complete = tokens.new_zeros(len(tokens), self.tokens, tokens.shape[2])
        _LOCAL.absent = torch.ones(complete.shape[:2], dtype=torch.bool, device=tokens.device).scatter(1, places, False)
        try:
            return super().classified(complete.scatter(1, places[..., None].expand_as(tokens), tokens))
        finally:
            _LOCAL.absent = None

    def run_model(self, images: Tensor) -> Any:
        out = super().run_model(images)
        absent: Tensor | None = getattr(_LOCAL, "absent", None)
        if absent is not None:
            out.logits = out.logits.masked_fill(absent[:, self.prefix :, None], _FAR)
        return out


def names_of(model: Any, labels: Sequence[str] | None) -> list[str]:
    """The names of a detector's classes; numbers that COCO leaves out have names, too."""
    if labels is not None:
        return list(labels)
    names = dict(getattr(model.config, "id2label", None) or {})
    return [str(names.get(i, f"class {i}")) for i in range(int(model.config.num_labels))]


_FITS: Mapping[str, Literal["squash", "pad", "pad-mean"]]
_FITS = {"RfDetr": "squash", "Owlv2": "pad", "Eomt": "pad", "SamImage": "pad-mean"}
"""How processors whose names begin like this make a square; their rounding and smoothing are not quite ours."""


def prepared_by(model: Any, processor: Any, overrides: dict[str, Any]) -> dict[str, Any]:
    """Keywords with the preprocessing of a processor; one that keeps the aspect of photographs becomes a fixed size."""
    processor = getattr(processor, "image_processor", processor)
    name = str(overrides.get("name") or getattr(model, "name_or_path", "") or type(model).__name__)
    if "preprocess" in overrides or processor is None:
        return overrides
    kind, split = type(processor).__name__, getattr(processor, "do_split_image", False)
    fit = next((fit for start, fit in _FITS.items() if kind.startswith(start) and not split), None)
    size = {key: int(value) for key, value in dict(processor.size).items() if value is not None}
    if fit is None and "shortest_edge" not in size and not getattr(processor, "keep_aspect_ratio", False):
        return {**overrides, "preprocess": as_processed(processor, 3, name)}
    height = width = min(size.values()) if fit is None else max(size.values())
    if "height" in size:
        height, width = size["height"], size["width"]
    elif fit is None and not split:
        width = min(size.get("longest_edge", height * 4 // 3), height * 4 // 3)
        width -= width % 32  # whole patches
    if fit is None:
        warn(
            f"the processor of {name} keeps the aspect of each photograph; all are resized to {height} x {width} here; "
            "give preprocess=pl.Preprocess((height, width), …) for another shape",
            AssumedPreprocess,
        )
    changed = copy.copy(processor)
    changed.size = {"height": height, "width": width}
    read = read_options(changed, f"the {kind} of {name}", "give preprocess=pl.Preprocess((height, width), …)")
    return {**overrides, "preprocess": replace(read, fit=fit or "squash", corner="down")}


_KINDS: Mapping[str, type[DetectorAnatomy]] = {
    "YolosForObjectDetection": YolosAnatomy,
    "DetrForObjectDetection": DetrAnatomy,
    "ConditionalDetrForObjectDetection": DetrAnatomy,
    "RfDetrForObjectDetection": WindowedDetector,
    "LwDetrForObjectDetection": WindowedDetector,
    "OwlViTForObjectDetection": OwlAnatomy,
    "Owlv2ForObjectDetection": OwlAnatomy,
}


_MAPS = {
    **{f"{kind}ForObjectDetection": ("model.backbone", True) for kind in ("RTDetr", "RTDetrV2", "DFine")},
    "DeformableDetrForObjectDetection": ("model.backbone", True),
    "DabDetrForObjectDetection": ("model.backbone.conv_encoder", False),
    "GroundingDinoForObjectDetection": ("model.backbone.conv_encoder", True),
}
"""Detectors that are opened at a feature map: the path of the backbone, and whether all of its maps are read."""


@register_family("transformers detectors", package="transformers")
def read_detector(model: nn.Module, stage: int | None = None, **overrides: Any) -> Anatomy | None:
    """The anatomy of a transformers detector, or None."""
    name = type(model).__name__
    if name in _KINDS:
        return _KINDS[name](model, **overrides)
    if name in _MAPS:
        return read_map(model, *_MAPS[name], stage, **overrides)
    if name.endswith("ForObjectDetection"):
        raise Unsupported(f"{name} is not a supported detector; supported: {', '.join([*_KINDS, *_MAPS])}")
    return None
