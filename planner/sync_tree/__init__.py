"""Plan the transfer of a weight version to all engines by circuit-scheduled trees of shards (appendix E of the paper).
Has no side effects."""
