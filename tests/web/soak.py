"""Many clients at once, for a minute: `python -m tests.web.soak [--clients 50] [--seconds 60]`.

They use every route as the page does. All answers must be 2xx, or 429 with `Retry-After`; the server's memory must stay
where it was after warming up, give or take 50 MB; and a `rise` that is cancelled must make room for the next within a
second. What was measured is printed, and the exit code says whether it held.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.web import hostile
from tests.web.server import Server, serving

WARM, DRIFT, FREED = 20.0, 50.0, 1.0
"""Seconds of warming up, MB that memory may move afterwards, and seconds until a cancelled worker is free."""
QUICK = ["genatt", "rollout", "tis", "gradcam", "attention-last"]


@dataclass
class Seen:
    """How often each route gave each status, the slowest answer of each, and what must not have happened."""

    statuses: dict[str, collections.Counter[int]] = field(
        default_factory=lambda: collections.defaultdict(collections.Counter)
    )
    slowest: dict[str, float] = field(default_factory=lambda: collections.defaultdict(float))
    wrong: list[str] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)

    def note(self, route: str, answer: httpx.Response, seconds: float) -> None:
        status = answer.status_code
        self.statuses[route][status] += 1
        self.slowest[route] = max(self.slowest[route], seconds)
        if status == 429 and not answer.headers.get("retry-after", "").isdigit():
            self.wrong.append(f"{route}: 429 without Retry-After")
        elif not (200 <= status < 300 or status == 429):
            self.wrong.append(f"{route}: {status} {answer.text[:200]}")


@dataclass
class Person:
    """One client, that does one thing after another, chosen at random."""

    client: httpx.AsyncClient
    seen: Seen
    methods: list[str]
    random: random.Random

    async def ask(self, word: str, path: str, route: str = "", **more: object) -> httpx.Response:
        begin = time.perf_counter()
        answer = await self.client.request(word, path, **more)  # type: ignore[arg-type]
        self.seen.note(f"{word} {route or path}", answer, time.perf_counter() - begin)
        if answer.status_code == 429:
            await asyncio.sleep(min(2.0, float(answer.headers.get("retry-after", 1))) * self.random.uniform(0.5, 1.5))
        return answer

    async def image(self) -> str:
        """A bundled picture, or an upload."""
        if self.random.random() < 0.5:
            return "cat"
        data = hostile.picture(self.random.choice([64, 200, 600]), seed=self.random.randrange(10**6))
        answer = await self.ask("POST", "/api/images", content=data, headers={"Content-Type": "image/png"})
        return str(answer.json()["id"]) if answer.status_code == 201 else "cat"

    async def facts(self) -> None:
        for path in ("/api/model", "/api/methods", "/", "/api/openapi.json"):
            await self.ask("GET", path)

    async def see(self) -> None:
        image = await self.image()
        for query in ("", "?whole=1", "?fill=blur-tis"):
            await self.ask("GET", f"/api/images/{image}{query}", "/api/images/{id}")

    async def predict(self) -> None:
        await self.ask("POST", "/api/predict", json={"image": await self.image()})

    async def poke(self) -> None:
        image = await self.image()
        for _ in range(5):
            patches = self.random.sample(range(64), self.random.randrange(1, 40))
            unit = self.random.choice(["patch", "token"])
            await self.ask("POST", "/api/ablate", json={"image": image, "removed": [patches], "unit": unit})

    async def inside(self) -> None:
        await self.ask("POST", "/api/inside", json={"image": await self.image()})

    async def compare(self) -> None:
        methods = [{"name": name} for name in self.random.sample(self.methods, 2)]
        body = {"image": await self.image(), "methods": methods, "seed": self.random.randrange(1000)}
        job = await self.ask("POST", "/api/explain", json=body)
        if job.status_code == 202:
            await self.follow(job.json()["id"])

    async def follow(self, job: str) -> None:
        """The job's events, to the end."""
        begin = time.perf_counter()
        async with self.client.stream("GET", f"/api/jobs/{job}/events") as answer:
            if answer.status_code != 200:
                await answer.aread()
            self.seen.note("GET /api/jobs/{id}/events", answer, time.perf_counter() - begin)
            last = ""
            async for line in answer.aiter_lines():
                last = line.removeprefix("event: ") if line.startswith("event: ") else last
            if answer.status_code == 200 and last != "end":
                self.seen.wrong.append(f"the events of a job ended with '{last}'")

    async def cancel(self) -> None:
        body = {"image": "cat", "methods": [{"name": "rise", "settings": {"samples": 16_000}}]}
        body["seed"] = self.random.randrange(10**6)
        job = await self.ask("POST", "/api/explain", json=body)
        if job.status_code == 202:
            await asyncio.sleep(self.random.random())
            await self.ask("DELETE", f"/api/jobs/{job.json()['id']}", "/api/jobs/{id}")

    async def measure(self) -> None:
        body = {"image": await self.image(), "methods": [{"name": "genatt"}], "steps": 8, "randoms": 5}
        job = await self.ask("POST", "/api/measure", json=body | {"wait": 5})
        if job.status_code == 202:
            await self.follow(job.json()["id"])
        elif job.status_code == 200 and not job.json()["measured"]:
            self.seen.wrong.append(f"a measurement gave nothing: {job.text[:200]}")

    async def take(self) -> None:
        kind = self.random.choice(["png", "pdf", "arrays", "report"])
        body = {"image": await self.image(), "methods": [{"name": "genatt"}], "kind": kind, "wait": 20}
        job = await self.ask("POST", "/api/files", json=body)
        if job.status_code == 200 and job.json()["file"]:
            await self.ask("GET", job.json()["file"], "/api/jobs/{id}/file")
        elif job.status_code in (200, 202):
            await self.ask("GET", f"/api/jobs/{job.json()['id']}", "/api/jobs/{id}")

    async def live(self, end: float) -> None:
        often: list[tuple[Callable[[], Awaitable[None]], int]] = [
            (self.facts, 2),
            (self.see, 3),
            (self.predict, 4),
            (self.poke, 5),
            (self.inside, 2),
            (self.compare, 4),
            (self.cancel, 1),
            (self.measure, 1),
            (self.take, 1),
        ]
        deeds, weights = zip(*often, strict=True)
        while time.monotonic() < end:
            deed = self.random.choices(deeds, weights)[0]
            try:
                await deed()
            except (httpx.TransportError, json.JSONDecodeError, KeyError) as error:
                self.seen.wrong.append(f"{deed.__name__}: {type(error).__name__} {error}")
            await asyncio.sleep(self.random.uniform(0, 0.3))


async def crowd(server: Server, clients: int, seconds: float) -> Seen:
    seen = Seen()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
    async with httpx.AsyncClient(
        base_url=server.url, timeout=90, limits=limits, trust_env=False, verify=False
    ) as client:
        listed = (await client.get("/api/methods")).json()["methods"]
        quick = [m["name"] for m in listed if m["quick"] and m["supported"]]
        begin = time.monotonic()

        async def watch() -> None:
            while time.monotonic() < begin + seconds:
                seen.memory.append((time.monotonic() - begin, server.memory()))
                await asyncio.sleep(0.5)

        people = [Person(client, seen, quick, random.Random(i)) for i in range(clients)]
        await asyncio.gather(watch(), *(person.live(begin + seconds) for person in people))
    return seen


def freed(server: Server, repeats: int = 5) -> list[float]:
    """Seconds from cancelling a running `rise` until the next in its lane runs."""
    times = []
    with httpx.Client(base_url=server.url, timeout=30, trust_env=False, verify=False) as client:

        def begin(seed: int) -> str:
            body = {"image": "cat", "methods": [{"name": "rise", "settings": {"samples": 16_000}}], "seed": seed}
            answer = client.post("/api/explain", json=body)
            assert answer.status_code == 202, answer.text
            return str(answer.json()["id"])

        def state(job: str) -> str:
            return str(client.get(f"/api/jobs/{job}").json()["state"])

        for repeat in range(repeats):
            jobs = [begin(1000 * repeat)]
            while state(jobs[-1]) != "waiting":  # until every worker has one, and one waits
                time.sleep(0.5)
                if state(jobs[-1]) == "running":
                    jobs.append(begin(1000 * repeat + len(jobs)))
                    time.sleep(0.3)
                assert len(jobs) < 20
            clock = time.perf_counter()
            client.delete(f"/api/jobs/{jobs[0]}")
            while state(jobs[-1]) == "waiting" and time.perf_counter() - clock < 30:
                time.sleep(0.005)
            times.append(time.perf_counter() - clock)
            for job in jobs:
                client.delete(f"/api/jobs/{job}")
            while any(state(job) in ("running", "waiting") for job in jobs):
                time.sleep(0.05)
    return times


def told(seen: Seen, times: list[float], seconds: float) -> list[str]:
    """Print what was seen; what did not hold is given back."""
    print("| route | 2xx | 429 | other | slowest s |\n|---|---|---|---|---|")
    for route in sorted(seen.statuses):
        found = seen.statuses[route]
        well = sum(n for status, n in found.items() if 200 <= status < 300)
        other = sum(found.values()) - well - found[429]
        print(f"| {route} | {well} | {found[429]} | {other} | {seen.slowest[route]:.2f} |")
    total = sum(sum(found.values()) for found in seen.statuses.values())
    warm = min(WARM, seconds / 3)
    later = [mb for at, mb in seen.memory if at >= warm] or [0.0]
    moved = max(abs(mb - later[0]) for mb in later)
    print(f"\n{total} answers, {total / seconds:.0f} a second.")
    print(f"Memory: {seen.memory[0][1]:.0f} MB at first, {later[0]:.0f} MB after {warm:.0f} s,", end=" ")
    print(f"then {min(later):.0f} to {max(later):.0f} MB.")
    print(f"A cancelled rise makes room after {', '.join(f'{t:.2f}' for t in times)} s.")
    wrong = [f"{n} times {what}" for what, n in collections.Counter(seen.wrong).most_common(20)]
    wrong += [f"memory moved by {moved:.0f} MB"] if moved > DRIFT else []
    wrong += [f"a cancelled rise took {max(times):.2f} s to make room"] if max(times) > FREED else []
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description="Many clients at once")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder) / "here") as server:
        seen = asyncio.run(crowd(server, options.clients, options.seconds))
        times = freed(server)
        wrong = told(seen, times, options.seconds)
        if "Traceback" in server.printed():
            wrong.append(f"the server printed:\n{server.printed()[-3000:]}")
    print("\n".join(["", *wrong]) if wrong else "All held.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
