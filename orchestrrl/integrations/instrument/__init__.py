"""Modules that are loaded into the process of an engine or a trainer.

The modules use only the standard library, torch and the packages of that process, whose environment need not contain
OrchestrRL. This folder is on the PYTHONPATH of the process, and the modules import each other by their bare names
there. The KV connector is described in docs/kv-handover.md.
"""
