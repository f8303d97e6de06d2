"""Route requests to engines: the gateway's view of the engines, its queue, and the routing strategies."""
