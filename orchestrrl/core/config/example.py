"""An example of the daemon's configuration that shows every section with its defaults. `orchestrrl check-config
--print-example` prints this example."""

from importlib.resources import files

EXAMPLE = files(__package__).joinpath("example.yaml").read_text(encoding="utf-8")
