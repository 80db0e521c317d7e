"""Many clients at once, for a minute: `python -m tests.web.soak [--clients 50] [--seconds 60]`.

They use every route as the page does. All answers must be 2xx, or 429 with `Retry-After`; the server's memory must stay
where it was after warming up, give or take 50 MB; and a `rise` that is cancelled must make room for the next within a
second. What was measured is printed, and the exit code says whether it held.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import ClassVar

import httpx

from tests.web import hostile
from tests.web.server import Server, serving

WARM, DRIFT, FREED = 20.0, 50.0, 1.0
"""Seconds of warming up, MB that memory may move afterwards, and seconds until a cancelled worker is free."""
ACTIONS = 2 * ["facts", "inside"] + 3 * ["see"] + 4 * ["predict", "compare"] + 5 * ["hide"]
ACTIONS += ["cancel", "measure", "download"]
"""What a client does, and how often."""


class Person:
    """One client, that does one thing after another, chosen at random; `statuses` and `wrong` are shared by all."""

    statuses: ClassVar[collections.Counter[tuple[str, int]]] = collections.Counter()
    wrong: ClassVar[collections.Counter[str]] = collections.Counter()

    def __init__(self, client: httpx.AsyncClient, methods: list[str], seed: int) -> None:
        self.client, self.methods, self.random = client, methods, random.Random(seed)

    async def ask(self, word: str, path: str, **more: object) -> httpx.Response:
        answer = await self.client.request(word, f"/api/{path}", **more)  # type: ignore[arg-type]
        status, route = answer.status_code, f"{word} {path.partition('/')[0].partition('?')[0]}"
        self.statuses[route, status] += 1
        if status == 429 and answer.headers.get("retry-after", "").isdigit():
            await asyncio.sleep(min(2.0, float(answer.headers["retry-after"])) * self.random.uniform(0.5, 1.5))
        elif not 200 <= status < 300:
            self.wrong[f"{route}: {status} {answer.text[:200]}"] += 1
        return answer

    async def image(self) -> str:
        """A bundled picture, or an upload."""
        if self.random.random() < 0.5:
            return "cat"
        data = hostile.picture(self.random.choice([64, 200, 600]), seed=self.random.randrange(10**6))
        answer = await self.ask("POST", "images", content=data, headers={"Content-Type": "image/png"})
        return str(answer.json()["id"]) if answer.status_code == 201 else "cat"

    async def job(self, route: str, *methods: str, samples: int = 0, **asked: object) -> httpx.Response:
        """A job, followed to its end unless it is to be cancelled."""
        settings = {"settings": {"samples": samples}} if samples else {}
        body = {"methods": [{"name": name, **settings} for name in methods], "seed": self.random.randrange(1000)}
        return await self.ask("POST", route, json=body | {"image": await self.image()} | asked)

    async def follow(self, job: httpx.Response) -> None:
        """The job's events, to the end."""
        if job.status_code != 202:
            return
        last = ""
        async with self.client.stream("GET", f"/api/jobs/{job.json()['id']}/events") as answer:
            async for line in answer.aiter_lines():
                last = line.removeprefix("event: ") if line.startswith("event: ") else last
        if last != "end":
            self.wrong[f"the events of a job ended with '{last}'"] += 1

    async def act(self, action: str) -> None:
        if action == "facts":
            for path in ("model", "methods", "openapi.json"):
                await self.ask("GET", path)
        elif action == "see":
            image = await self.image()
            for query in ("", "?whole=1", "?fill=blur-tis"):
                await self.ask("GET", f"images/{image}{query}")
        elif action in ("predict", "inside"):
            await self.ask("POST", action, json={"image": await self.image()})
        elif action == "hide":
            image = await self.image()
            for unit in ("patch", "token", "patch", "token"):
                patches = self.random.sample(range(64), self.random.randrange(1, 40))
                await self.ask("POST", "ablate", json={"image": image, "removed": [patches], "unit": unit})
            await self.ask("POST", "hide", json={"image": image})
        elif action == "compare":
            await self.follow(await self.job("explain", *self.random.sample(self.methods, 2)))
        elif action == "cancel":
            job = await self.job("explain", "rise", samples=16_000)
            if job.status_code == 202:
                await asyncio.sleep(self.random.random())
                await self.ask("DELETE", f"jobs/{job.json()['id']}")
        elif action == "measure":
            await self.follow(await self.job("measure", "genatt", steps=8, randoms=5, wait=5))
        else:
            kind = self.random.choice(["png", "pdf", "arrays", "report"])
            job = await self.job("files", "genatt", kind=kind, wait=20)
            if job.status_code == 200:
                await self.ask("GET", f"jobs/{job.json()['id']}/file")

    async def live(self, end: float) -> None:
        while time.monotonic() < end:
            action = self.random.choice(ACTIONS)
            try:
                await self.act(action)
            except (httpx.TransportError, ValueError, KeyError) as error:
                self.wrong[f"{action}: {type(error).__name__} {error}"] += 1
            await asyncio.sleep(self.random.uniform(0, 0.3))


async def crowd(server: Server, clients: int, seconds: float) -> list[float]:
    """Let many clients live for a while; the server's memory since it was warm, in MB."""
    memory: list[float] = []
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
    async with httpx.AsyncClient(
        base_url=server.url, timeout=90, limits=limits, trust_env=False, verify=False
    ) as client:
        listed = (await client.get("/api/methods")).json()["methods"]
        quick = [m["name"] for m in listed if m["quick"] and m["supported"]]
        begin = time.monotonic()

        async def watch() -> None:
            while time.monotonic() < begin + seconds:
                await asyncio.sleep(0.5)
                if time.monotonic() - begin >= min(WARM, seconds / 3):
                    memory.append(server.memory())

        people = [Person(client, quick, seed) for seed in range(clients)]
        await asyncio.gather(watch(), *(person.live(begin + seconds) for person in people))
    return memory


def freed(server: Server, repeats: int = 5) -> list[float]:
    """Seconds from cancelling a running `rise` until the next in its queue runs."""
    times = []
    with httpx.Client(base_url=server.url, timeout=30, trust_env=False, verify=False) as client:

        def state(job: str) -> str:
            return str(client.get(f"/api/jobs/{job}").json()["state"])

        def until(job: str, *states: str) -> None:
            end = time.monotonic() + 30
            while state(job) not in states and time.monotonic() < end:
                time.sleep(0.005)

        for repeat in range(repeats):
            body = {"image": "cat", "methods": [{"name": "rise", "settings": {"samples": 16_000}}], "seed": repeat}
            jobs = [client.post("/api/explain", json=body | {"seed": repeat + k}).json()["id"] for k in (0, 1000)]
            until(jobs[0], "running")
            clock = time.perf_counter()
            client.delete(f"/api/jobs/{jobs[0]}")
            until(jobs[1], "running")
            times.append(time.perf_counter() - clock)
            client.delete(f"/api/jobs/{jobs[1]}")
            until(jobs[1], "cancelled")
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description="Many clients at once")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder) / "here") as server:
        memory = asyncio.run(crowd(server, options.clients, options.seconds))
        times = freed(server)
        printed = server.printed()
    for (route, status), count in sorted(Person.statuses.items()):
        print(f"{route}: {count} times {status}")
    print(f"Memory: {memory[0]:.0f} MB when warm, then {min(memory):.0f} to {max(memory):.0f} MB.")
    print(f"A cancelled rise makes room after {', '.join(f'{t:.2f}' for t in times)} s.")
    wrong = [f"{n} times {what}" for what, n in Person.wrong.most_common(20)]
    wrong += ["memory moved"] if max(abs(mb - memory[0]) for mb in memory) > DRIFT else []
    wrong += ["a cancelled rise took long to make room"] if max(times) > FREED else []
    wrong += [f"the server printed:\n{printed[-3000:]}"] if "Traceback" in printed else []
    print("\n".join(["", *wrong]) if wrong else "All held.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
