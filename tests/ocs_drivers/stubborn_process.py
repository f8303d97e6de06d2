"""A process that serves an emulated SCPI switch with faults of its own, and reports on its glass.

First line of output: its address. For each line of input, one line with the circuits that are up, and the number of
setters. `--ignores PORT`: setters that name the port are taken, and change nothing. `--keeps PORT`: its circuits cannot
be taken down.
"""

import argparse
import asyncio
import json
import sys

from stubborn import StubbornSwitch


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ignores", type=int, default=0)
    parser.add_argument("--keeps", type=int, default=0)
    arguments = parser.parse_args()
    switch = StubbornSwitch(ignores=arguments.ignores, keeps=arguments.keeps)
    print(await switch.emulator.start(), flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps({"up": switch.up(), "setters": len(switch.emulator.device.setters)}), flush=True)
    await switch.emulator.stop()


if __name__ == "__main__":
    asyncio.run(main())
