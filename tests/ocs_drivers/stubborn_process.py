"""Serve a `StubbornSwitch` over SCPI in a process of its own, and report its state.

The first line of output is the address. For each line of input, one line is printed, with the circuits that are up and
the number of setters. With `--ignores PORT`, setters for that port are accepted without effect. With `--keeps PORT`,
the circuits of that port cannot be removed.
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
