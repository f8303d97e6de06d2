"""The modules that all packages share: time, errors, the journal, operations, documents and the configuration."""
