"""The fleet of engines: state, membership, routes, moves, the pause barrier, redeployments and deployers."""
