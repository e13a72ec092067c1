"""The definition of right: one request, frame by frame, slow and obvious.

Kernels, graphs, batches and quantized layers are tested against this file, and this file against the official package.
Knows a prompt's embedded rows (`prompt.embed_prompt`), not how they came about, and nothing of batches or audio.

A frame k, whose talker logits are given by everything before it:
  1. code 0 is drawn from the logits; the end code ends the speech and gives no frame;
  2. codes 1 to 15 are drawn one after the other from the predictor;
  3. the sum of the 16 embeddings plus row k of the trailing text is the talker's next input.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sottovoce.kernels.torch_ops import sample_codes
from sottovoce.model.layers import KVCache
from sottovoce.model.network import Network
from sottovoce.model.talker import banned_codes
from sottovoce.types import FinishReason, Sampling


def generate(
    network: Network,
    rows: Tensor,
    trailing: Tensor,
    pad_row: Tensor,
    sampling: Sampling,
    max_frames: int,
    seed: int = 0,
) -> tuple[Tensor, FinishReason]:
    """Speaks one prompt: int64 codes [T, 16] with T <= max_frames, and "stop" (end code) or "length" (budget used up).

    Args:
        network: with talker and predictor.
        rows: the embedded prompt [P, D].
        trailing: text rows [T2, D] that are added to the frames as they are fed back.
        pad_row: [D], added once `trailing` is used up.
        sampling: how codes are drawn; its own seed is not looked at.
        max_frames: most frames to give. The official `max_new_tokens` N counts drawn code-0 tokens, the last of which
            never becomes a frame: it gives N - 1 frames, so max_frames = N - 1 is the same budget.
        seed: of the counter-based noise; same seed, same codes, on any device and in any company.
    """
    frames = list(iterate_frames(network, rows, trailing, pad_row, sampling, max_frames, seed))
    codes = (
        torch.stack(frames) if frames else rows.new_empty(0, network.config.talker.num_code_groups, dtype=torch.int64)
    )
    return codes, "length" if len(frames) == max_frames else "stop"


@torch.no_grad()
def iterate_frames(
    network: Network,
    rows: Tensor,
    trailing: Tensor,
    pad_row: Tensor,
    sampling: Sampling,
    max_frames: int,
    seed: int = 0,
) -> Iterator[Tensor]:
    """The frames of `generate` one at a time, int64 [16] each. It ends before `max_frames` exactly if speech ended."""
    talker, config = network.talker, network.config.talker
    cache, position, inputs = KVCache(), 0, rows
    banned = banned_codes(config).to(rows.device)
    seen = torch.zeros_like(banned)  # codes 0 of this request so far: the prompt is embeddings and has none
    for frame in range(max_frames):
        positions = torch.arange(position, position + len(inputs), device=rows.device)
        hidden = talker(inputs[None], positions[None], cache)[:, -1:]  # [1, 1, D]
        position += len(inputs)

        now_banned = banned.clone()
        if frame < sampling.min_new_frames:
            now_banned[config.codec_eos_token_id] = True
        limits = {
            "penalty": torch.tensor([sampling.repetition_penalty], device=rows.device),
            "seen": seen[None],
            "banned": now_banned,
        }
        code = _draw(talker.logits(hidden[:, 0]), sampling, seed, frame, 0, **limits)
        if code.item() == config.codec_eos_token_id:
            return
        seen[code] = True

        codes = _predict(network, hidden, code, sampling, seed, frame)
        yield codes
        inputs = (network.frame_embedding(codes) + _text_row(trailing, pad_row, frame))[None]


def teacher_forced_logits(
    network: Network, rows: Tensor, trailing: Tensor, pad_row: Tensor, codes: Tensor
) -> tuple[Tensor, Tensor]:
    """What the model would say at each step of given `codes` [T, 16]; gradients flow.

    Returns fp32 logits of codebook 0 [T + 1, V], the last row being what follows the last frame (the end, when it is
    right), and of codebooks 1 to 15 [T, 15, Vp].
    """
    text = torch.stack([_text_row(trailing, pad_row, frame) for frame in range(len(codes))])
    inputs = torch.cat((rows, network.frame_embedding(codes) + text))[None]
    hidden = network.talker(inputs, torch.arange(inputs.shape[1], device=rows.device)[None])[0, len(rows) - 1 :]
    first = network.talker.logits(hidden)  # [T + 1, V]

    within = [hidden[:-1], network.talker.codec_embedding(codes[:, 0])]
    within += [network.predictor.embed(codes[:, k], k) for k in range(1, codes.shape[1] - 1)]
    return first, network.predictor(torch.stack(within, dim=1))


def _predict(network: Network, hidden: Tensor, code: Tensor, sampling: Sampling, seed: int, frame: int) -> Tensor:
    """All 16 codes [16] of the frame whose code 0 [1] was drawn from `hidden` [1, 1, D] (after the final norm)."""
    cache, codes = KVCache(), [code]
    inputs = torch.cat((hidden, network.talker.codec_embedding(code)[None]), dim=1)  # [1, 2, D]
    for codebook in range(1, network.config.talker.num_code_groups):
        logits = network.predictor.step(inputs, codebook, cache)
        codes.append(_draw(logits, sampling, seed, frame, codebook))
        inputs = network.predictor.embed(codes[-1], codebook)[None]  # [1, 1, D]
    return torch.cat(codes)


def _text_row(trailing: Tensor, pad_row: Tensor, frame: int) -> Tensor:
    return trailing[frame] if frame < len(trailing) else pad_row


def _draw(logits: Tensor, sampling: Sampling, seed: int, frame: int, codebook: int, **limits: Tensor) -> Tensor:
    """One code [1] from logits [1, V]; codebook 0 and the others have options of their own."""
    which = "" if codebook == 0 else "subtalker_"
    options = {name: getattr(sampling, which + name) for name in ("do_sample", "temperature", "top_k", "top_p")}
    options |= {"seed": seed, "frame": frame}
    tensors = {name: torch.tensor([value], device=logits.device) for name, value in options.items()}
    return sample_codes(logits, codebook=codebook, **tensors, **limits)
