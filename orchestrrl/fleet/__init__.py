"""Which engines there are: state, membership, routes, moves, the pause barrier, redeployments, deployers."""
