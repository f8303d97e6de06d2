"""Run the command line as `python -m orchestrrl`. Child processes that must use the same interpreter are started this
way."""

from orchestrrl.cli.main import main

main()
