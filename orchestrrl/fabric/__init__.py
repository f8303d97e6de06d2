"""The circuits of a site: periods, windows, commits, verification, rerouting."""
