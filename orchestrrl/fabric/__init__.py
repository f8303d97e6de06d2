"""The circuits of a site: communication periods, windows, commits, verification and rerouting."""
