"""Route requests to engines: the gateway's view of the engines, the queue of waiting requests, and the routing
strategies."""
