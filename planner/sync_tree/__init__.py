"""Plan the transfer of a weight version to all engines. Shards are sent over trees that use scheduled circuits
(appendix E of the paper). Has no side effects."""
