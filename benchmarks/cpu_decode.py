"""Frames a second on a CPU, this engine and the official package turn by turn on the same random checkpoint.

    python benchmarks/cpu_decode.py [--frames 60] [--repeats 3] [--threads 2]

Two sizes: tiny (64 wide, 3 layers) and small (256 wide, 8 layers). Sampling as published, one request, codec included
on both sides. Without the official package (see requirements-oracle.txt) only this engine is timed. `cpu_ms_a_frame` is
the processor time of all threads: what to compare where other programs keep the cores busy, with one thread.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from common import print_table

from sottovoce import TTS
from sottovoce.random_checkpoint import write_random_checkpoint

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.oracle import load_official
from tests.tiny import tiny_checkpoint

TEXT = "A sentence of ordinary length, to be spoken on a CPU."
SMALL = {
    "talker_config.hidden_size": 256,
    "talker_config.intermediate_size": 768,
    "talker_config.num_hidden_layers": 8,
    "talker_config.num_attention_heads": 8,
    "talker_config.num_key_value_heads": 4,
    "talker_config.head_dim": 32,
    "talker_config.text_hidden_size": 256,
    "talker_config.text_vocab_size": 1000,
    "talker_config.code_predictor_config.hidden_size": 256,
    "talker_config.code_predictor_config.intermediate_size": 768,
    "talker_config.code_predictor_config.num_attention_heads": 8,
    "talker_config.code_predictor_config.num_key_value_heads": 4,
    "talker_config.code_predictor_config.head_dim": 32,
    "codec.decoder_config.latent_dim": 128,
    "codec.decoder_config.codebook_dim": 64,
    "codec.decoder_config.decoder_dim": 192,
    "codec.decoder_config.hidden_size": 64,
    "codec.decoder_config.intermediate_size": 128,
    "codec.decoder_config.num_attention_heads": 4,
    "codec.decoder_config.num_key_value_heads": 4,
    "codec.decoder_config.head_dim": 16,
    "codec.decoder_config.num_hidden_layers": 4,
    "codec.encoder_config.num_filters": 8,
    "codec.encoder_config.hidden_size": 64,
    "codec.encoder_config.intermediate_size": 128,
    "codec.encoder_config.num_hidden_layers": 2,
}


def checkpoints(folder: Path) -> dict[str, Path]:
    tiny = tiny_checkpoint(folder / "tiny", "voice_design", mean_frames=None)
    small = write_random_checkpoint(folder / "small", "1.7B-VoiceDesign", changes=SMALL, mean_frames=None)
    return {"tiny": tiny, "small": small}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, checkpoint in checkpoints(Path(folder)).items():
            tts = TTS.from_pretrained(checkpoint)
            sides: dict[str, Callable[[], object]] = {
                "sottovoce": lambda tts=tts: tts.generate(TEXT, max_frames=options.frames, seed=0)
            }
            try:
                official = load_official(checkpoint)
            except ImportError as error:
                print(f"the official package is not installed: {error}", file=sys.stderr)
            else:
                sides["official"] = lambda official=official: official.generate_voice_design(
                    TEXT, instruct="", language="english", max_new_tokens=options.frames + 1
                )
            times: dict[str, list[float]] = {side: [] for side in sides}
            cpu_times: dict[str, list[float]] = {side: [] for side in sides}
            for repeat in range(options.repeats + 1):
                for side, speak in sides.items():
                    start_s, cpu_start_s = time.perf_counter(), time.process_time()
                    speak()
                    if repeat:  # the first is warm-up
                        times[side].append(time.perf_counter() - start_s)
                        cpu_times[side].append(time.process_time() - cpu_start_s)
            ours_s, ours_cpu_s = statistics.median(times["sottovoce"]), statistics.median(cpu_times["sottovoce"])
            for side, taken in times.items():
                taken_s, cpu_s = statistics.median(taken), statistics.median(cpu_times[side])
                rows.append(
                    {
                        "checkpoint": name,
                        "side": side,
                        "frames_per_s": options.frames / taken_s,
                        "x_real_time": options.frames * 0.08 / taken_s,
                        "ours_is_faster": taken_s / ours_s,
                        "cpu_ms_a_frame": cpu_s / options.frames * 1000,
                        "ours_takes_less_cpu": cpu_s / ours_cpu_s,
                    }
                )
            tts.close()
    print_table(rows)


if __name__ == "__main__":
    main()
