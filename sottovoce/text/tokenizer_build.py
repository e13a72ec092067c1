"""Writes small text tokenizers in the published layout, for tiny random checkpoints and the demo model.

Knows no weights. The files load in the official package; a tokenizer of real use comes with its model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers
from tokenizers.trainers import BpeTrainer

from sottovoce.config import ModelConfig
from sottovoce.text.tokenizer import END_OF_TEXT, IM_END, IM_START, qwen2_tokenizer
from sottovoce.types import InputError

# Content by the key of config.json that holds the id; names as in the published tokenizer_config.json.
CONTROL_TOKENS = {
    "im_start_token_id": IM_START,
    "im_end_token_id": IM_END,
    "tts_pad_token_id": "<tts_pad>",
    "tts_bos_token_id": "<tts_text_bos>",
    "tts_eos_token_id": "<tts_text_eod>",
}
_CONTROLS = (END_OF_TEXT, *CONTROL_TOKENS.values())
_ROLES = ("assistant", "user")  # one token each, or the prompt builder's slices are off


def build_demo_tokenizer(
    folder: str | Path, texts: Iterable[str], vocab_size: int, *, special_ids: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Trains a byte-level BPE on `texts` and writes vocab.json, merges.txt and tokenizer_config.json.

    Any text can be encoded (all 256 bytes are tokens), "assistant" and "user" are one token each.

    Args:
        folder: where to write; made if missing.
        texts: what to learn words from; few or none are fine, then the vocabulary is smaller than asked for.
        vocab_size: the most tokens, control tokens included.
        special_ids: ids by config.json key ("im_start_token_id", ..., "assistant_token_id"), for a model whose ids are
            fixed; unused ids below them are filled up. The rest, or all by default, follow the learned tokens.

    Returns:
        The ids by config.json key, "assistant_token_id" included.

    Raises:
        InputError: `vocab_size` is too small, or a special id has an unknown name or is given twice.
    """
    fixed = dict(special_ids or {})
    names = CONTROL_TOKENS | {"assistant_token_id": "assistant"}
    unknown = fixed.keys() - names.keys()
    if unknown or len(set(fixed.values())) < len(fixed):
        message = f"special_ids has unknown names {sorted(unknown)} or gives an id twice: {fixed}"
        raise InputError(message, field="special_ids")
    merges = [merge for role in _ROLES for merge in _chain(role)]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    least = len(alphabet) + len(merges) + len(_CONTROLS)
    if vocab_size < least:
        raise InputError(f"vocab_size must be at least {least}, got {vocab_size}", field="vocab_size")
    learned = _train(texts, alphabet, vocab_size - len(merges) - len(_CONTROLS))
    merges = list(dict.fromkeys([*merges, *learned]))

    tokens = list(dict.fromkeys([*alphabet, *(first + second for first, second in merges)]))
    wanted = {names[key]: number for key, number in fixed.items()}
    free = (number for number in count() if number not in wanted.values())
    vocab = {token: wanted[token] if token in wanted else next(free) for token in tokens}
    controls = {token: wanted[token] if token in wanted else next(free) for token in _CONTROLS}
    if wanted:
        # transformers gives added tokens the next ids after vocab.json, whatever is asked for: fixed ids must stand in
        # it. It also prints every unused id, so they get names that no text can produce, as no merge leads there.
        vocab |= controls
        used = set(vocab.values())
        vocab |= {f"[unused{number}]": number for number in range(max(used)) if number not in used}
    _write(Path(folder), vocab, merges, controls)
    return {key: (vocab | controls)[name] for key, name in names.items()}


def _chain(word: str) -> list[tuple[str, str]]:
    """Merges that build `word` from its letters, left to right."""
    return [(word[:i], word[i]) for i in range(1, len(word))]


def _train(texts: Iterable[str], alphabet: list[str], vocab_size: int) -> list[tuple[str, str]]:
    tokenizer = qwen2_tokenizer({}, [])
    trainer = BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, special_tokens=[], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return [tuple(merge) for merge in merges]


def _write(folder: Path, vocab: Mapping[str, int], merges: list[tuple[str, str]], controls: Mapping[str, int]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    config: dict[str, Any] = {
        "add_prefix_space": False,
        "added_tokens_decoder": {str(number): {"content": token} | flags for token, number in controls.items()},
        "additional_special_tokens": [token for token in controls if token != END_OF_TEXT],
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": IM_END,
        "errors": "replace",
        "model_max_length": 131072,
        "pad_token": END_OF_TEXT,
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    lines = ["#version: 0.2", *(" ".join(merge) for merge in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


PUBLISHED_ASSISTANT_ID = 77091  # "assistant" in the published vocabulary
# A sentence in each language of the published models: enough for words of several tokens in a random checkpoint.
_SAMPLE_TEXTS = (
    "The quick brown fox jumps over the lazy dog, and it's the 25th time this year that they've seen it there.",
    "Falsches Üben von Xylophonmusik quält jeden größeren Zwerg, und das ist die Wahrheit.",
    "Portez ce vieux whisky au juge blond qui fume, s'il vous plaît, dans la maison de la rivière.",
    "El veloz murciélago hindú comía feliz cardillo y kiwi mientras la cigüeña tocaba el saxofón.",
    "Pranzo d'acqua fa volti sghembi, ma la città è più bella della campagna.",
    "Um pequeno jabuti xereta viu dez cegonhas felizes, e não são de São Paulo.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "今天天气很好，我们一起去公园散步吧。你好，世界！",
    "今日はとても天気がいいので、公園を散歩しましょう。こんにちは。",
    "오늘은 날씨가 아주 좋으니 함께 공원에 산책하러 갑시다. 안녕하세요.",
)


def write_random_tokenizer(folder: str | Path, config: ModelConfig) -> dict[str, int]:
    """Writes a small tokenizer with the control ids of `config`. Returns and raises as `build_demo_tokenizer`."""
    special_ids = {key: getattr(config, key) for key in CONTROL_TOKENS}
    if config.talker.text_vocab_size > PUBLISHED_ASSISTANT_ID:
        special_ids["assistant_token_id"] = PUBLISHED_ASSISTANT_ID
    vocab_size = min(config.talker.text_vocab_size, 1024)
    return build_demo_tokenizer(folder, _SAMPLE_TEXTS, vocab_size, special_ids=special_ids)
