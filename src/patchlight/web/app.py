"""The routes: what is asked for where, in which lane it is answered, and how a failure is told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from importlib import resources
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, FastAPI, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

from patchlight import __version__
from patchlight.core.errors import Cancelled, PatchlightError
from patchlight.evidence.fills import Painted
from patchlight.web import answers
from patchlight.web.album import Gone, Held
from patchlight.web.files import make_file
from patchlight.web.jobs import Busy, Lane, OutOfTime, Work, in_words, run
from patchlight.web.schemas import (
    Ablate,
    Ablated,
    Explain,
    FileAsked,
    ImageFacts,
    Inside,
    InsideResult,
    Job,
    Kind,
    MeasureAsked,
    MethodAsked,
    Methods,
    ModelFacts,
    Predict,
    Predicted,
    Problem,
)
from patchlight.web.site import Site

T = TypeVar("T")
LOG = logging.getLogger("patchlight.web")
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
FILES = ("image/png", "application/pdf", "application/zip", "text/html")
"""What files are made of."""
UPLOADS = ("image/*", "application/octet-stream")
_EVENT = {
    "type": "object",
    "description": "The data is JSON: a Job, a Map, the random orders, a Truth.",
    "properties": {"event": {"enum": ["job", "map", "random", "truth", "end"]}, "data": {"type": "string"}},
    "required": ["event", "data"],
}
BEAT = 10.0
"""Seconds of silence after which a stream says that it is alive."""
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
    status: {"model": Problem, "description": words[:1].upper() + words[1:]} for status, words in _WHY.items()
}
JobId = Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
ImagePath = Annotated[str, Path(pattern=r"^[a-z0-9-]{1,64}$")]
_IMAGE: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {kind: {"schema": {"type": "string", "format": "binary"}} for kind in UPLOADS},
    }
}


def create_app(site: Site) -> FastAPI:
    """The application of a site; `Guard` stands before it (`serve.guarded`)."""
    app = FastAPI(
        title="Patchlight",
        version=__version__,
        description="Which patches of an image a Vision Transformer decided on, and whether that is true.",
        docs_url=None,
        redoc_url=None,
        openapi_url="/api/openapi.json",
        redirect_slashes=False,
    )
    app.include_router(_facts(site))
    app.include_router(_answers(site))
    app.include_router(_jobs(site))
    _static(app)
    for kind in (PatchlightError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _told)
    return app


def _router() -> APIRouter:
    return APIRouter(prefix="/api", responses=PROBLEMS)


def _facts(site: Site) -> APIRouter:
    routes = _router()

    @routes.get("/model", summary="The model, its classes, the bundled images and the limits")
    async def model() -> ModelFacts:
        return await run(site.quick, site.facts)

    @routes.get("/methods", summary="Every method, whether it works on this model, and what it costs")
    async def methods() -> Methods:
        return Methods(methods=await run(site.quick, site.methods))

    @routes.post("/images", status_code=201, summary="Upload an image", openapi_extra=_IMAGE)
    async def upload(request: Request) -> ImageFacts:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().casefold()
        if not (kind.startswith("image/") or kind == "application/octet-stream"):
            raise HTTPException(415, "give the bytes of an image, with its type as 'Content-Type: image/jpeg'")
        data = await request.body()
        held = await run(site.quick, lambda: site.album.add(data))
        return ImageFacts(id=held.id, width=held.size[0], height=held.size[1])

    @routes.get(
        "/images/{image}",
        summary="What the model sees of an image, or a fill of it, as PNG",
        response_class=Response,
        responses={200: {"content": {"image/png": {"schema": {"type": "string", "format": "binary"}}}}},
    )
    async def picture(
        image: ImagePath,
        side: Annotated[int, Query(ge=32, le=1024)] = 448,
        fill: Painted | None = None,
        whole: bool = False,
    ) -> Response:
        png = await asyncio.to_thread(site.album.picture, image, side, fill, whole)
        return Response(png, media_type="image/png")

    return routes


def _answers(site: Site) -> APIRouter:
    routes = _router()

    @routes.post("/predict", summary="What the model says of an image")
    async def predict(asked: Predict) -> Predicted:
        return await run(site.quick, lambda: answers.predict(site, asked))

    @routes.post("/ablate", summary="What it says when patches are painted over or their tokens removed")
    async def ablate(asked: Ablate) -> Ablated:
        return await run(site.quick, lambda: answers.ablate(site, asked))

    @routes.post("/inside", summary="Attention to each patch, and what the head says, block by block")
    async def inside(asked: Inside) -> InsideResult:
        return await run(site.quick, lambda: answers.inside(site, asked))

    return routes


def _jobs(site: Site) -> APIRouter:
    routes = _router()
    later: dict[int | str, dict[str, Any]] = {202: {"model": Job, "description": "It goes on; look again, or listen"}}

    async def begin(kind: Kind, asked: Explain, lane: Lane, do: Callable[[Held, Work], None], to: Response) -> Job:
        held = site.album.find(asked.image)  # it stays until the job is over, whatever is uploaded meanwhile
        work = Work(kind, lane, lambda work: do(held, work))
        work.begin()
        site.jobs.add(work)
        if asked.wait:
            await asyncio.wait([work.done], timeout=asked.wait)
        to.status_code = 200 if work.over is not None else 202
        return work.job

    @routes.post("/explain", summary="Maps of an image by methods: a job", responses=later)
    async def explain(asked: Explain, response: Response) -> Job:
        def do(held: Held, work: Work) -> None:
            answers.explained(site, asked, held, work)

        quick = all(_is_quick(site, method) for method in asked.methods)
        return await begin("explain", asked, site.quick if quick else site.slow, do, response)

    @routes.post("/measure", summary="Deletion and insertion of methods and of random orders: a job", responses=later)
    async def measure(asked: MeasureAsked, response: Response) -> Job:
        def do(held: Held, work: Work) -> None:
            answers.measure(site, asked, held, work)

        return await begin("measure", asked, site.slow, do, response)

    @routes.post("/files", summary="A picture, arrays or a report of maps: a job", responses=later)
    async def files(asked: FileAsked, response: Response) -> Job:
        def do(held: Held, work: Work) -> None:
            make_file(site, asked, held, work)

        return await begin("file", asked, site.files, do, response)

    def found(job: str) -> Work:
        work = site.jobs.find(job)
        if work is None:
            raise Gone(f"no job '{job}' is here, or no longer")
        return work

    @routes.get("/jobs/{job}", summary="How far a job is, and what it has given")
    async def look(job: JobId) -> Job:
        return found(job).job

    @routes.delete("/jobs/{job}", summary="Cancel a job; it stops within a chunk")
    async def cancel(job: JobId) -> Job:
        work = found(job)
        work.cancel()
        await asyncio.sleep(0)
        return work.job

    @routes.get(
        "/jobs/{job}/events",
        summary="What a job tells, as server-sent events, from its beginning",
        response_class=StreamingResponse,
        responses={200: {"content": {"text/event-stream": {"schema": _EVENT}}}},
    )
    async def events(job: JobId) -> StreamingResponse:
        return StreamingResponse(_stream(found(job)), media_type="text/event-stream")

    @routes.get(
        "/jobs/{job}/file",
        summary="The file that a job has made",
        response_class=Response,
        responses={200: {"content": {kind: {"schema": {"type": "string", "format": "binary"}} for kind in FILES}}},
    )
    async def file(job: JobId) -> Response:
        work = found(job)
        if work.file is None:
            raise HTTPException(409, "this job has no file, or not yet")
        data, kind, name = work.file
        return Response(data, media_type=kind, headers={"content-disposition": f'attachment; filename="{name}"'})

    return routes


def _is_quick(site: Site, method: MethodAsked) -> bool:
    try:
        return site.is_quick(site.request(method))
    except PatchlightError:  # the job says what is wrong
        return True


async def _stream(work: Work) -> AsyncIterator[str]:
    last = 0
    while True:
        news = await work.news(last, BEAT)
        for last, name, data in news:  # noqa: B007
            yield f"event: {name}\ndata: {data}\n\n"
            if name == "end":
                return
        if not news:
            yield ": waiting\n\n"


def _static(app: FastAPI) -> None:
    """The page's own files, read once: no path of a client's is ever opened."""
    found = resources.files("patchlight.web").joinpath("static")
    contents = {
        file.name: (file.read_bytes(), kind)
        for file in found.iterdir()
        for end, kind in KINDS.items()
        if file.name.endswith(end)
    }

    async def index() -> Response:
        data, kind = contents["index.html"]
        return Response(data, media_type=kind)

    async def static(name: str) -> Response:
        if name not in contents:
            raise HTTPException(404, "no such file")
        data, kind = contents[name]
        return Response(data, media_type=kind)

    for path, answer in (("/", index), ("/static/{name}", static)):
        app.add_api_route(path, answer, methods=["GET", "HEAD"], include_in_schema=False)


async def _told(request: Request, error: Exception) -> JSONResponse:
    """Every failure is one sentence, with its status."""
    status, headers = 400, {}
    sentence = in_words(error)
    if isinstance(error, Gone):
        status = 404
    elif isinstance(error, Busy):
        status, headers = 429, {"retry-after": "1"}
    elif isinstance(error, OutOfTime | Cancelled):
        status, sentence = 503, str(error)
    elif isinstance(error, RequestValidationError):
        status, sentence = 422, _wrong(error)
    elif isinstance(error, HTTPException):
        status, sentence, headers = error.status_code, str(error.detail), dict(error.headers or {})
    elif not isinstance(error, PatchlightError):
        status = 500
        LOG.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return JSONResponse({"error": sentence}, status, headers)


def _wrong(error: RequestValidationError) -> str:
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"] if part not in ("body", "query", "path"))
    words = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        return "the body is no JSON"
    if first["type"] == "model_attributes_type" and not place:
        return "the body is no JSON object, sent with 'Content-Type: application/json'"
    return f"{place}: {words}" if place else words
