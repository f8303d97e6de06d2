"""Redeployments, which change the set of running engines in journalled steps that can be undone."""
