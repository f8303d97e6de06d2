"""Router drivers for rerouting packets: the contract, one module per product, and the conformance suite."""
