"""The test bed that starts the processes of demos, benchmarks, the fabric in a box and process tests."""
