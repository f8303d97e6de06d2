"""Router drivers for rerouting packets: the driver contract, one module per product, and the conformance suite."""
