"""Python imports this module at its start where the folder is on PYTHONPATH: vLLM servers fork their engine core.

vLLM's CPU build starts the core and the workers by `spawn`, and each imports torch, transformers and vLLM again, which
takes 12 CPU-seconds. Forked, they have them: a server starts in 16 CPU-seconds instead of 39.
"""

import multiprocessing.context
import sys

if any(word.startswith("vllm.entrypoints") for word in sys.orig_argv):
    contexts = multiprocessing.context._concrete_contexts  # type: ignore[attr-defined]
    contexts["spawn"] = contexts["fork"]
