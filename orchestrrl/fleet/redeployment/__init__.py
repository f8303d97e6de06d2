"""Redeployments: change which engines run, in journalled steps that can be undone."""
