"""Where parts live: text rows from the host, a copy of the model on each GPU, one model over several devices.

    python benchmarks/placement.py rows [--size 1.7B]      what a prompt pays for rows from the host (the aim: < 1 ms)
    python benchmarks/placement.py pool [--folder DIR]     two GPUs against one (the aim: 1.9 times); a worker killed
    python benchmarks/placement.py split [--folder DIR]    layers and parts on other devices: the same codes

`pool` and `split` read a checkpoint; a folder that is not there, or none, gets a random 0.6B one first. Both check what
they show and end with status 1 if a result differs.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

FRAMES = 200
ROWS = 32


def rows_from_the_host(size: str, repeats: int) -> bool:
    """Prompts of different lengths, embedded with the table on the card, locked on the host, and in ordinary memory."""
    import torch
    from common import SIZES, print_table, random_network, random_plan

    from sottovoce.model.prompt import embed_prompt
    from sottovoce.model.rowtable import RowTable, lock_pages

    device, dtype, results = torch.device("cuda"), torch.bfloat16, []
    network = random_network(SIZES[size], device, dtype)
    on_card = network.talker.text_embedding
    weight = on_card.weight.detach().cpu()
    plain, locked = (RowTable(weight.clone(), device=device) for _ in range(2))
    lock_pages(locked)
    is_equal = True
    for tokens in (20, 100, 500):
        row = {"size": size, "text_tokens": tokens}
        for name, table in (("card", on_card), ("locked", locked), ("plain", plain)):
            network.talker.text_embedding = table
            times_s = []
            for seed in range(repeats):
                plan = random_plan(network.config, tokens, seed)
                torch.cuda.synchronize()
                start_s = time.perf_counter()
                with torch.no_grad():
                    prompt = embed_prompt(network, plan)
                torch.cuda.synchronize()
                times_s.append(time.perf_counter() - start_s)
                if name != "card":
                    network.talker.text_embedding = on_card
                    with torch.no_grad():
                        is_equal &= all(map(torch.equal, prompt, embed_prompt(network, plan)))
                    network.talker.text_embedding = table
            row[f"{name}_ms"] = 1000 * statistics.median(times_s)
        row["extra_ms"] = row["locked_ms"] - row["card_ms"]
        results.append(row)
    for row in results:
        row |= {"saves_MiB": weight.nbytes / (1 << 20), "bit_equal": is_equal}
    print_table(results)
    return is_equal


def pool(folder: Path, num_items: int) -> bool:
    """The same items by one process and by two; then again, and a worker is killed in the middle of it."""
    import numpy as np
    import torch
    from common import print_table

    from sottovoce import TTS

    items = [{"text": f"This is sentence number {i}.", "seed": i, "max_frames": FRAMES} for i in range(num_items)]
    options = {"min_new_frames": FRAMES, "retries": 0, "split": False}
    counts = [1, 2]
    if torch.cuda.device_count() < counts[-1]:
        sys.exit("the pool needs two GPUs")
    results, codes = [], []
    for count in counts:
        devices = [f"cuda:{index}" for index in range(count)]
        with TTS.pool(folder, devices=devices, on_notice=None, profile="batch", max_rows=ROWS) as workers:
            workers.batch(items[: ROWS * count], **options)  # graphs
            start_s = time.perf_counter()
            spoken = workers.batch(items, **options)
            took_s = time.perf_counter() - start_s
            codes.append([speech.codes for speech in spoken])
            results.append(
                {"gpus": count, "items": num_items, "took_s": took_s, "x_real_time": _audio_s(spoken) / took_s}
            )
            if count == counts[-1]:
                killer = threading.Timer(took_s / 3, os.kill, (workers.pids[0], signal.SIGKILL))
                killer.start()
                spoken = workers.batch(items, **options)
                codes.append([speech.codes for speech in spoken])
                results.append({"gpus": count, "items": len(spoken), "killed": 1, "replaced": workers.num_replaced})
    results[1]["ratio"] = results[1]["x_real_time"] / results[0]["x_real_time"]
    for row, spoken in zip(results[1:], codes[1:], strict=True):
        row["equal_items"] = sum(map(np.array_equal, spoken, codes[0]))
    is_equal = all(row["equal_items"] == num_items for row in results[1:])
    print_table(results)
    print(f"codes of one GPU, of {counts[-1]}, and with a killed worker are equal: {is_equal}")
    return is_equal and results[-1]["items"] == num_items


def split(folder: Path) -> bool:
    """float32, so that a device's own rounding cannot hide behind that of bfloat16."""
    import torch
    from common import print_table

    from sottovoce import TTS

    other = "cuda:1" if torch.cuda.device_count() > 1 else "cpu"
    maps = {
        "one device": None,
        "codec elsewhere": {"codec": other},
        "predictor elsewhere": {"predictor": other},
        "half of the layers elsewhere": {f"talker.model.layers.{index}": other for index in range(14, 28)},
    }
    results, codes = [], []
    for name, device_map in maps.items():
        options = {"device": "cuda:0", "dtype": "float32", "max_rows": 1, "on_notice": lambda notice: None}
        with TTS.from_pretrained(folder, device_map=device_map, **options) as tts:
            voice = {"voice": tts.speakers[0]} if tts.speakers else {"instruct": "A calm voice."}
            say = {"seed": 3, "max_frames": 40, "min_new_frames": 40, "retries": 0, **voice}
            tts.generate("Once.", **say)
            start_s = time.perf_counter()
            speech = tts.generate("This is a test.", **say)
            took_s = time.perf_counter() - start_s
        codes.append(speech.codes)
        same = float((speech.codes == codes[0]).mean())
        results.append(
            {"map": name, "other": other, "ms_a_frame": 1000 * took_s / len(speech.codes), "same_codes": same}
        )
    print_table(results)
    return all(row["same_codes"] == 1 for row in results) or other == "cpu"


def _audio_s(spoken: list) -> float:
    return sum(len(speech.codes) for speech in spoken) * 0.08


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("rows", "pool", "split"))
    parser.add_argument("--size", default="1.7B", choices=("1.7B", "0.6B"))
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--items", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=50)
    options = parser.parse_args()
    if options.what == "rows":
        sys.exit(not rows_from_the_host(options.size, options.repeats))
    folder = options.folder or Path(tempfile.mkdtemp()) / "0.6B"
    if not folder.exists():
        from sottovoce.random_checkpoint import write_random_checkpoint

        write_random_checkpoint(folder, "0.6B-CustomVoice", mean_frames=None)
    sys.exit(not (pool(folder, options.items) if options.what == "pool" else split(folder)))


if __name__ == "__main__":
    main()
