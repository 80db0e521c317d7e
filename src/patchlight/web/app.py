"""The routes: which request is answered where and in which queue, and how errors are reported."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from importlib import resources
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.sse import EventSourceResponse, ServerSentEvent
from starlette.exceptions import HTTPException

from patchlight import __version__
from patchlight.core.errors import PatchlightError
from patchlight.evidence.fills import Painted
from patchlight.web import answers, schemas
from patchlight.web.files import make_file
from patchlight.web.images import NotFound
from patchlight.web.jobs import RunningJob, describe_error
from patchlight.web.service import JobInput, ModelService

LOG = logging.getLogger("patchlight.web")
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
FILES = ("image/png", "application/pdf", "application/zip", "text/html")
"""What files are made of."""
UPLOADS = ("image/*", "application/octet-stream")
_EVENT = {
    "type": "object",
    "description": "The data is JSON: a JobStatus, a MapResult, the random orders, a FaithfulnessResult.",
    "properties": {"event": {"enum": ["job", "map", "random", "truth", "end"]}, "data": {"type": "string"}},
    "required": ["event", "data"],
}
_WHY = {
    400: "the request cannot be met",
    401: "the token is missing or wrong",
    403: "another site, or a name that this server does not go by",
    404: "no such image or job, or no longer",
    405: "another method is wanted",
    408: "the body came too slowly",
    409: "the job has no file, or not yet",
    413: "the body is too large",
    415: "another type of body is wanted",
    422: "the request is not what the schema says",
    429: "too much is waiting; Retry-After says when to try again",
    503: "it took too long",
}
PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": schemas.Problem, "description": words[:1].upper() + words[1:]} for status, words in _WHY.items()
}
LATER: dict[int | str, dict[str, Any]] = {
    202: {"model": schemas.JobStatus, "description": "It goes on; look again, or listen"}
}


def _content(*kinds: str) -> dict[str, Any]:
    """Bytes of these types, as OpenAPI describes them."""
    return {"content": {kind: {"schema": {"type": "string", "format": "binary"}} for kind in kinds}}


_IMAGE = {"requestBody": {"required": True, **_content(*UPLOADS)}}
routes = APIRouter(prefix="/api", responses=PROBLEMS)


async def _service(request: Request) -> ModelService:
    return request.app.state.service  # type: ignore[no-any-return]


Service = Annotated[ModelService, Depends(_service)]


def create_app(service: ModelService) -> FastAPI:
    """The application of a model service; `Guard` stands before it (`serve.guarded`)."""
    app = FastAPI(
        title="Patchlight",
        version=__version__,
        description="Which patches of an image a Vision Transformer decided on, and whether that is true.",
        docs_url=None,
        redoc_url=None,
        openapi_url="/api/openapi.json",
        redirect_slashes=False,
    )
    app.state.service = service
    app.include_router(routes)
    _static(app)
    for kind in (PatchlightError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _failure)
    return app


@routes.get("/model", summary="The model, its classes, the bundled images and the limits")
async def model(service: Service) -> schemas.ModelFacts:
    return await service.quick.run(service.facts)


@routes.get("/methods", summary="Every method, whether it works on this model, and what it costs")
async def methods(service: Service) -> schemas.MethodList:
    return schemas.MethodList(methods=await service.quick.run(service.methods))


@routes.post("/images", status_code=201, summary="Upload an image", openapi_extra=_IMAGE)
async def upload(service: Service, request: Request) -> schemas.ImageFacts:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().casefold()
    if not (kind.startswith("image/") or kind == "application/octet-stream"):
        raise HTTPException(415, "give the bytes of an image, with its type as 'Content-Type: image/jpeg'")
    data = await request.body()
    image = await service.quick.run(lambda: service.images.add(data))
    return schemas.ImageFacts(id=image.id, width=image.size[0], height=image.size[1])


@routes.get(
    "/images/{image}",
    summary="What the model sees of an image, or a fill of it, as PNG",
    response_class=Response,
    responses={200: _content("image/png")},
)
async def picture(
    service: Service,
    image: Annotated[str, Path(pattern=r"^[a-z0-9-]{1,64}$")],
    side: Annotated[int, Query(ge=32, le=1024)] = 448,
    fill: Painted | None = None,
    whole: bool = False,
) -> Response:
    png = await asyncio.to_thread(service.images.picture, image, side, fill, whole)
    return Response(png, media_type="image/png")


@routes.post("/predict", summary="What the model says of an image")
async def predict(service: Service, asked: schemas.PredictRequest) -> schemas.PredictResult:
    return await service.quick.run(lambda: answers.predict(service, asked))


@routes.post("/ablate", summary="What it says when patches are painted over or their tokens removed")
async def ablate(service: Service, asked: schemas.AblateRequest) -> schemas.AblateResult:
    return await service.quick.run(lambda: answers.ablate(service, asked))


@routes.post("/inside", summary="Attention to each patch, and what the head says, block by block")
async def inside(service: Service, asked: schemas.Question) -> schemas.InsideResult:
    return await service.quick.run(lambda: answers.inside(service, asked))


@routes.post("/explain", summary="Maps of an image by methods: a job", responses=LATER)
async def explain(service: Service, asked: schemas.ExplainRequest, response: Response) -> schemas.JobStatus:
    return await _begin(JobInput(service, asked), "explain", answers.explain, response)


@routes.post("/measure", summary="Deletion and insertion of methods and of random orders: a job", responses=LATER)
async def measure(service: Service, asked: schemas.MeasureRequest, response: Response) -> schemas.JobStatus:
    return await _begin(JobInput(service, asked), "measure", answers.measure, response)


@routes.post("/files", summary="A picture, arrays or a report of maps: a job", responses=LATER)
async def files(service: Service, asked: schemas.FileRequest, response: Response) -> schemas.JobStatus:
    return await _begin(JobInput(service, asked), "file", make_file, response)


async def _begin(
    given: JobInput[Any],
    kind: schemas.Kind,
    work: Callable[[JobInput[Any], RunningJob], object],
    response: Response,
) -> schemas.JobStatus:
    """Queue a job, and answer when it is over or the client's patience is."""
    service = given.service
    queue = {"explain": service.quick if given.is_quick else service.slow, "measure": service.slow}
    job = RunningJob(kind, queue.get(kind, service.files), lambda job: work(given, job))
    service.jobs.add(job)
    if given.request.wait:
        await asyncio.wait([job.done], timeout=given.request.wait)
    response.status_code = 200 if job.over is not None else 202
    return job.status


async def _find_job(service: Service, job: Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]{1,64}$")]) -> RunningJob:
    found = service.jobs.find(job)
    if found is None:
        raise NotFound(f"no job '{job}' is here, or no longer")
    return found


FoundJob = Annotated[RunningJob, Depends(_find_job)]


@routes.get("/jobs/{job}", summary="How far a job is, and what it has given")
async def look(job: FoundJob) -> schemas.JobStatus:
    return job.status


@routes.delete("/jobs/{job}", summary="Cancel a job; it stops within a chunk")
async def cancel(job: FoundJob) -> schemas.JobStatus:
    await job.cancel()
    return job.status


class JobEvents(EventSourceResponse):
    """Server-sent events; the type is that of errors, which OpenAPI otherwise describes as events too."""

    media_type = "application/json"


@routes.get(
    "/jobs/{job}/events",
    summary="What a job tells, as server-sent events, from its beginning",
    response_class=JobEvents,
    responses={200: {"content": {"text/event-stream": {"itemSchema": _EVENT}}}},
)
async def events(job: FoundJob) -> AsyncIterator[ServerSentEvent]:
    async for name, data in job.events():
        yield ServerSentEvent(event=name, raw_data=data)


@routes.get(
    "/jobs/{job}/file",
    summary="The file that a job has made",
    response_class=Response,
    responses={200: _content(*FILES)},
)
async def file(job: FoundJob) -> Response:
    if job.file is None:
        raise HTTPException(409, "this job has no file, or not yet")
    data, kind, name = job.file
    return Response(data, media_type=kind, headers={"content-disposition": f'attachment; filename="{name}"'})


def _static(app: FastAPI) -> None:
    """The page's own files, read once: no path of a client's is ever opened."""
    folder = resources.files("patchlight.web").joinpath("static")
    contents = {
        file.name: (file.read_bytes(), kind)
        for file in folder.iterdir()
        for end, kind in KINDS.items()
        if file.name.endswith(end)
    }

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def index() -> Response:
        return await static("index.html")

    @app.api_route("/static/{name}", methods=["GET", "HEAD"], include_in_schema=False)
    async def static(name: str) -> Response:
        if name not in contents:
            raise HTTPException(404, "no such file")
        data, kind = contents[name]
        return Response(data, media_type=kind)


async def _failure(request: Request, error: Exception) -> JSONResponse:
    """Every failure is one sentence, with its status."""
    status, sentence = getattr(error, "status", 400), describe_error(error)
    headers = {"retry-after": "1"} if status == 429 else {}
    if isinstance(error, RequestValidationError):
        status, sentence = 422, _validation_words(error)
    elif isinstance(error, HTTPException):
        status, sentence, headers = error.status_code, str(error.detail), dict(error.headers or {})
    elif not isinstance(error, PatchlightError):
        status = 500
        LOG.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return JSONResponse({"error": sentence}, status, headers)


def _validation_words(error: RequestValidationError) -> str:
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"] if part not in ("body", "query", "path"))
    words = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        return "the body is no JSON"
    if first["type"] == "model_attributes_type" and not place:
        return "the body is no JSON object, sent with 'Content-Type: application/json'"
    return f"{place}: {words}" if place else words
