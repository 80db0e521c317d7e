"""The routes of the API and the page, and how errors are reported."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from importlib import resources
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from fastapi.sse import EventSourceResponse, ServerSentEvent
from starlette.exceptions import HTTPException

from patchlight import __version__
from patchlight.core.errors import PatchlightError
from patchlight.evidence.fills import Painted
from patchlight.web import Refused, answers, asking, schemas
from patchlight.web.files import MEDIA, make_file
from patchlight.web.guard import has_left
from patchlight.web.jobs import RunningJob, describe_error
from patchlight.web.service import JobInput, ModelService

LOG = logging.getLogger("patchlight.web")
STATIC = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
UPLOADS = ("image/*", "application/octet-stream")
_EVENT = {
    "type": "object",
    "description": "The data is JSON: a JobStatus, a MapResult, the random orders or a FaithfulnessResult.",
    "properties": {"event": {"enum": ["job", "map", "random", "result", "end"]}, "data": {"type": "string"}},
    "required": ["event", "data"],
}
PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": schemas.Problem, "description": HTTPStatus(status).phrase}
    for status in (400, 401, 403, 404, 405, 408, 409, 413, 415, 422, 429, 503)
}
LATER: dict[int | str, dict[str, Any]] = {202: {"model": schemas.JobStatus, "description": "The job is not finished."}}


def _content(*kinds: str) -> dict[str, Any]:
    """OpenAPI's description of bytes of these media types."""
    return {"content": {kind: {"schema": {"type": "string", "format": "binary"}} for kind in kinds}}


_IMAGE = {"requestBody": {"required": True, **_content(*UPLOADS)}}
routes = APIRouter(prefix="/api", responses=PROBLEMS)


async def _service(request: Request) -> ModelService:
    return request.app.state.service  # type: ignore[no-any-return]


Service = Annotated[ModelService, Depends(_service)]


def create_app(service: ModelService) -> FastAPI:
    """The application of a model service; `serve.guarded` puts `Guard` in front of it."""
    app = FastAPI(
        title="Patchlight",
        version=__version__,
        description="Which patches drove a Vision Transformer's prediction, and how faithful that explanation is.",
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


@routes.get("/methods", summary="All methods: what they do, what they cost, and whether they work on this model")
async def methods(service: Service) -> schemas.MethodList:
    return schemas.MethodList(methods=await service.quick.run(service.methods))


@routes.post("/images", status_code=201, summary="Upload an image", openapi_extra=_IMAGE)
async def upload(service: Service, request: Request) -> schemas.ImageFacts:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().casefold()
    if not (kind.startswith("image/") or kind == "application/octet-stream"):
        raise HTTPException(415, "Send the bytes of an image with its media type, such as 'Content-Type: image/jpeg'.")
    data = await request.body()
    image = await service.quick.run(lambda: service.images.add(data))
    return schemas.ImageFacts(id=image.id, width=image.size[0], height=image.size[1])


@routes.get(
    "/images/{image}",
    summary="The image as the model sees it, the uncropped image, or a fill, as PNG",
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


@routes.post("/predict", summary="The predictions for an image")
async def predict(service: Service, body: schemas.PredictRequest) -> schemas.PredictResult:
    return await service.quick.run(lambda: answers.predict(service, body))


@routes.post(
    "/choices",
    summary="What can be explained in an image, for models that are not classifiers",
)
async def choices(service: Service, body: schemas.AskedQuestion) -> schemas.ChoicesResult:
    return await service.quick.run(lambda: asking.choices(service, body))


@routes.post("/ablate", summary="The predictions when patches are painted over or their tokens are removed")
async def ablate(service: Service, body: schemas.AblateRequest) -> schemas.AblateResult:
    return await service.quick.run(lambda: answers.ablate(service, body))


@routes.post("/inside", summary="Attention to each patch and the prediction after each block")
async def inside(service: Service, body: schemas.AskedQuestion) -> schemas.InsideResult:
    return await service.quick.run(lambda: answers.inside(service, body))


@routes.post("/hide", summary="What hiding the strongest patches of a map does, compared with random patches")
async def hide(service: Service, body: schemas.HideRequest) -> schemas.HideResult:
    job = JobInput(service, body)
    return await job.queue.run(lambda: answers.hide(job))


@routes.post("/explain", summary="Maps of an image (a job)", responses=LATER)
async def explain(service: Service, body: schemas.ExplainRequest, response: Response) -> schemas.JobStatus:
    return await _begin(JobInput(service, body), "explain", answers.explain, response)


@routes.post("/measure", summary="The faithfulness test of maps (a job)", responses=LATER)
async def measure(service: Service, body: schemas.MeasureRequest, response: Response) -> schemas.JobStatus:
    return await _begin(JobInput(service, body), "measure", answers.measure, response)


@routes.post("/files", summary="Maps as a picture, arrays or a report (a job)", responses=LATER)
async def files(service: Service, body: schemas.FileRequest, response: Response) -> schemas.JobStatus:
    return await _begin(JobInput(service, body), "file", make_file, response)


Work = Callable[[JobInput[Any], RunningJob], object]


async def _begin(job_input: JobInput[Any], kind: schemas.Kind, work: Work, response: Response) -> schemas.JobStatus:
    """Queue a job, and answer when it has ended or after the `wait` seconds of the request."""
    service = job_input.service
    queue = {"explain": job_input.queue, "measure": service.slow, "file": service.files}[kind]
    job = RunningJob(kind, queue, lambda job: work(job_input, job))
    service.jobs.add(job)
    if job_input.request.wait:
        try:
            await asyncio.wait([job.done], timeout=job_input.request.wait)
        except asyncio.CancelledError:  # the client disconnected before it received the job's id
            await job.cancel()
            raise
    response.status_code = 200 if job.over is not None else 202
    return job.status


async def _find_job(service: Service, job: Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]{1,64}$")]) -> RunningJob:
    running = service.jobs.find(job)
    if running is None:
        raise Refused(404, f"Job '{job}' does not exist, or has expired.")
    return running


FoundJob = Annotated[RunningJob, Depends(_find_job)]


@routes.get("/jobs/{job}", summary="The state, progress and results of a job")
async def look(job: FoundJob) -> schemas.JobStatus:
    return job.status


@routes.delete("/jobs/{job}", summary="Cancel a job")
async def cancel(job: FoundJob) -> schemas.JobStatus:
    await job.cancel()
    return job.status


class JobEvents(EventSourceResponse):
    """Server-sent events. The media type is that of errors: OpenAPI would otherwise describe them as events."""

    media_type = "application/json"


@routes.get(
    "/jobs/{job}/events",
    summary="The events of a job, as server-sent events, from its beginning",
    response_class=JobEvents,
    responses={200: {"content": {"text/event-stream": {"itemSchema": _EVENT}}}},
)
async def events(job: FoundJob) -> AsyncIterator[ServerSentEvent]:
    async for name, data in job.events():
        yield ServerSentEvent(event=name, raw_data=data)


@routes.get(
    "/jobs/{job}/file", summary="The file of a job", response_class=Response, responses={200: _content(*MEDIA.values())}
)
async def file(job: FoundJob) -> Response:
    if job.file is None:
        raise HTTPException(409, "This job has no file, or not yet.")
    data, kind, name = job.file
    return Response(data, media_type=kind, headers={"content-disposition": f'attachment; filename="{name}"'})


_API = [route for route in routes.routes if isinstance(route, APIRoute)]
BODIES = frozenset(route.path for route in _API if "POST" in (route.methods or ()))
"""The paths that take a body."""


def _static(app: FastAPI) -> None:
    """Serve the page's files. They are read once, so no path from a client is ever opened."""
    folder = resources.files("patchlight.web").joinpath("static")
    ends = {file.name: file.name.rpartition(".")[2] for file in folder.iterdir()}
    contents = {name: (folder.joinpath(name).read_bytes(), STATIC[end]) for name, end in ends.items() if end in STATIC}

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def index() -> Response:
        return await static("index.html")

    @app.api_route("/static/{name}", methods=["GET", "HEAD"], include_in_schema=False)
    async def static(name: str) -> Response:
        if name not in contents:
            raise HTTPException(404, "This file does not exist.")
        data, kind = contents[name]
        return Response(data, media_type=kind)


async def _failure(request: Request, error: Exception) -> JSONResponse:
    """Answer an error with its status and one sentence."""
    status, sentence, headers = 400, describe_error(error), {}
    if isinstance(error, Refused):
        status, headers = error.status, error.headers
    elif isinstance(error, RequestValidationError):
        status, sentence = 422, _validation_words(error)
    elif isinstance(error, HTTPException):
        status, sentence, headers = error.status_code, str(error.detail), dict(error.headers or {})
    elif not isinstance(error, PatchlightError):
        status = 500
        if not has_left(error):
            LOG.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return JSONResponse({"error": sentence}, status, headers)


def _validation_words(error: RequestValidationError) -> str:
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"] if part not in ("body", "query", "path"))
    words = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        return "The body is not valid JSON."
    if first["type"] == "model_attributes_type" and not place:
        return "Send a JSON object with 'Content-Type: application/json'."
    return f"{place}: {words}" if place else words
