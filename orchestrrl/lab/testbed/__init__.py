"""The test bed of demos, benchmarks, the fabric in a box and process tests. It starts processes."""
