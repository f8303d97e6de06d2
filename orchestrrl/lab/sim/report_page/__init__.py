"""A report of simulated clusters: one HTML page with its pictures inside, `write(results, path)`."""

from orchestrrl.lab.sim.report_page.page import page, write

__all__ = ["page", "write"]
