"""Text to token ids, equal to the official processor: Qwen2 byte-level BPE and the chat wrapping around a text.

Knows no model and no prompt layout beyond the wrapping; the ids of control tokens come from the checkpoint's files.
`tokenizer_build.py` writes such files for small checkpoints.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from sottovoce.types import CheckpointError, InputError

# Qwen2Tokenizer of transformers 4.57.3.
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# What `fix_mistral_regex=True` of transformers 4.57.3 puts in its place: words also end where lower case meets upper.
MISTRAL_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MISTRAL_MIN_VOCAB = 100_000  # transformers leaves smaller vocabularies alone
IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
_SPECIAL_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TextTokenizer:
    """Encodes texts. The same object serves any number of threads: nothing in it changes after loading."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._full = tokenizer
        self._plain = Tokenizer(tokenizer.model)  # shares the vocabulary, knows no control tokens
        self._plain.normalizer, self._plain.pre_tokenizer = tokenizer.normalizer, tokenizer.pre_tokenizer
        ids = [tokenizer.token_to_id(token) for token in (IM_START, IM_END)]
        if None in ids:
            raise CheckpointError(
                f"the text tokenizer lacks {IM_START} or {IM_END}; tokenizer_config.json must list both"
            )
        self.im_start_id, self.im_end_id = ids

    @classmethod
    def from_folder(cls, folder: str | Path, *, is_hub_snapshot: bool = False) -> TextTokenizer:
        """Reads tokenizer.json, else vocab.json and merges.txt, and the added tokens of tokenizer_config.json.

        The official loader asks transformers for `fix_mistral_regex=True`, which then replaces the split into words
        in *local* folders of large vocabularies, but not when the same model is named by its hub id. Ids differ for
        words with inner capitals ("iPhone") and after "/". This follows both, to stay equal with either use.

        Args:
            folder: a checkpoint folder.
            is_hub_snapshot: the folder is the local copy of a model that was named by its hub id.

        Raises:
            CheckpointError: files missing, damaged or not fitting each other.
        """
        folder = Path(folder)
        config = _read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
        try:
            tokenizer = _read_base(folder)
        except CheckpointError:
            raise
        except Exception as error:  # tokenizers raises plain Exception
            raise CheckpointError(f"{folder}: the text tokenizer cannot be read: {error}") from error
        vocab_size = tokenizer.get_vocab_size(with_added_tokens=False)
        if vocab_size > MISTRAL_MIN_VOCAB and not is_hub_snapshot and _is_mistral_fixed(folder):
            tokenizer.pre_tokenizer = qwen2_pre_tokenizer(MISTRAL_SPLIT)
        _add_tokens(tokenizer, config, folder)
        return cls(tokenizer)

    @property
    def vocab_size(self) -> int:
        """How many rows a text embedding needs: the highest id plus one."""
        return max(self._full.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str, *, is_text_only: bool = False) -> list[int]:
        """Ids of `text`, by default as the official processor gives them: "<|im_end|>" and its like, wherever they
        stand, become control tokens. `is_text_only` takes them for the characters that they are; use it for what a
        user typed. Raises InputError for text that is not valid Unicode (lone surrogates)."""
        tokenizer = self._plain if is_text_only else self._full
        try:
            return tokenizer.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeEncodeError) as error:
            message = "text holds half characters (lone surrogates); decode it as UTF-8 first"
            raise InputError(message, field="text") from error

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, control tokens included."""
        return self._full.decode(list(ids), skip_special_tokens=False)

    @staticmethod
    def wrap_assistant(text: str) -> str:
        """A text to speak, with the chat markers of the official package (3 tokens before it, 5 after)."""
        return f"{IM_START}assistant\n{text}{IM_END}\n{IM_START}assistant\n"

    @staticmethod
    def wrap_reference(text: str) -> str:
        """The transcript of a reference recording (3 tokens before, 2 after)."""
        return f"{IM_START}assistant\n{text}{IM_END}\n"

    @staticmethod
    def wrap_user(instruct: str) -> str:
        """An instruction (3 tokens before, 2 after)."""
        return f"{IM_START}user\n{instruct}{IM_END}\n"

    def assistant_ids(self, text: str) -> list[int]:
        """Ids of `wrap_assistant(text)`, except that nothing in `text` can become a control token."""
        return [*self.reference_ids(text), self.im_start_id, *self.encode("assistant\n", is_text_only=True)]

    def reference_ids(self, text: str) -> list[int]:
        """Ids of `wrap_reference(text)`, except that nothing in `text` can become a control token."""
        return self._turn_ids("assistant", text)

    def user_ids(self, instruct: str) -> list[int]:
        """Ids of `wrap_user(instruct)`, except that nothing in `instruct` can become a control token."""
        return self._turn_ids("user", instruct)

    def _turn_ids(self, role: str, text: str) -> list[int]:
        # Role and text are encoded as one piece, as in the official string: a leading line break joins the role's.
        body = self.encode(f"{role}\n{text}", is_text_only=True)
        return [self.im_start_id, *body, self.im_end_id, *self.encode("\n", is_text_only=True)]


def qwen2_pre_tokenizer(split: str = QWEN2_SPLIT) -> Any:
    """Cuts text into words, then maps bytes to printable characters."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def qwen2_tokenizer(vocab: Mapping[str, int], merges: Sequence[tuple[str, str]]) -> Tokenizer:
    """A Qwen2 tokenizer without added tokens."""
    tokenizer = Tokenizer(BPE(vocab=dict(vocab), merges=list(merges)))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = qwen2_pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _read_base(folder: Path) -> Tokenizer:
    if (folder / "tokenizer.json").is_file():
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer
    missing = [name for name in ("vocab.json", "merges.txt") if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{folder} has neither tokenizer.json nor {' and '.join(missing)}: no text tokenizer")
    lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
    lines = [line.strip() for line in lines[lines[0].startswith("#version:") :]]
    merges: list[Any] = list(dict.fromkeys(tuple(line.split()) for line in lines if line))
    return qwen2_tokenizer(_read_json(folder / "vocab.json"), merges)


def _add_tokens(tokenizer: Tokenizer, config: Mapping[str, Any], folder: Path) -> None:
    """Adds what tokenizer_config.json lists, in order of id, then its named tokens. They keep the ids of vocab.json
    or get the next free ones, so a list with other ids does not belong to this vocabulary."""
    named = [_content(config.get(role)) for role in _SPECIAL_ROLES]
    named += [_content(token) for token in config.get("additional_special_tokens") or ()]
    listed = sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0]))
    for token_id, entry in listed:
        content, is_special = entry["content"], entry.get("special", False) or entry["content"] in named
        flags = {key: entry[key] for key in ("single_word", "lstrip", "rstrip", "normalized") if key in entry}
        tokenizer.add_tokens([AddedToken(content, special=is_special, **flags)])
        found = tokenizer.token_to_id(content)
        if found != int(token_id):
            message = f"tokenizer_config.json says that {content!r} is {token_id}, by the vocabulary it is {found}"
            raise CheckpointError(f"{folder}: {message}")
    for content in filter(None, named):
        if tokenizer.token_to_id(content) is None:
            tokenizer.add_tokens([AddedToken(content, special=True, normalized=False)])


def _content(token: Any) -> str | None:
    return token["content"] if isinstance(token, dict) else token


def _is_mistral_fixed(folder: Path) -> bool:
    """Whether transformers 4.57.3 replaces the split: its test looks only at the version that wrote config.json."""
    if not (folder / "config.json").is_file():
        return False
    numbers = re.findall(r"\d+", _read_json(folder / "config.json").get("transformers_version") or "")
    version = tuple(int(number) for number in numbers[:3])
    return not version or (4, 57, 2) < version < (5,)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
