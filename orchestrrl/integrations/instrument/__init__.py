"""What is loaded INTO the process of an engine or a trainer. Standard library, torch and what that process brings.

See docs/kv-handover.md for the KV connector.

Such a process has an environment of its own, without OrchestrRL: this folder is put on its PYTHONPATH, so the modules
in it are found by their bare names there.
"""
