"""Milliseconds a frame, by batch: this engine on random weights of the published shapes, beside the hardware's floor.

    python benchmarks/decode.py [--sizes 1.7B 0.6B] [--batches 1 2 4 8 16 32 64] [--frames 100] [--dtype bfloat16]
        [--no-whole-frames]

Rows: the talker and predictor step alone (graph replays), the codec alone (chunks of 8 frames), and the whole engine,
codec included. `floor_share` is the time to read all weights once, at the read bandwidth measured here, over the time
taken. `x_real_time` is seconds of audio a second in all.
"""

from __future__ import annotations

import argparse
import gc
import statistics

import torch
from common import (
    FRAME_S,
    SIZES,
    bytes_per_frame,
    event_time,
    make_engine,
    print_table,
    random_codec,
    random_network,
    random_plan,
    read_bandwidth,
    wall_time,
)

from sottovoce.types import Sampling


def measure(
    size: str, batches: list[int], frames: int, dtype: torch.dtype, device: torch.device, whole_frames: bool
) -> list[dict]:
    network, codec = random_network(SIZES[size], device, dtype), random_codec(device, torch.float32).to(dtype)
    bandwidth = read_bandwidth(device)
    floor_s = bytes_per_frame(network.config, dtype.itemsize) / bandwidth
    plan = random_plan(network.config)
    rows = []
    for batch in batches:
        torch.cuda.reset_peak_memory_stats()
        engine = make_engine(network, codec, batch, whole_frames=whole_frames)

        def speak(engine=engine, batch=batch) -> None:
            for row in range(batch):
                engine.add(row, plan, Sampling(), row, frames)
            engine.drain()

        speak()  # captures graphs
        whole_s = statistics.median(wall_time(speak) for _ in range(3)) / frames
        slots = list(range(batch))
        for row in slots:  # rows stay in their slots while only the step is repeated
            engine.add(row, plan, Sampling(), row, 1000)
        for _ in range(3):
            engine.step()
        torch.cuda.synchronize()
        with engine.runner.launcher.here():
            step_s = event_time(lambda runner=engine.runner, slots=slots: runner._decode(slots), 50)
        rows.append(
            {
                "size": size,
                "batch": batch,
                "step_ms": step_s * 1000,
                "floor_ms": floor_s * 1000,
                "floor_share": floor_s / step_s,
                "with_codec_ms": whole_s * 1000,
                "x_real_time": batch * FRAME_S / whole_s,
                "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
                "graphs_mib": (engine.runner.launcher.num_bytes + engine.audio.launcher.num_bytes) / 2**20,
                "kernels": engine.runner.model.backend,
            }
        )
        print(rows[-1], flush=True)
        engine = speak = None
        gc.collect()
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["1.7B", "0.6B"], choices=list(SIZES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--frames", type=int, default=100)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--no-whole-frames", action="store_true", help="without the persistent CUDA kernel")
    options = parser.parse_args()
    device = torch.device("cuda")
    print(torch.cuda.get_device_name(device), "torch", torch.__version__)
    rows = []
    for size in options.sizes:
        dtype = getattr(torch, options.dtype)
        rows += measure(size, options.batches, options.frames, dtype, device, not options.no_whole_frames)
    print_table(rows)


if __name__ == "__main__":
    main()
