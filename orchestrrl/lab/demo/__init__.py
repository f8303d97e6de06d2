"""The demo: run one generation step without and with OrchestrRL, on the same engines, requests and lengths."""
