"""vLLM's CPU build leaves linear layers as GPUs have them, where this is a worker's extension."""

import vllm._custom_ops as ops

ops._supports_onednn = False


class Unpacked:
    """Only to be imported."""
