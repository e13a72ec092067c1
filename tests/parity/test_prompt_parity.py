"""The embedded prompt against what the official package hands to its talker."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sottovoce.config import ModelConfig
from sottovoce.model.prompt import build_prompt, embed_prompt
from sottovoce.model.weights import load_network
from sottovoce.text.tokenizer import TextTokenizer
from sottovoce.types import Request, Voice
from tests.oracle import load_official
from tests.tiny import tiny_checkpoint

TEXT = "Good morning! It's 25 °C — 今天天气很好。"
LANGUAGES = ["auto", *ModelConfig.published("1.7B-Base").languages]
PRESETS = list(ModelConfig.published("1.7B-CustomVoice").talker.spk_id)
STREAMING = pytest.mark.parametrize("is_streaming", [False, True], ids=["text_first", "streaming_text"])


class Captured(Exception):
    """Raised in place of the official talker's generation, with what it was given."""


class Pair:
    """One checkpoint, read by both packages."""

    def __init__(self, folder, kind: str, layout: str) -> None:
        tiny_checkpoint(folder, kind, layout)
        self.official = load_official(folder)
        self.official.model.talker.generate = self._capture
        self.config = ModelConfig.from_folder(folder)
        self.network = load_network(folder, dtype=torch.float32, parts=("talker", "predictor", "text_embedding"))
        self.tokenizer = TextTokenizer.from_folder(folder)

    @staticmethod
    def _capture(**given) -> None:
        raise Captured(given)

    def expected(self, method, *args, **options) -> dict[str, torch.Tensor]:
        with pytest.raises(Captured) as caught:
            method(*args, **options)
        return caught.value.args[0]

    def check(self, expected: dict[str, torch.Tensor], *requests: Request) -> None:
        plans = [build_prompt(self.config, self.tokenizer, request) for request in requests]
        num_trailing = expected["trailing_text_hidden"].shape[1]
        assert num_trailing == max(len(plan.trailing_ids) for plan in plans)
        for index, plan in enumerate(plans):
            ours = embed_prompt(self.network, plan)
            rows = expected["inputs_embeds"][index][expected["attention_mask"][index].bool()]
            torch.testing.assert_close(ours.rows, rows, rtol=1e-5, atol=1e-6)
            padding = ours.pad_row.expand(num_trailing - len(ours.trailing), -1)
            trailing = expected["trailing_text_hidden"][index]
            torch.testing.assert_close(torch.cat((ours.trailing, padding)), trailing, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(ours.pad_row, expected["tts_pad_embed"][0, 0], rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Pairs by kind and layout, made when first asked for."""
    made: dict[tuple[str, str], Pair] = {}

    def get(kind: str, layout: str = "1.7B") -> Pair:
        if (kind, layout) not in made:
            made[kind, layout] = Pair(tmp_path_factory.mktemp(f"{kind}-{layout}"), kind, layout)
        return made[kind, layout]

    return get


@STREAMING
@pytest.mark.parametrize("instruct", ["", "A calm old man, speaking slowly."], ids=["plain", "instruct"])
def test_designed_voices(pairs, is_streaming, instruct):
    pair = pairs("voice_design")
    for language in LANGUAGES:
        for text in (TEXT, "a", "\n\nA line first"):
            expected = pair.expected(
                pair.official.generate_voice_design, text, instruct, language, non_streaming_mode=not is_streaming
            )
            voice = Voice(instruct=instruct or None)
            pair.check(expected, Request(text, language, voice, is_streaming_text=is_streaming))


@STREAMING
@pytest.mark.parametrize("instruct", [None, "Very angry"], ids=["plain", "instruct"])
@pytest.mark.parametrize("speaker", [*PRESETS, "DYLAN", ""])
def test_preset_speakers(pairs, is_streaming, instruct, speaker):
    """Dialect speakers among them: every speaker in every language."""
    pair = pairs("custom_voice")
    for language in LANGUAGES if speaker in ("dylan", "eric", "ryan") else ("Auto", "Chinese", "english"):
        expected = pair.expected(
            pair.official.generate_custom_voice, TEXT, speaker, language, instruct, non_streaming_mode=not is_streaming
        )
        voice = Voice(speaker=speaker) if speaker else None
        pair.check(expected, Request(TEXT, language, voice, instruct, is_streaming_text=is_streaming))


@STREAMING
def test_the_small_preset_model_ignores_instructions(pairs, is_streaming):
    pair = pairs("custom_voice", "0.6B")
    expected = pair.expected(
        pair.official.generate_custom_voice, TEXT, "eric", "auto", "Angry", non_streaming_mode=not is_streaming
    )
    with pytest.warns(UserWarning, match="without instructions"):
        pair.check(expected, Request(TEXT, "auto", Voice(speaker="eric"), "Angry", is_streaming_text=is_streaming))


def clone(pair: Pair, num_frames: int | None, ref_text: str = "What I said."):
    """A cloned voice in our form and in the official one; without frames by its speaker vector alone."""
    from qwen_tts import VoiceClonePromptItem

    rng = np.random.default_rng(num_frames)
    x_vector = rng.standard_normal(pair.config.talker.hidden_size, np.float32)
    codes = None if num_frames is None else rng.integers(0, pair.config.predictor.vocab_size, (num_frames, 16))
    item = VoiceClonePromptItem(
        ref_code=None if codes is None else torch.from_numpy(codes),
        ref_spk_embedding=torch.from_numpy(x_vector),
        x_vector_only_mode=codes is None,
        icl_mode=codes is not None,
        ref_text=ref_text,
    )
    return Voice(x_vector=x_vector, ref_codes=codes, ref_text=ref_text), item


def text_length(pair: Pair, text: str, ref_text: str) -> int:
    """Text rows of an in-context clone: both texts and the end token."""
    return len(pair.tokenizer.assistant_ids(text)) - 8 + len(pair.tokenizer.reference_ids(ref_text)) - 5 + 1


@STREAMING
@pytest.mark.parametrize("layout", ["1.7B", "0.6B"])
@pytest.mark.parametrize("surplus", [-100, -2, -1, 0, 1, 40])
def test_in_context_clones(pairs, is_streaming, layout, surplus):
    """The text against the frames with the begin code before them: longer, as long, and shorter by `surplus`."""
    pair = pairs("base", layout)
    ref_text = "What I said."
    num_frames = max(1, text_length(pair, TEXT, ref_text) - 1 + surplus)
    voice, item = clone(pair, num_frames, ref_text)
    for language in LANGUAGES if surplus == 1 else ("auto", "Russian"):
        expected = pair.expected(
            pair.official.generate_voice_clone,
            TEXT, language, voice_clone_prompt=[item], non_streaming_mode=not is_streaming,
        )  # fmt: skip
        pair.check(expected, Request(TEXT, language, voice, is_streaming_text=is_streaming))


@STREAMING
@pytest.mark.parametrize("layout", ["1.7B", "0.6B"])
def test_speaker_vector_clones(pairs, is_streaming, layout):
    pair = pairs("base", layout)
    voice, item = clone(pair, None)
    for language in LANGUAGES:
        expected = pair.expected(
            pair.official.generate_voice_clone,
            TEXT, language, voice_clone_prompt=[item], non_streaming_mode=not is_streaming,
        )  # fmt: skip
        pair.check(expected, Request(TEXT, language, voice, is_streaming_text=is_streaming))


@STREAMING
def test_a_base_model_without_a_voice(pairs, is_streaming):
    pair = pairs("base")
    ids = pair.official._tokenize_texts([pair.official._build_assistant_text(TEXT)])
    expected = pair.expected(
        pair.official.model.generate, input_ids=ids, languages=["german"], non_streaming_mode=not is_streaming
    )
    pair.check(expected, Request(TEXT, "german", is_streaming_text=is_streaming))


def test_default_text_modes_are_the_official_ones(pairs):
    designed, preset, base = pairs("voice_design"), pairs("custom_voice"), pairs("base")
    expected = designed.expected(designed.official.generate_voice_design, TEXT, "Old")
    designed.check(expected, Request(TEXT, instruct="Old"))
    expected = preset.expected(preset.official.generate_custom_voice, TEXT, "ryan")
    preset.check(expected, Request(TEXT, voice=Voice(speaker="ryan")))
    voice, item = clone(base, 5)
    expected = base.expected(base.official.generate_voice_clone, TEXT, voice_clone_prompt=[item])
    base.check(expected, Request(TEXT, voice=voice))


@STREAMING
def test_an_official_batch_of_all_sorts(pairs, is_streaming):
    pair = pairs("base")
    texts = ["One.", TEXT, "Two words", TEXT + " " + TEXT]
    voices, items = zip(*(clone(pair, num_frames) for num_frames in (3, None, 60, 8)))
    expected = pair.expected(
        pair.official.generate_voice_clone,
        texts, "auto", voice_clone_prompt=list(items), non_streaming_mode=not is_streaming,
    )  # fmt: skip
    requests = [Request(text, voice=voice, is_streaming_text=is_streaming) for text, voice in zip(texts, voices)]
    pair.check(expected, *requests)


def test_gradients_reach_the_tables_and_each_text_token_is_looked_up_once(pairs):
    pair = pairs("base")
    network = pair.network
    plan = build_prompt(pair.config, pair.tokenizer, Request(TEXT + TEXT, voice=clone(pair, 4)[0]))
    looked_up: list[torch.Tensor] = []
    hook = network.talker.text_embedding.register_forward_hook(lambda module, args, rows: looked_up.append(args[0]))
    network.requires_grad_(True)
    try:
        embedded = embed_prompt(network, plan)
        (embedded.rows.sum() + embedded.trailing.sum() + embedded.pad_row.sum()).backward()
    finally:
        hook.remove()
        network.requires_grad_(False)
    used = set(plan.text_ids) | set(plan.trailing_ids) | {plan.pad_id}
    assert sorted(looked_up[0].tolist()) == sorted(used) and len(looked_up) == 1
    touched = network.talker.text_embedding.weight.grad.abs().sum(1) > 0
    assert set(np.flatnonzero(touched.numpy())) == used
    for k, table in enumerate([network.talker.codec_embedding, *network.predictor.codec_embedding]):
        codes = plan.codec_ids[:, k]
        counts = np.bincount(codes[codes >= 0], minlength=len(table.weight)).astype(np.float32)
        torch.testing.assert_close(table.weight.grad, torch.from_numpy(counts)[:, None].expand_as(table.weight))
