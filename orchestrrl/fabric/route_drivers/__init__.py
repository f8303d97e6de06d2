"""Routers, as the control plane reroutes packets on them: the contract, one module per product, the conformance
suite."""
