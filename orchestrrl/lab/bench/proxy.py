"""A minimal reverse proxy on aiohttp, used as the baseline for the gateway's CPU time and latency. It runs as a module
with the upstream URL as its argument."""

import asyncio
import sys

import aiohttp
from aiohttp import web

PASSED_ON = ("Content-Type", "X-Request-Id")


async def serve(upstream_url: str) -> None:
    """Serve requests until terminated. The first line of output is the proxy's URL."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def pass_on(request: web.Request) -> web.StreamResponse:
            headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
            url, body = upstream_url + request.path_qs, await request.read()
            async with session.post(url, data=body, headers=headers) as upstream:
                headers = {name: upstream.headers[name] for name in PASSED_ON if name in upstream.headers}
                if upstream.content_length is not None:
                    return web.Response(status=upstream.status, body=await upstream.read(), headers=headers)
                answer = web.StreamResponse(status=upstream.status, headers=headers)
                await answer.prepare(request)
                async for data in upstream.content.iter_any():
                    await answer.write(data)
                await answer.write_eof()
                return answer

        application = web.Application()
        application.add_routes([web.post("/{path:.*}", pass_on)])
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)  # noqa: T201
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
