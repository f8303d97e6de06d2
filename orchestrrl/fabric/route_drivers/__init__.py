"""Routers, as the control plane steers packets on them: the contract, one module per product, the conformance suite."""
