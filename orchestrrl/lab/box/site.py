"""The site that the box builds by default: two PoDs, four ToRs, twelve hosts, three optical switches."""

from importlib.resources import files

SITE = files("orchestrrl.lab.box").joinpath("site.yaml").read_text("utf-8")
