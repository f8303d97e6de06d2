"""Serve the driver of one switch over gRPC, given the address of the switch and the address to listen on.

Example: `python serve_line_switch.py 127.0.0.1:5555 127.0.0.1:7555`.
"""

import asyncio
import sys

from line_switch import LineSwitch

from orchestrrl.rpc.ocs_server import serve_driver


async def main() -> None:
    switch, listen = sys.argv[1:]
    server, port = await serve_driver(LineSwitch("served", address=switch), listen)
    sys.stderr.write(f"{switch} is served on port {port}\n")
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main())
