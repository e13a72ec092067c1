"""The bundled demo checkpoint is a real one: the official package loads it and speaks the same codes."""

import numpy as np
import torch

from sottovoce import TTS, Sampling
from sottovoce.hub import demo_folder
from tests.oracle import load_official

TEXT = "Hello, this is a demo."


def test_the_demo_speaks_the_same_in_the_official_package():
    official = load_official(demo_folder())
    speaker = official.get_supported_speakers()[0]
    spoken = {}

    def keep(encoded):
        spoken["codes"] = encoded[0]["audio_codes"]
        return decode(encoded)

    decode = official.model.speech_tokenizer.decode
    official.model.speech_tokenizer.decode = keep
    waves, rate = official.generate_custom_voice(
        TEXT, speaker=speaker, language="english", do_sample=False, subtalker_dosample=False, max_new_tokens=31
    )
    with TTS.from_pretrained(on_notice=lambda line: None) as tts:
        ours = tts.generate(TEXT, voice=speaker, language="english", sampling=Sampling.greedy(), max_frames=30)
    assert torch.equal(spoken["codes"].cpu(), torch.from_numpy(ours.codes))
    assert rate == ours.sample_rate
    assert np.abs(waves[0] - ours.samples).max() < 1e-4
