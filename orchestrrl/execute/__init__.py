"""Carrying decisions out: each action is journalled before and after, has an id, and is harmless when repeated."""
