"""A codec from nothing, on speech: three minutes of recordings and some minutes of training make it understandable."""

import dataclasses
import random
import shutil
import subprocess

import numpy as np
import pytest

from sottovoce.train.codec import CodecRecipe
from sottovoce.train.codec_export import export_codec
from sottovoce.train.codec_trainer import train_codec
from tests.train.test_codec_trainer import OPTIONS, rows_of, tiny_dict

WORDS = (
    "the quick brown fox jumps over a lazy dog while seven small boats sail along our quiet river and nobody knows why "
    "winter comes so early this year my sister sold twelve green apples to an old teacher near station because weather "
    "was bad people waited under trees until morning light returned"
).split()
NUM_CLIPS = 54  # of some 3.5 s each


def speak(folder):
    chosen = random.Random(1)
    folder.mkdir()
    for index in range(NUM_CLIPS):
        text = " ".join(chosen.choice(WORDS) for _ in range(chosen.randint(7, 11)))
        voice, speed = chosen.choice(["en-us", "en-us+m3", "en-us+f2"]), str(chosen.randint(140, 170))
        command = ["espeak-ng", "-v", voice, "-s", speed, "-w", str(folder / f"{index:02}.wav"), text]
        subprocess.run(command, check=True)


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="espeak-ng is not installed")
def test_speech_is_understood_after_some_minutes(tmp_path):
    """550 steps, nine minutes of one core. STOI of held-out clips is 0.1 or less for noise."""
    speak(tmp_path / "speech")
    shapes = {"codebook_size": 256}
    data = tiny_dict(decoder_config=shapes | {"decoder_dim": 96}, encoder_config=shapes | {"num_filters": 8})
    base = export_codec({}, data, tmp_path / "base")  # shapes alone count
    loop = {"max_steps": 550, "learning_rate": 1e-3, "validate_every": 550, "save_every": 550, "preview_every": 275}
    train_codec(
        base, tmp_path / "speech", tmp_path / "run", recipe=CodecRecipe("all", ema_decay=0.99),
        loop=dataclasses.replace(OPTIONS, **loop), rows=8, piece_s=0.96, is_new=True, is_quiet=True,
    )  # fmt: skip
    losses = [float(row["loss"]) for row in rows_of(tmp_path / "run" / "train.csv")]
    qualities = rows_of(tmp_path / "run" / "previews" / "quality.csv")
    earlier, last = qualities[0], qualities[-1]
    print([round(float(np.mean(losses[i : i + 50])), 1) for i in range(0, 550, 50)], earlier, last)
    assert np.mean(losses[-50:]) < 0.8 * np.mean(losses[:50])
    assert float(last["perplexity"]) > 40 and float(last["least_perplexity"]) > 20
    assert float(last["stoi"]) > 0.6 and float(last["stoi"]) > float(earlier["stoi"])
