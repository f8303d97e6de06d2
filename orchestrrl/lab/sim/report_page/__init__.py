"""A report of simulated clusters: one HTML page with its pictures inside, `page.write(results, path)`."""
