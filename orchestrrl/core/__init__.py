"""What every room uses: time, errors, the journal, operations, documents, the configuration."""
