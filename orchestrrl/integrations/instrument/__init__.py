"""Modules that are loaded into the process of an engine or a trainer.

They use the standard library, torch and the packages of that process. Its environment does not contain OrchestrRL: this
folder is on its PYTHONPATH, and modules import each other by their bare names there. The KV connector is described in
docs/kv-handover.md.
"""
