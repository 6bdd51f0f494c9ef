"""A deployment of an engine on Ray Serve, and a client of it."""

from __future__ import annotations

import json
import socket
import traceback
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.error import HTTPError

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, StreamingResponse
from ray import serve

from llmrt import AsyncEngine
from tests.support.ray_scenarios import GREEDY

app = FastAPI()
PROMPT = "Once upon a time"


@app.exception_handler(Exception)
async def tell(_: Request, error: Exception) -> PlainTextResponse:
    """Answer with the traceback: the replica's own output is nowhere to be seen."""
    return PlainTextResponse("".join(traceback.format_exception(error)), status_code=500)


@serve.deployment(
    placement_group_bundles=[{"CPU": 1}, {"CPU": 1}, {"CPU": 1}],
    placement_group_strategy="STRICT_PACK",
    ray_actor_options={"num_cpus": 1},
    autoscaling_config={"min_replicas": 1, "max_replicas": 1},
)
@serve.ingress(app)
class Completions:
    """One engine, opened with the first request, its workers in the replica's other bundles."""

    def __init__(self, model: str) -> None:
        self.llm = AsyncEngine(model, tp=2, device="cpu")
        self.is_open = False

    async def opened(self) -> AsyncEngine:
        if not self.is_open:
            await self.llm.open()
            self.is_open = True
        return self.llm

    @app.get("/complete")
    async def complete(self) -> dict[str, Any]:
        llm = await self.opened()
        output = (await llm.generate(PROMPT, GREEDY))[0]
        return {"text": output.text, "token_ids": output.token_ids, "backend": llm.backend.name}

    @app.get("/stream")
    async def stream(self) -> StreamingResponse:
        llm = await self.opened()

        async def lines() -> AsyncIterator[str]:
            async for increment in llm.stream(PROMPT, GREEDY):
                yield json.dumps(increment.text) + "\n"

        return StreamingResponse(lines())


@contextmanager
def run(model: str) -> Iterator[str]:
    """Serve a model on a port of this host; yield the address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        serve.run(Completions.bind(model), route_prefix="/")
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()


def ask(url: str, path: str) -> dict[str, Any]:
    """Return the answer to a request; raise what the replica raised."""
    try:
        with urllib.request.urlopen(f"{url}/{path}", timeout=60) as response:
            if path == "complete":
                return json.load(response)
            parts = [json.loads(line) for line in response]
    except HTTPError as error:
        raise RuntimeError(error.read().decode()) from None
    return {"text": "".join(parts), "num_parts": len(parts)}
