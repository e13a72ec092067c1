"""Peak memory of the codec against length: decoding 400 and 4,000 frames, encoding 1 and 10 minutes.

    python benchmarks/codec_memory.py                   the published widths, on the CPU: half an hour
    python benchmarks/codec_memory.py --narrow          an eighth of the widths: under a minute
    python benchmarks/codec_memory.py --device cuda     asks the allocator of the card instead of the process

Every reading comes from a process of its own. Weights are random: memory does not depend on them. "work" is what the
work added to the weights and the audio that were there before; the floor of decoding is the state of one stream. The
readings of a CPU need Linux.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

MIB = 2**20


def narrowed(config):
    """The codec configuration with an eighth of the widths; rates, layers and codebooks stay."""
    part = lambda c, *names: replace(c, **{n: getattr(c, n) // 8 for n in names})  # noqa: E731
    common = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "codebook_dim")
    return replace(
        config,
        decoder=part(config.decoder, *common, "latent_dim", "decoder_dim"),
        encoder=part(config.encoder, *common, "num_filters", "vector_quantization_hidden_dimension"),
    )


def process_bytes(field: str) -> int:
    """A field of Linux's status of this process: "VmRSS" now, "VmHWM" at most."""
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[field].split()[0]) * 1024


def measure(args: argparse.Namespace) -> dict:
    """One piece of work in this process: bytes before it, at its peak, and its seconds."""
    import torch

    from sottovoce.codec.codec import Codec
    from sottovoce.codec.state import tensors
    from sottovoce.config import CodecConfig

    config = narrowed(CodecConfig.published()) if args.narrow else CodecConfig.published()
    is_decoding = args.one == "decode"
    with torch.device("meta"):
        codec = Codec(config, has_decoder=is_decoding, has_encoder=not is_decoding)
    codec = codec.to_empty(device=args.device).eval()
    for name, parameter in codec.named_parameters():
        parameter.data.normal_(0.0, 0.02) if "usage" not in name else parameter.data.fill_(1.0)
    codec.freeze_codebooks()
    size = int(args.size)
    if is_decoding:
        work_input = torch.randint(0, config.decoder.codebook_size, (1, config.decoder.num_quantizers, size))
    else:
        work_input = torch.randn(size * 60 * config.input_sample_rate).mul_(0.3)
    work_input = work_input.to(args.device)

    on_cpu = args.device == "cpu"
    before = process_bytes("VmRSS") if on_cpu else torch.cuda.memory_allocated()
    if on_cpu:
        Path("/proc/self/clear_refs").write_text("5")  # the highest residency so far becomes the present one
    else:
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    if is_decoding:
        for _ in codec.decode_stream(work_input):
            pass
    else:
        codec.encode([work_input], window=args.window)
    if not on_cpu:
        torch.cuda.synchronize()
    peak = process_bytes("VmHWM") if on_cpu else torch.cuda.max_memory_allocated()
    reading = {"before_bytes": before, "peak_bytes": peak, "seconds": time.perf_counter() - start}
    reading["input_bytes"] = work_input.nbytes
    if is_decoding:
        reading["state_bytes"] = sum(t.nbytes for t in tensors(codec.decoder.initial_state(1)).values())
    return reading


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--narrow", action="store_true", help="an eighth of the published widths")
    parser.add_argument("--frames", nargs=2, default=("400", "4000"), metavar="N", help="lengths to decode")
    parser.add_argument("--minutes", nargs=2, default=("1", "10"), metavar="N", help="lengths to encode")
    parser.add_argument("--one", choices=("decode", "encode"), help=argparse.SUPPRESS)
    parser.add_argument("--size", help=argparse.SUPPRESS)
    parser.add_argument("--window", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args)))
        return

    def own(reading: dict) -> int:
        return reading["peak_bytes"] - reading["input_bytes"]

    common = ["--device", args.device] + ["--narrow"] * args.narrow
    works = (
        ("decode, frames", ["--one", "decode"], args.frames),
        ("encode, minutes, window 250", ["--one", "encode", "--window", "250"], args.minutes),
        ("encode, minutes, whole past", ["--one", "encode"], args.minutes),
    )
    print(f"{'work':<28} {'length':>7} {'peak MiB':>9} {'work MiB':>9} {'s':>8}   long / short, without input")
    results = []
    for name, options, sizes in works:
        pair = []
        for size in sizes:
            command = [sys.executable, __file__, *common, *options, "--size", size]
            reading = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            pair.append({"work": name, "length": size, "device": args.device, "narrow": args.narrow} | reading)
            peak, work = reading["peak_bytes"], reading["peak_bytes"] - reading["before_bytes"]
            ratio = f"{own(pair[1]) / own(pair[0]):.3f}" if len(pair) == 2 else ""
            print(f"{name:<28} {size:>7} {peak / MIB:>9.1f} {work / MIB:>9.1f} {reading['seconds']:>8.1f}   {ratio}")
        results += pair
    state = results[0]["state_bytes"] / MIB
    print(f"floor of decoding: the state of one stream, {state:.1f} MiB, and the weights")
    for result in results:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
