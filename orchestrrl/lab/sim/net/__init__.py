"""The cluster's network at flow level: links, routes, max-min fair rates, collectives, fabrics."""
