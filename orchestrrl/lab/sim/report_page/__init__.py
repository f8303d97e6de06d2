"""The report of cluster simulations: one HTML page with embedded charts, written by `page.write(results, path)`."""
