"""A worker extension with which vLLM's CPU build keeps linear layers in the format of GPUs."""

import vllm._custom_ops as ops

ops._supports_onednn = False


class Unpacked:
    """An empty extension; importing this module has the effect."""
