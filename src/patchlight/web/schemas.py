"""The requests and answers of the API, with limits and examples."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from patchlight.core.files import finite_or_none
from patchlight.evidence.fills import Painted

MOST_METHODS, MOST_VARIANTS, MOST_TEXTS, MOST_PREDICTIONS, MOST_PATCHES = 16, 64, 64, 1000, 65_536
MOST_PIXELS = 40_000_000
"""Maximum number of pixels of an upload, and so the largest coordinate."""
NAME = r"^[A-Za-z0-9_.+-]{1,100}$"


def _number(value: Any) -> Any:
    """Refuse booleans and strings, which pydantic would convert to numbers."""
    if isinstance(value, bool | str):
        raise ValueError("give a number")
    return value


def digits(value: float | None) -> float | None:
    """A number with the digits of float32; None if it is not finite, because JSON has no NaN."""
    return None if value is None else finite_or_none(float(f"{value:.7g}"))


Integer = Annotated[int, BeforeValidator(_number)]
Index = Annotated[Integer, Field(ge=0, lt=2**31)]
_WAIT = Field(ge=0, le=60, description="Seconds to wait for the end of the job before answering.")
Seconds = Annotated[float, BeforeValidator(_number), _WAIT]
ImageId = Annotated[str, Field(pattern=r"^[a-z0-9-]{1,64}$", description="A bundled image, or the id of an upload.")]
Text = Annotated[str, Field(min_length=1, max_length=300)]
Prompt = Annotated[str, Field(min_length=1, max_length=1000)]
Number = Annotated[float | None, BeforeValidator(digits)]
"""A number; null if it is not finite."""
Quantity = Literal["probability", "cosine", "output"]
Kind = Literal["explain", "measure", "file"]
State = Literal["waiting", "running", "done", "failed", "cancelled"]


def _example(**fields: Any) -> ConfigDict:
    return ConfigDict(json_schema_extra={"examples": [fields]})


class StrictModel(BaseModel):
    """A request; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")


Pixel = Annotated[float, BeforeValidator(_number), Field(ge=0, le=MOST_PIXELS, allow_inf_nan=False)]
Corners = Annotated[
    tuple[Pixel, Pixel, Pixel, Pixel], Field(description="Left, top, right and bottom in pixels of the photograph.")
]

Point = Annotated[tuple[Pixel, Pixel], Field(description="A pixel of the photograph: x and y.")]


class HeadRequest(StrictModel):
    """A question about the output of a model: one of `pl.heads`, with the same arguments."""

    model_config = ConfigDict(frozen=True)


class BoxRequest(HeadRequest):
    """Explain a detection, a label in a box, or why an object was missed in a box."""

    kind: Literal["box"]
    detection: Annotated[Index | None, Field(description="The index of a detection, sorted by score.")] = None
    box: Corners | None = None
    label: Text | None = None
    missed: bool = False


class RegionRequest(HeadRequest):
    """Explain a class in a box, or in the predicted region around a point."""

    kind: Literal["region"]
    box: Corners | None = None
    point: Point | None = None
    predicted: bool = Field(False, description="Whether to explain the predicted region around the point.")
    label: Text | None = None


class MaskRequest(HeadRequest):
    """Explain the mask at a point."""

    kind: Literal["mask"]
    points: Point | None = None


class AnswerRequest(HeadRequest):
    """Explain a word of the answer to a prompt; the target is the index of the word."""

    kind: Literal["answer"]
    prompt: Prompt
    answer: Annotated[Prompt | None, Field(description="The answer to explain; null: the generated one.")] = None
    force: bool = Field(False, description="Whether to explain a word without a gain from the image.")


Heads = BoxRequest | RegionRequest | MaskRequest | AnswerRequest


class AskedQuestion(StrictModel):
    """An image, and the class to explain."""

    image: ImageId
    head: Annotated[Heads, Field(discriminator="kind")] | None = Field(
        None, description="For models that are not classifiers: the question; null: the default question."
    )
    target: Index | None = Field(None, description="The class to explain; null: the predicted class.")
    against: Index | None = Field(None, description="The class to contrast it with.")
    texts: list[Text] | None = Field(
        None, min_length=1, max_length=MOST_TEXTS, description="Sentences to use as classes, for image-text models."
    )
    template: Annotated[str, Field(max_length=300)] = Field("{}", description="Prompt template for each sentence.")
    model_config = _example(image="cat")


class Removed(StrictModel):
    """How patches are hidden: tokens are removed from the sequence, or patches are painted with a fill."""

    unit: Literal["token", "patch"] = "patch"
    fill: Painted = "image-mean"


class MethodRequest(StrictModel):
    """A method with settings."""

    name: Annotated[str, Field(pattern=NAME)]
    settings: dict[Annotated[str, Field(pattern=r"^[a-z_]{1,40}$")], bool | int | float | str | None] = {}


def once_each(methods: list[MethodRequest]) -> list[MethodRequest]:
    """Refuse a method that is listed twice: maps are identified by their names."""
    names = [method.name for method in methods]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"'{twice}' is listed {names.count(twice)} times; list each method once")
    return methods


class PredictRequest(AskedQuestion):
    most: Annotated[Integer, Field(ge=1, le=MOST_PREDICTIONS)] = 10


class ExplainRequest(AskedQuestion):
    methods: Annotated[list[MethodRequest], AfterValidator(once_each)] = Field(min_length=1, max_length=MOST_METHODS)
    seed: Index = 0
    wait: Seconds = 0
    model_config = _example(image="cat", methods=[{"name": "auto"}], wait=30)


class AblateRequest(PredictRequest, Removed):
    """Variants of the image, each without some patches."""

    removed: list[Annotated[list[Index], Field(max_length=MOST_PATCHES)]] = Field(
        min_length=1, max_length=MOST_VARIANTS, description="The patches to hide in each variant, row by row from 0."
    )
    model_config = _example(image="cat", removed=[[27, 28, 35, 36]])


class HideRequest(AskedQuestion, Removed):
    """The map whose strongest patches are hidden; exactly one method."""

    methods: list[MethodRequest] = Field([MethodRequest(name="auto")], min_length=1, max_length=1)
    seed: Index = 0


class MeasureRequest(ExplainRequest, Removed):
    """The faithfulness test: deletion and insertion in the order of each map, and in random orders."""

    steps: Annotated[Integer, Field(ge=2, le=64)] = 16
    randoms: Annotated[Integer, Field(ge=2, le=100)] = Field(20, description="Number of random orders.")
    sanity: bool = Field(False, description="Also test whether the maps change when the weights are randomised.")


class FileRequest(MeasureRequest):
    """Maps as a file; the fields of the faithfulness test apply to reports."""

    kind: Literal["png", "pdf", "arrays", "report"] = "png"
    name: Annotated[str, Field(max_length=100)] = Field("image", description="The file name of the image.")


class Prediction(BaseModel):
    index: int
    label: str
    value: Number


class PredictResult(BaseModel):
    """The classes with the highest values, and the classes of the question."""

    predictions: list[Prediction]
    asked: list[Prediction] = Field(description="The target, and the class that it is contrasted with.")
    quantity: Quantity


class DetectionChoice(BaseModel):
    """A detection; `index` is its number for a question."""

    index: int
    box: Corners
    label: str
    score: Number


class AreaChoice(BaseModel):
    """A region of one predicted class, a pixel of the photograph in it, and its share of the frame."""

    label: str
    point: Point
    share: Number


class WordChoice(BaseModel):
    """A word of an answer, and the drop of its log-probability without the image."""

    word: str
    probability: Number
    gain: Number


class ChoicesResult(BaseModel):
    """What can be explained in an image, and the box or region of the current question."""

    frame: Annotated[
        tuple[float, float, float, float],
        Field(description="The part of the photograph that the model sees: left, top, right, bottom in its pixels."),
    ]
    detections: list[DetectionChoice] = []
    areas: list[AreaChoice] = []
    boxes: Annotated[list[Corners], Field(description="The boxes of the question.")] = []
    mask: Annotated[
        list[list[Number]], Field(description="The region of the question in the frame: rows of values from 0 to 1.")
    ] = []
    words: list[WordChoice] = []
    index: Annotated[int, Field(description="The default target of the question.")] = 0
    answer: str = ""
    prompt: str = ""


class AblateResult(BaseModel):
    """The predictions for the unchanged image (`whole`) and for each variant."""

    whole: PredictResult
    variants: list[PredictResult]


class MapResult(BaseModel):
    """The map of one method: raw signed scores, row by row."""

    method: str = Field(description="The name in the request.")
    made_by: str = Field(description="The method that made the map; it differs for 'auto' and aliases.")
    ignores_class: bool = Field(description="Whether every class gets the same map.")
    scores: list[list[Number]]
    error: Annotated[list[list[Number]] | None, Field(description="Standard errors, for sampling methods.")] = None
    level: Literal["token", "pixel"]
    target: int
    target_label: str
    against: int | None
    against_label: str | None
    inside: Annotated[Number, Field(description="The share of the positive scores in the question's box or region.")]
    settings: dict[str, Any]
    seed: int
    seconds: float
    warning: Annotated[str, Field(description="Why the map may be useless.")] = ""


class HideResult(BaseModel):
    """The effect of hiding the strongest patches of a map, compared with hiding as many random patches."""

    method: str = Field(description="The method that made the map.")
    order: list[int] = Field(description="The hidden patches, the strongest first.")
    before: Number = Field(description="The score of the class (of a contrast, the difference) for the whole image.")
    after: Number
    random_after: Number = Field(description="The mean over random choices of as many patches.")
    quantity: str = Field(description="What the scores are.")
    words: str = Field(description="The result in one sentence.")


class RemovalCurve(BaseModel):
    """The score of the class (of a contrast, the difference of both scores) at each step."""

    insertion: list[Number]
    deletion: list[Number]
    insertion_area: Number
    deletion_area: Number
    score: Number = Field(description="Insertion minus deletion; higher is better.")


class FaithfulnessResult(BaseModel):
    """The faithfulness test of one map."""

    method: str
    order: list[int] = Field(description="Patches, the strongest first.")
    curve: RemovalCurve
    predictions: list[PredictResult] = Field(description="The predictions at each step of the deletion.")
    beaten: int = Field(description="How many random orders have a lower score.")
    better: bool = Field(description="Whether the map is better than random orders, at 5 %.")
    effect: Number = Field(description="Score minus the mean score of random orders, as a share of the score's range.")
    rank: int = Field(description="Rank among the tested maps, 1 is best; 0 until all are tested.")
    words: str = Field(description="The result in words: better than random or not, effect size, rank.")
    sanity: Annotated[Number, Field(description="Similarity to maps of the model with random weights.")] = None
    sanity_words: str = ""


class RandomOrders(BaseModel):
    """The random orders: their mean curves and their scores."""

    count: int
    curve: RemovalCurve
    low: Number
    high: Number
    scores: list[Number]


class MeasureResult(BaseModel):
    fractions: list[float] = Field(description="The fraction of patches removed at each step.")
    removed: list[int] = Field(description="The number of patches removed at each step.")
    quantity: Literal["probability", "similarity", "output"] = Field(description="The score of one class.")
    quantity_words: str = Field(description="What the curves show, such as 'difference of probabilities'.")
    random: RandomOrders
    methods: list[FaithfulnessResult]


class BlockResult(BaseModel):
    """The prediction if the model ended after a block."""

    block: int
    predictions: list[Prediction]
    asked: list[Prediction]


class InsideResult(BaseModel):
    """`attention` [blocks][patches] of the token that the classifier reads, mean over heads; null with a reason."""

    attention: list[list[Number]] | None
    attention_reason: str = ""
    reads: str = Field(description="Whose attention this is: the class token's, or the mean over all patches.")
    lens: list[BlockResult] | None
    lens_reason: str = ""
    quantity: Quantity


class JobProgress(BaseModel):
    done: int
    total: int | None


class JobStatus(BaseModel):
    """A job: its state, progress and results so far."""

    id: str
    kind: Kind
    state: State
    progress: JobProgress | None = None
    seconds: float = 0.0
    error: str = ""
    maps: list[MapResult] = []
    failures: Annotated[dict[str, str], Field(description="Methods without a map, and why.")] = {}
    measured: MeasureResult | None = None
    file: Annotated[str | None, Field(description="The path of its file, once the job is done.")] = None


class Photo(BaseModel):
    """A bundled photograph."""

    id: str
    label: str
    subject: str
    credit: str
    licence: str


class ModelFacts(BaseModel):
    name: str
    library: str
    image_size: tuple[int, int]
    grid: tuple[int, int]
    extent: tuple[int, int] = Field(description="Height and width of the part of the image that the patches cover.")
    depth: int
    heads: int
    prefix: int
    classes: int
    labels: list[str]
    quantity: Quantity
    task: str = Field(description="'detection', 'segmentation', …; empty for classifiers.")
    class_names: list[str] = Field(description="The class names that a question can use; empty for classifiers.")
    takes_texts: bool
    texts: list[str] = Field(description="The sentences that are its classes, if they share one template.")
    template: str
    no_tokens: str | None = Field(description="Why tokens cannot be removed; null if they can.")
    fills: list[str]
    fill_names: dict[str, str] = Field(description="What each fill paints.")
    photos: list[Photo]
    image: str | None = Field(description="The image to start with.")
    auto: str = Field(description="The method that 'auto' chooses for this model.")
    methods: list[str] = Field(description="The methods to start with; the first is that of 'auto'.")
    python: str = Field(description="The line of Python that loads the model.")
    cli: str = Field(description="The command-line options that load it.")
    bytes: int = Field(description="Largest upload in bytes.")
    pixels: int = Field(description="Largest number of pixels of an upload.")
    device: str
    version: str


class MethodFacts(BaseModel):
    name: str
    group: str
    purpose: str = Field(description="What the method is recommended for; empty for other methods.")
    summary: str
    paper: str
    cost: str
    quick: bool = Field(description="Whether it takes only a few forward and backward passes.")
    seconds: Annotated[Number, Field(description="Seconds of its last run, if there was one.")] = None
    ignores_class: bool = Field(description="Whether every class gets the same map.")
    supported: bool
    reason: str = Field(description="Why it does not work on this model.")
    settings: Annotated[dict[str, str], Field(description="Type and default of each setting.")]
    setting_texts: Annotated[dict[str, str], Field(description="What each setting does.")]


class MethodList(BaseModel):
    methods: list[MethodFacts]


class ImageFacts(BaseModel):
    id: str
    width: int
    height: int


class Problem(BaseModel):
    """Why a request failed, in one sentence."""

    error: str
