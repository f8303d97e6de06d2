"""An example of the daemon's configuration, every section with its defaults: `check-config --print-example`."""

from importlib.resources import files

EXAMPLE = files(__package__).joinpath("example.yaml").read_text(encoding="utf-8")
