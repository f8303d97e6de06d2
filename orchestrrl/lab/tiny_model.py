"""Create a tiny random Qwen2 model and its tokenizer, to run vLLM without a GPU and without a download.

This module runs as a script in vLLM's environment, where OrchestrRL is not installed:

    .venv-vllm/bin/python orchestrrl/lab/tiny_model.py DIR
"""

import argparse
import random
from pathlib import Path

VOCABULARY_SIZE = 512
MAX_CONTEXT_TOKENS = 32768
END_TOKEN = "<|im_end|>"
START_TOKEN = "<|im_start|>"

# Each message between its start and end tokens, as in Qwen2's own template.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(directory: Path, seed: int) -> tuple[int, int]:
    """Train a byte-level BPE tokenizer on random words and save it in `directory`. Return the ids of the start and end
    tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    chance = random.Random(seed)
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    words = ["".join(chance.choices(syllables, k=chance.randint(1, 3))) for _ in range(400)]
    corpus = [" ".join(chance.choices(words, k=12)) for _ in range(400)]

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[START_TOKEN, END_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    if tokenizer.get_vocab_size() != VOCABULARY_SIZE:
        raise RuntimeError(f"the tokenizer must have {VOCABULARY_SIZE} tokens, got {tokenizer.get_vocab_size()}")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_TOKEN, pad_token=END_TOKEN, chat_template=CHAT_TEMPLATE
    ).save_pretrained(directory)
    return tokenizer.token_to_id(START_TOKEN), tokenizer.token_to_id(END_TOKEN)


def make_model(directory: Path, seed: int, start_id: int, end_id: int) -> None:
    """Save a model with random float32 weights in `directory`. The head size is 32, the smallest that vLLM's CPU
    attention supports."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_CONTEXT_TOKENS,
        # Wide enough for clear maxima in greedy decoding, so that rounding does not change the chosen token.
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=start_id,
        eos_token_id=end_id,
        dtype="float32",
    )
    Qwen2ForCausalLM(config).to(torch.float32).save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="Folder of the model. It is created if missing.")
    parser.add_argument("--seed", type=int, default=0, help="Random seed of the weights.")
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    start_id, end_id = make_tokenizer(arguments.directory, arguments.seed)
    make_model(arguments.directory, arguments.seed, start_id, end_id)


if __name__ == "__main__":
    main()
