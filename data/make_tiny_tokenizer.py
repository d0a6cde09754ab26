"""Write data/tiny-qwen3/ without weights: tokenizer.json, tokenizer_config.json, config.json, generation_config.json.

The tokenizer has one id a character (lower case; anything unknown becomes `<unk>`) and single ids for the chat
markers, the role names and `####`. The model is a Qwen3 of 451,648 parameters. Its weights come from
`python cukit_cli.py sft --config data/recipes/tiny-sft.yaml`. Transformers loads the folder as it stands.

    python data/make_tiny_tokenizer.py [--output_dir data/tiny-qwen3]
"""

import argparse
import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>"]
WORDS = ["user", "assistant", "system", "####"]
CHARACTERS = "\n 0123456789+-*/=?.,#abcdefghijklmnopqrstuvwxyz():!'%"
VOCAB_SIZE = 64

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def make_tokenizer() -> Tokenizer:
    """Word-level tokenizer over the characters; its decoder joins without spaces, so text round-trips."""
    names = SPECIAL + WORDS + list(CHARACTERS)
    if len(set(names)) != len(names) or len(names) > VOCAB_SIZE:
        raise ValueError(f"{len(names)} tokens with duplicates or more than {VOCAB_SIZE}")
    tokenizer = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(WORDS) + r"|[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    return tokenizer


def make_configs() -> dict[str, dict]:
    """File name -> content of the three JSON files beside tokenizer.json."""
    end_of_text, im_end = SPECIAL.index("<|endoftext|>"), SPECIAL.index("<|im_end|>")
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 256,
        "clean_up_tokenization_spaces": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": "<unk>",
        "chat_template": CHAT_TEMPLATE,
    }
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": im_end,
        "pad_token_id": end_of_text,
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": 128,
        "initializer_range": 0.02,
        "intermediate_size": 256,
        "max_position_embeddings": 256,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": VOCAB_SIZE,
    }
    generation_config = {
        "do_sample": True,
        "temperature": 1.0,
        "eos_token_id": [im_end, end_of_text],
        "pad_token_id": end_of_text,
    }
    return {
        "tokenizer_config.json": tokenizer_config,
        "config.json": config,
        "generation_config.json": generation_config,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="write the bundled model folder without weights")
    parser.add_argument("--output_dir", type=Path, default=Path(__file__).parent / "tiny-qwen3")
    output_dir = parser.parse_args().output_dir
    output_dir.mkdir(parents=True, exist_ok=True)
    make_tokenizer().save(str(output_dir / "tokenizer.json"))
    for name, content in make_configs().items():
        (output_dir / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8", newline="\n")
    print(f"{output_dir}: {len(SPECIAL) + len(WORDS) + len(CHARACTERS)} tokens, vocab_size {VOCAB_SIZE}")


if __name__ == "__main__":
    main()
