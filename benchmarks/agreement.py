"""Does the engine say what the reference would say? Teacher-forced argmax agreement, codebook by codebook.

    python benchmarks/agreement.py [--size 1.7B] [--requests 8] [--frames 60] [--dtype bfloat16]

The engine speaks greedily, all requests in one batch. The reference path, in the same precision and in float32, is then
given the engine's codes and asked at every step what it would have said. `separated` counts only steps at which the
reference's best logit leads by more than --margin: below that, in bf16, which of two equals wins is rounding.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from common import SIZES, make_engine, print_table, random_network, random_plan

from sottovoce.model.prompt import embed_prompt
from sottovoce.model.reference import teacher_forced_logits
from sottovoce.model.talker import banned_codes
from sottovoce.types import Sampling


@torch.no_grad()
def judge(network, plans, codes: list[np.ndarray], margin: float) -> dict:
    """Agreement of greedy `codes` with what `network` would say in the plain path."""
    banned = banned_codes(network.config.talker).to(network.talker.codec_head.weight.device)
    agree, separated, agree_separated = (np.zeros(2, np.int64) for _ in range(3))  # codebook 0, the others
    for plan, spoken in zip(plans, codes, strict=True):
        target = torch.from_numpy(spoken).to(banned.device)
        first, rest = teacher_forced_logits(network, *embed_prompt(network, plan), target)
        first = first[:-1].masked_fill(banned, -torch.inf)
        first[:2, network.config.talker.codec_eos_token_id] = -torch.inf
        for group, (logits, wanted) in enumerate(((first, target[:, 0]), (rest, target[:, 1:]))):
            best = logits.topk(2).values
            is_same = logits.argmax(-1) == wanted
            is_clear = best[..., 0] - best[..., 1] > margin
            agree[group] += is_same.sum().item()
            separated[group] += is_clear.sum().item()
            agree_separated[group] += (is_same & is_clear).sum().item()
    num_frames = sum(map(len, codes))
    return {
        "code0": agree[0] / num_frames,
        "others": agree[1] / (15 * num_frames),
        "separated_share": separated.sum() / (16 * num_frames),
        "separated_code0": agree_separated[0] / max(1, separated[0]),
        "separated_others": agree_separated[1] / max(1, separated[1]),
        "separated_all": agree_separated.sum() / max(1, separated.sum()),
        "codes": 16 * num_frames,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1.7B", choices=list(SIZES))
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--frames", type=int, default=60)
    parser.add_argument("--margin", type=float, default=0.5)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    device, dtype = torch.device("cuda"), getattr(torch, options.dtype)
    network = random_network(SIZES[options.size], device, dtype)
    plans = [random_plan(network.config, 10 + seed, seed) for seed in range(options.requests)]
    engine = make_engine(network, None, options.requests)
    for index, plan in enumerate(plans):
        engine.add(index, plan, Sampling.greedy(repetition_penalty=1.0), index, options.frames)
    spoken = {event.id: event.codes for event in engine.drain() if event.finish_reason}
    codes = [spoken[index] for index in range(options.requests)]
    single = make_engine(network, None, 1)
    single.add(0, plans[0], Sampling.greedy(repetition_penalty=1.0), 0, options.frames)
    alone = np.concatenate([event.codes for event in single.drain()])
    print("alone = among others, bit for bit:", np.array_equal(alone, codes[0]), "by", single.runner.model.backend)
    rows = [{"size": options.size, "engine": options.dtype, "reference": options.dtype}]
    rows[0] |= judge(network, plans, codes, options.margin)
    del engine, single  # they read the weights that are cast now
    if dtype != torch.float32:
        rows.append({"size": options.size, "engine": options.dtype, "reference": "float32"})
        rows[1] |= judge(network.float(), plans, codes, options.margin)
    print_table(rows)


if __name__ == "__main__":
    main()
