"""What goes over the wire: every request and answer of the API, with its limits and an example."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from patchlight.core.files import finite_or_none
from patchlight.evidence.fills import Painted

MOST_METHODS, MOST_VARIANTS, MOST_TEXTS, MOST_PREDICTIONS, MOST_PATCHES = 16, 64, 64, 1000, 65_536
NAME = r"^[A-Za-z0-9_.+-]{1,100}$"


def _number(value: Any) -> Any:
    """What is given for a number, unless it is true, false or a word."""
    if isinstance(value, bool | str):
        raise ValueError("give a number")
    return value


def digits(value: float | None) -> float | None:
    """A number with the digits that float32 has, as JSON knows it."""
    return None if value is None else finite_or_none(float(f"{value:.7g}"))


Whole = Annotated[int, BeforeValidator(_number)]
Index = Annotated[Whole, Field(ge=0, lt=2**31)]
Seed = Annotated[Whole, Field(ge=0, lt=2**31)]
Seconds = Annotated[
    float,
    BeforeValidator(_number),
    Field(ge=0, le=60, description="How long to wait for the end before a job is answered."),
]
ImageId = Annotated[str, Field(pattern=r"^[a-z0-9-]{1,64}$", description="A bundled image, or what an upload gave.")]
Text = Annotated[str, Field(min_length=1, max_length=300)]
Number = Annotated[float | None, BeforeValidator(digits)]
"""A number; null where it is not finite."""
Quantity = Literal["probability", "cosine", "output"]
Removal = Literal["token", "patch"]
"""Patch tokens are really removed, or patches are painted with a fill."""
Kind = Literal["explain", "measure", "file"]
State = Literal["waiting", "running", "done", "failed", "cancelled"]


class StrictModel(BaseModel):
    """A request; fields that it does not have are refused."""

    model_config = ConfigDict(extra="forbid")


class Question(StrictModel):
    """An image, and what is asked about it."""

    image: ImageId
    target: Index | None = Field(None, description="The class asked about; null: the predicted one.")
    against: Index | None = Field(None, description="The class it is contrasted with: this against that.")
    texts: list[Text] | None = Field(
        None, min_length=1, max_length=MOST_TEXTS, description="Sentences as classes, of a model with a text side."
    )
    template: Annotated[str, Field(max_length=300)] = Field("{}", description="What stands around each sentence.")
    model_config = ConfigDict(json_schema_extra={"examples": [{"image": "cat"}]})


class MethodRequest(StrictModel):
    """A method with settings."""

    name: Annotated[str, Field(pattern=NAME)]
    settings: dict[Annotated[str, Field(pattern=r"^[a-z_]{1,40}$")], bool | int | float | str | None] = {}


def once_each(methods: list[MethodRequest]) -> list[MethodRequest]:
    """The methods, unless one is there twice: maps are told by their names."""
    names = [method.name for method in methods]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"a method is asked for once, and '{twice}' is there {names.count(twice)} times")
    return methods


class PredictRequest(Question):
    most: Annotated[Whole, Field(ge=1, le=MOST_PREDICTIONS)] = 10


class ExplainRequest(Question):
    methods: Annotated[list[MethodRequest], AfterValidator(once_each)] = Field(min_length=1, max_length=MOST_METHODS)
    seed: Seed = 0
    wait: Seconds = 0
    model_config = ConfigDict(
        json_schema_extra={"examples": [{"image": "cat", "methods": [{"name": "genatt"}], "wait": 30}]}
    )


class AblateRequest(PredictRequest):
    """Variants of the image, each without some patches."""

    removed: list[Annotated[list[Index], Field(max_length=MOST_PATCHES)]] = Field(
        min_length=1, max_length=MOST_VARIANTS, description="Patches of each variant, row by row from 0."
    )
    unit: Removal = "patch"
    fill: Painted = "image-mean"
    model_config = ConfigDict(json_schema_extra={"examples": [{"image": "cat", "removed": [[27, 28, 35, 36]]}]})


class MeasureRequest(ExplainRequest):
    """Deletion and insertion of methods' maps, and of random orders."""

    steps: Annotated[Whole, Field(ge=2, le=64)] = 16
    unit: Removal = "patch"
    fill: Painted = "image-mean"
    randoms: Annotated[Whole, Field(ge=2, le=100)] = Field(20, description="Random orders to compare with.")
    sanity: bool = Field(False, description="Also ask whether the maps change when the weights are randomised.")


class FileRequest(MeasureRequest):
    """What is on the screen, as a file; the fields of a test are for a report."""

    kind: Literal["png", "pdf", "arrays", "report"] = "png"
    name: Annotated[str, Field(max_length=100)] = Field("image", description="What a report calls the image.")


class Prediction(BaseModel):
    index: int
    label: str
    value: Number


class PredictResult(BaseModel):
    """The first classes by value, and those asked about whatever their place."""

    predictions: list[Prediction]
    asked: list[Prediction] = Field(description="The target, and the class it is contrasted with.")
    quantity: Quantity


class AblateResult(BaseModel):
    """For each variant what the model says; `whole` is what it says of the image as it is."""

    whole: PredictResult
    variants: list[PredictResult]


class MapResult(BaseModel):
    """Raw signed scores of one method, row by row."""

    method: str
    scores: list[list[Number]]
    error: Annotated[list[list[Number]] | None, Field(description="Standard errors, of methods that draw.")] = None
    level: Literal["token", "pixel"]
    target: int
    target_label: str
    against: int | None
    against_label: str | None
    settings: dict[str, Any]
    seed: int
    seconds: float
    warning: Annotated[str, Field(description="Why the map may say nothing.")] = ""


class RemovalCurve(BaseModel):
    """One order of removal. `values` are of the class asked about (of a pair, the difference), at each step."""

    insertion: list[Number]
    deletion: list[Number]
    insertion_area: Number
    deletion_area: Number
    score: Number = Field(description="Insertion less deletion; higher is better.")


class FaithfulnessResult(BaseModel):
    """What removing patches in a map's order says of the map."""

    method: str
    order: list[int] = Field(description="Patches, the highest first.")
    curve: RemovalCurve
    predictions: list[PredictResult] = Field(description="What the model says at each step of the deletion.")
    beaten: int = Field(description="How many of the random orders it beats.")
    better: bool = Field(description="Whether it beats so many that chance does so in 5 % of cases at most.")
    words: str
    sanity: Annotated[
        Number, Field(description="Similarity to maps of a model with random weights; 1: nothing changed.")
    ] = None
    sanity_words: str = ""


class RandomOrders(BaseModel):
    """The random orders: their mean curves, and their scores."""

    count: int
    curve: RemovalCurve
    low: Number
    high: Number
    scores: list[Number]


class MeasureResult(BaseModel):
    fractions: list[float] = Field(description="The fraction of patches removed at each step.")
    removed: list[int] = Field(description="How many patches that are.")
    quantity: Literal["probability", "similarity", "output"] = Field(
        description="What the curves are of; a similarity is (1 + cosine) / 2, as the metric `ins-del` reads it."
    )
    random: RandomOrders
    methods: list[FaithfulnessResult]


class BlockResult(BaseModel):
    """What the model would have said after a block."""

    block: int
    predictions: list[Prediction]
    asked: list[Prediction]


class InsideResult(BaseModel):
    """`attention` [blocks][patches] of the token that the classifier reads, mean over heads; null with the reason."""

    attention: list[list[Number]] | None
    attention_reason: str = ""
    reads: str = Field(description="Which rows of attention these are: of the class token, or the mean of all patches.")
    lens: list[BlockResult] | None
    lens_reason: str = ""
    quantity: Quantity


class JobProgress(BaseModel):
    done: int
    total: int | None


class JobStatus(BaseModel):
    """A piece of work: its state, how far it is, and what it has given so far."""

    id: str
    kind: Kind
    state: State
    progress: JobProgress | None = None
    seconds: float = 0.0
    error: str = ""
    maps: list[MapResult] = []
    failures: Annotated[dict[str, str], Field(description="Methods that gave no map, and why.")] = {}
    measured: MeasureResult | None = None
    file: Annotated[str | None, Field(description="Where its file is, once it is done.")] = None


class Photo(BaseModel):
    """An image that is bundled."""

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
    extent: tuple[int, int] = Field(description="Height and width of what the patches cover, of the image's size.")
    depth: int
    heads: int
    prefix: int
    classes: int
    labels: list[str]
    quantity: Quantity
    takes_texts: bool
    texts: list[str] = Field(description="The sentences that its classes are, where one template was put around them.")
    template: str
    no_tokens: str | None = Field(description="Why tokens cannot be removed; null where they can.")
    fills: list[str]
    fill_names: dict[str, str] = Field(description="What each fill paints.")
    photos: list[Photo]
    image: str | None = Field(description="The image to begin with.")
    methods: list[str] = Field(description="The methods to begin with.")
    python: str = Field(description="The line of Python that opens the model.")
    cli: str = Field(description="The options of the command line that open it.")
    bytes: int = Field(description="The largest upload.")
    pixels: int = Field(description="The most pixels of an upload.")
    device: str
    version: str


class MethodFacts(BaseModel):
    name: str
    summary: str
    paper: str
    cost: str
    quick: bool = Field(description="Whether it takes a few forwards and backwards, and no more.")
    seconds: Annotated[Number, Field(description="What it took the last time, where it has run.")] = None
    supported: bool
    reason: str
    settings: Annotated[dict[str, str], Field(description="Type and default of each setting.")]
    setting_texts: Annotated[dict[str, str], Field(description="What each setting does.")]


class MethodList(BaseModel):
    methods: list[MethodFacts]


class ImageFacts(BaseModel):
    id: str
    width: int
    height: int


class Problem(BaseModel):
    """Why a request was not met: one sentence."""

    error: str
