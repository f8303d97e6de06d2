"""A flow-level model of the cluster's network: links, routes, max-min fair rates, collectives and fabrics."""
