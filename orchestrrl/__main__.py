"""Run the command line as `python -m orchestrrl`, for child processes that use the same interpreter."""

from orchestrrl.cli.main import main

main()
