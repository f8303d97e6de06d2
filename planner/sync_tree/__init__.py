"""Plan the transfer of a weight version to all engines, over trees of shards that use scheduled circuits (appendix E of
the paper). Has no side effects."""
