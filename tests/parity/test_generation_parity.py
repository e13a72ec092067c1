"""Greedy speech against the official package, token for token, for every kind of prompt.

The official package speaks a whole list in one left-padded batch; ours speaks each request alone. Most requests are
judged teacher-forced: if our greedy choice after every prefix of the official codes is the official next code, then so
is, step by step, what we would generate. One is generated freely as well.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sottovoce.config import ModelConfig
from sottovoce.model.prompt import build_prompt, embed_prompt
from sottovoce.model.reference import generate, teacher_forced_logits
from sottovoce.model.talker import banned_codes
from sottovoce.model.weights import load_network
from sottovoce.text.tokenizer import TextTokenizer
from sottovoce.types import Request, Sampling, Voice
from tests.oracle import load_official
from tests.tiny import tiny_checkpoint

MAX_FRAMES = 61
GREEDY = {"do_sample": False, "subtalker_dosample": False, "max_new_tokens": MAX_FRAMES + 1}
TEXTS = (
    "Good morning! It's 25 °C today.",
    "No.",
    "今天天气很好, 我们去公园散步吧 — don't you think so? 1, 2, 3 …",
    "Ça va 🙂?",
)
LANGUAGES = ("auto", *ModelConfig.published("1.7B-Base").languages)
INSTRUCT = "A calm old man, speaking slowly."


class Pair:
    """One checkpoint in both packages. Some speech ends by itself, some runs to the budget."""

    def __init__(self, folder, kind: str, layout: str) -> None:
        tiny_checkpoint(folder, kind, layout, mean_frames=60)
        self.official, self.frames = load_official(folder), []
        self.official.model.speech_tokenizer.decode = self._keep_codes
        self.network = load_network(folder, dtype=torch.float32, parts=("talker", "predictor", "text_embedding"))
        self.config, self.tokenizer = self.network.config, TextTokenizer.from_folder(folder)

    def _keep_codes(self, items):
        self.frames = [item["audio_codes"] for item in items]
        return [np.zeros(0, np.float32)] * len(items), 24000

    def prompt(self, request: Request):
        return embed_prompt(self.network, build_prompt(self.config, self.tokenizer, request))

    @torch.no_grad()
    def check(self, requests: list[Request], free: tuple[int, ...] = ()) -> None:
        """Compares `requests` with the official codes of the call before; those of index `free` without forcing."""
        assert len(self.frames) == len(requests)
        assert max(len(codes) for codes in self.frames) >= 60
        for index, (request, codes) in enumerate(zip(requests, self.frames)):
            codes = codes[
                0 if request.voice is None or request.voice.ref_codes is None else len(request.voice.ref_codes) :
            ]
            prompt = self.prompt(request)
            spoken = greedy_choices(self.config, *teacher_forced_logits(self.network, *prompt, codes), codes)
            assert torch.equal(spoken[:-1], codes), request
            end = self.config.talker.codec_eos_token_id
            assert len(codes) == MAX_FRAMES or spoken[-1, 0] == end, request
            if index in free:
                free_codes, reason = generate(self.network, *prompt, Sampling.greedy(), MAX_FRAMES)
                assert torch.equal(free_codes, codes), request
                assert reason == ("length" if len(codes) == MAX_FRAMES else "stop")


def greedy_choices(config: ModelConfig, first: torch.Tensor, rest: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """The greedy codes [T + 1, 16] after each prefix of `codes`; of the last row only codebook 0 counts."""
    banned, seen, spoken = banned_codes(config.talker), set(), torch.zeros(len(codes) + 1, 16, dtype=torch.int64)
    for frame, logits in enumerate(first):
        for code in seen:
            logits[code] = logits[code] / 1.05 if logits[code] > 0 else logits[code] * 1.05
        logits[banned] = -torch.inf
        if frame < 2:
            logits[config.talker.codec_eos_token_id] = -torch.inf
        spoken[frame, 0] = logits.argmax()
        if frame < len(codes):
            seen.add(codes[frame, 0].item())
    spoken[:-1, 1:] = rest.argmax(-1)
    return spoken


def pair_fixture(kind: str, layout: str):
    @pytest.fixture(scope="module")
    def make(tmp_path_factory):
        return Pair(tmp_path_factory.mktemp(kind), kind, layout)

    return make


design_large = pair_fixture("voice_design", "1.7B")
custom_large, custom_small = pair_fixture("custom_voice", "1.7B"), pair_fixture("custom_voice", "0.6B")
base_large, base_small = pair_fixture("base", "1.7B"), pair_fixture("base", "0.6B")


@pytest.mark.parametrize("is_streaming", [False, True], ids=["text_first", "streaming_text"])
def test_designed_voices_in_every_language(design_large, is_streaming):
    pair, texts = design_large, [TEXTS[i % 4] for i in range(len(LANGUAGES))]
    instructs = [INSTRUCT if i % 3 else "" for i in range(len(LANGUAGES))]
    pair.official.generate_voice_design(
        texts, instructs, list(LANGUAGES), non_streaming_mode=not is_streaming, **GREEDY
    )
    requests = [
        Request(text, language, Voice(instruct=instruct or None), is_streaming_text=is_streaming)
        for text, instruct, language in zip(texts, instructs, LANGUAGES)
    ]
    pair.check(requests)


def test_preset_speakers_with_dialects_and_instructions(custom_large):
    speakers = ["ryan", "eric", "dylan", "eric", "dylan", "serena", "vivian"]
    languages = ["auto", "auto", "chinese", "english", "auto", "japanese", "korean"]
    instructs = ["", INSTRUCT, "", "", INSTRUCT, INSTRUCT, ""]
    check_presets(custom_large, speakers, languages, instructs, is_streaming=False)


def test_preset_speakers_of_the_small_layout(custom_small):
    speakers, languages = ["ryan", "eric", "dylan"], ["auto", "auto", "german"]
    check_presets(custom_small, speakers, languages, [""] * 3, is_streaming=True)


def check_presets(pair, speakers, languages, instructs, is_streaming) -> None:
    texts = [TEXTS[i % 4] for i in range(len(speakers))]
    pair.official.generate_custom_voice(
        texts, speakers, languages, instructs, non_streaming_mode=not is_streaming, **GREEDY
    )
    requests = [
        Request(text, language, Voice(speaker=speaker), instruct or None, is_streaming_text=is_streaming)
        for text, speaker, language, instruct in zip(texts, speakers, languages, instructs)
    ]
    pair.check(requests)


def test_clones(base_large):
    check_clones(base_large, is_streaming=True)


def test_clones_with_text_first_of_the_small_layout(base_small):
    check_clones(base_small, is_streaming=False, free=(0,))


def check_clones(pair, is_streaming, free=()) -> None:
    """In context, with text longer and shorter than the codes, and by speaker vector alone, in one batch."""
    from qwen_tts import VoiceClonePromptItem

    rng = np.random.default_rng(3)
    voices, items = [], []
    for num_frames in (4, 90, None, None):
        x_vector = rng.standard_normal(pair.config.talker.hidden_size, np.float32)
        codes = None if num_frames is None else rng.integers(0, 2048, (num_frames, 16))
        ref_text = None if num_frames is None else "What I said, word for word."
        voices.append(Voice(x_vector=x_vector, ref_codes=codes, ref_text=ref_text))
        ref_code = None if codes is None else torch.from_numpy(codes)
        items.append(
            VoiceClonePromptItem(ref_code, torch.from_numpy(x_vector), codes is None, codes is not None, ref_text)
        )
    languages = ["auto", "english", "chinese", "auto"]
    texts = [TEXTS[2], TEXTS[0], TEXTS[1], TEXTS[3]]
    pair.official.generate_voice_clone(
        texts, languages, voice_clone_prompt=items, non_streaming_mode=not is_streaming, **GREEDY
    )
    requests = [
        Request(text, language, voice, is_streaming_text=is_streaming)
        for text, language, voice in zip(texts, languages, voices)
    ]
    pair.check(requests, free)
