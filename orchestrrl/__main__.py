"""`python -m orchestrrl`: the command line without its script, for child processes of the same environment."""

from orchestrrl.cli.main import main

main()
