"""Fitted engine constants. `orchestrrl profile fit` writes this file; do not edit it. The names are
documented in engine_constants.py."""

FITTED_ON = "2026-11-21"
FITTED_TO = "silicon_decode_h100_h200.csv"
LEFT_OUT_ROWS = 769
LEFT_OUT_ERROR_MEAN = 0.1426
LEFT_OUT_ERROR_MAX = 2.397

# [set]: the model left out of the fit; the set without a name is fitted on all models.
_LEFT_OUT = ["", "gpt-oss-120b", "llama-3.1-8b", "qwen3-235b-a22b", "qwen3-32b"]
_VALUES = {  # [constant][set]
    "hbm_efficiency": [0.8689, 0.8689, 0.8683, 0.8689, 0.8643],
    "kv_efficiency": [0.839, 0.839, 0.7964, 0.839, 0.8228],
    "gemm_efficiency": [0.6226, 0.6226, 0.6186, 0.6226, 0.6089],
    "prefill_efficiency": [0.6692, 0.6692, 0.6443, 0.6692, 0.6499],
    "prefill_fp8_efficiency": [0.4269, 0.4269, 0.4355, 0.4269, 0.4417],
    "moe_prefill_efficiency": [0.523, 0.5371, 0.518, 0.468, 0.5174],
    "four_bit_efficiency": [0.5715, 0.6, 0.5863, 0.5701, 0.5526],
    "all_reduce_s": [3.829e-06, 3.829e-06, 3.794e-06, 3.829e-06, 3.816e-06],
    "all_reduce_doubling_s": [1.537e-06, 1.537e-06, 1.527e-06, 1.537e-06, 1.444e-06],
    "link_efficiency": [0.5322, 0.5322, 0.5234, 0.5322, 0.4845],
    "layer_s": [2.734e-05, 2.734e-05, 2.708e-05, 2.734e-05, 2.104e-05],
    "quantised_layer_s": [1.149e-05, 1.149e-05, 8.923e-06, 1.149e-05, 1.039e-05],
    "moe_layer_s": [2.314e-05, 2.404e-05, 2.176e-05, 1.859e-05, 3.173e-05],
    "step_s": [0.00061, 0.00061, 0.0009725, 0.00061, 0.000695],
    "sequence_s": [8.976e-06, 8.976e-06, 9.972e-06, 8.976e-06, 9.424e-06],
    "element_s": [9.431e-11, 9.431e-11, 7.245e-11, 9.431e-11, 7.809e-11],
    "expert_token_s": [3.317e-08, 3.276e-08, 3.375e-08, 5.145e-08, 3.352e-08],
    "prompt_s": [0.0009937, 0.0009937, 0.001046, 0.0009937, 0.0009739],
    "prefill_share": [0.8591, 0.8591, 0.8685, 0.8591, 0.8442],
    "lockstep_sequences": [1.669, 1.669, 1.701, 1.669, 1.55],
    "routing_exponent": [0.5522, 0.5407, 0.5522, 0.6272, 0.5529],
    "ep_imbalance_exponent": [0.3091, 0.3148, 0.3173, 0.3502, 0.3011],
    "vllm.layer_s": [1.258, 1.258, 1.147, 1.258, 0.9968],
    "vllm.step_s": [1.18, 1.18, 1.198, 1.18, 0.9926],
    "vllm.sequence_s": [1.063, 1.063, 1.062, 1.063, 0.9919],
    "vllm.prefill_share": [1.061, 1.061, 1.031, 1.061, 0.9842],
    "vllm.lockstep_sequences": [0.9912, 0.9912, 1.005, 0.9912, 1.002],
    "sglang.layer_s": [0.9357, 0.9357, 0.9051, 0.9357, 1.016],
    "sglang.step_s": [0.9641, 0.9641, 0.8843, 0.9641, 1.039],
    "sglang.sequence_s": [1.031, 1.031, 0.9156, 1.031, 1.105],
    "sglang.prefill_share": [0.5765, 0.5765, 0.5515, 0.5765, 0.6254],
    "sglang.lockstep_sequences": [1.027, 1.027, 1.046, 1.027, 0.9889],
}
FITTED: dict[str, dict[str, float]] = {
    left_out: {name: row[place] for name, row in _VALUES.items()} for place, left_out in enumerate(_LEFT_OUT)
}
