"""Plan how a weight version reaches every engine: circuit-scheduled trees of shards (appendix E of the paper). Has no
side effects."""
