"""Profiles of engines: kept in files, measured, imported, re-fitted."""
