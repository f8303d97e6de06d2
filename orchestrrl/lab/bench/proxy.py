"""A plain reverse proxy on aiohttp: what the gateway's price is measured against. Run as a module with a URL."""

import asyncio
import sys

import aiohttp
from aiohttp import web

PASSED_ON = ("Content-Type", "X-Request-Id")


class Proxy:
    def __init__(self, upstream_url: str) -> None:
        self._upstream_url = upstream_url

    async def serve(self) -> None:
        """Until it is ended; the URL that it serves is its first line of output."""
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as self._session:
            application = web.Application()
            application.add_routes([web.post("/{path:.*}", self._pass_on)])
            runner = web.AppRunner(application, access_log=None)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
            sys.stdout.write(f"http://127.0.0.1:{runner.addresses[0][1]}\n")
            sys.stdout.flush()
            await asyncio.Event().wait()

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        url, body = self._upstream_url + request.path_qs, await request.read()
        async with self._session.post(url, data=body, headers=headers) as upstream:
            headers = {name: upstream.headers[name] for name in PASSED_ON if name in upstream.headers}
            if upstream.content_length is not None:
                return web.Response(status=upstream.status, body=await upstream.read(), headers=headers)
            answer = web.StreamResponse(status=upstream.status, headers=headers)
            await answer.prepare(request)
            async for data in upstream.content.iter_any():
                await answer.write(data)
            await answer.write_eof()
            return answer


if __name__ == "__main__":
    asyncio.run(Proxy(sys.argv[1]).serve())
