"""`orchestrrl ocs`."""
