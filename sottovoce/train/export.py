"""A trained model as a checkpoint folder in the official layout, which the official package and every server load.

It begins as the folder that was trained from: what was not trained is copied byte for byte, `config.json` is edited and
never made anew. An adapter is added to the plain weights in float32, whatever they were quantized to in training, and
also saved beside them in PEFT's layout. Knows no data and no loop.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sottovoce.config import ModelConfig, SpeakerConfig, read_json
from sottovoce.model.network import Network
from sottovoce.model.speaker import SpeakerEncoder
from sottovoce.model.weights import Slot, fill, load_network, network_slots, skeleton
from sottovoce.tensorfile import INDEX, SINGLE, TensorEntry, read_index, read_rows, write_tensors
from sottovoce.train.lora import adapter_deltas, merged, save_adapter
from sottovoce.train.ranks import Ranks, whole
from sottovoce.types import CheckpointError

SPEAKER_FILE = "speaker_encoder.safetensors"  # beside a CustomVoice model that came of a Base model
CODEC_FOLDER = "speech_tokenizer"
TABLE = "talker.model.codec_embedding.weight"
BUFFER_BYTES = 4 << 20
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PREFIX = "speaker_encoder."

Change = Callable[[Tensor], Tensor]  # the old value of a tensor in the file -> its new one, on any device


def export_model(
    network: Network,
    base: Path,
    out: Path,
    *,
    config_json: Mapping[str, Any] | None = None,
    speaker_rows: Mapping[int, np.ndarray] | None = None,
    card: str = "",
    codec: Path | None = None,
    ranks: Ranks | None = None,
) -> Path:
    """Writes folder `out`, which appears only when it is whole; one of that name is replaced.

    Where parameters are spread over processes, all of them must call it, and the first one writes.

    Args:
        network: as trained, with or without adapters.
        base: the folder it was loaded from.
        config_json: the new config.json; None keeps the base's.
        speaker_rows: row of the talker's table -> float32 [D], of speakers that are new.
        card: the model card, see `model_card`.
        codec: a codec folder to take instead of the base's, as one that was trained along.
    """
    if ranks is not None and not ranks.is_first:
        if ranks.is_sharded:  # takes part in gathering what the first one writes
            for _ in _pieces(read_index(base), _changed(network, speaker_rows or {})):
                pass
        return out
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    config_json = dict(read_json(base / "config.json") if config_json is None else config_json)
    _copy_rest(base, partial, codec)
    entries = read_index(base)
    own = {name: entry for name, entry in entries.items() if not name.startswith(_PREFIX)}
    speaker = {name: entry for name, entry in entries.items() if name.startswith(_PREFIX)}
    if config_json["tts_model_type"] == "base":
        own, speaker = entries, {}
    changed = _changed(network, speaker_rows or {})
    _write(partial / SINGLE, own, changed)
    if speaker:
        _write(partial / SPEAKER_FILE, speaker, {})
    if adapter_deltas(network):
        save_adapter(network, partial / "adapter", base.name)
    (partial / "README.md").write_text(card, "utf-8")
    (partial / "config.json").write_text(json.dumps(config_json, indent=2, ensure_ascii=False) + "\n", "utf-8")
    ModelConfig.from_folder(partial)
    if out.exists():
        shutil.rmtree(out)
    return partial.rename(out)


def export_codec(base: Path, out: Path, trained: Mapping[str, Tensor]) -> Path:
    """Writes codec folder `out`: that of `base`, with new values for some of its tensors, by their official names."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for path in base.iterdir():
        if path.is_file() and path.name != SINGLE:
            shutil.copy(path, out / path.name)
    _write(out / SINGLE, read_index(base), {name: (lambda _, new=tensor: new) for name, tensor in trained.items()})
    return out


def load_speaker_encoder(folder: Path, device: torch.device | str = "cpu") -> SpeakerEncoder | None:
    """Of a Base model, or of a CustomVoice model that was made from one here; None for others."""
    config = ModelConfig.from_folder(folder)
    if config.kind == "base":
        return load_network(folder, device=device, parts=("speaker_encoder",)).speaker_encoder
    if not (folder / SPEAKER_FILE).is_file():
        return None
    about = read_json(folder / "config.json").get("speaker_encoder_config") or {}
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in about.items()}
    with skeleton():
        encoder = SpeakerEncoder(SpeakerConfig(**values))
    entries = read_index(folder / SPEAKER_FILE)
    fill(encoder, {name: Slot(name.removeprefix(_PREFIX)) for name in entries}, entries, device=device)
    return encoder


def model_card(
    facts: Mapping[str, Any], *, base_model: str, speakers: Sequence[str] = (), languages: Sequence[str] = ()
) -> str:
    """README.md with the front matter that hubs read, and the facts of the training as a list."""
    lines = ["---", "license: apache-2.0", f"base_model: {base_model}", "pipeline_tag: text-to-speech"]
    if languages:
        lines += ["language:", *(f"- {language}" for language in languages)]
    lines += ["tags:", "- text-to-speech", "- qwen3-tts", "- sottovoce", "---", "", f"# Fine-tune of {base_model}", ""]
    if speakers:
        example = f'sottovoce say "Hello." --model . --voice {speakers[0]} -o hello.wav'
        lines += [f"Speakers trained: {', '.join(speakers)}", "", "```console", example, "```", ""]
    lines += ["Whose voices these are, and that they agreed, is for the publisher of this model to say.", ""]
    lines += ["| training | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items()), ""]
    return "\n".join(lines)


def _copy_rest(base: Path, target: Path, codec: Path | None) -> None:
    """Everything but weights, config and card: tokenizer, generation settings, the codec."""
    weights = {SINGLE, INDEX, "config.json", "README.md"}
    if (base / INDEX).exists():
        weights |= set(read_json(base / INDEX).get("weight_map", {}).values())
    for path in base.iterdir():
        if path.is_file() and path.name not in weights and not path.name.endswith(".partial"):
            shutil.copy(path, target / path.name)
    source = base / CODEC_FOLDER if codec is None else codec
    if source.is_dir():
        shutil.copytree(source, target / CODEC_FOLDER)


def _changed(network: Network, speaker_rows: Mapping[int, np.ndarray]) -> dict[str, Change]:
    """What becomes of each tensor that was trained, by official name."""
    changed: dict[str, Change] = {}
    for name, delta in adapter_deltas(network).items():
        changed[name] = lambda old, delta=delta: merged(old.to(delta[0].device), delta)
    state, parts = dict(network.named_parameters()), network.parts & {"talker", "predictor", "text_embedding"}
    for name, (slot, shape) in network_slots(network.config, parts).items():
        if slot.name in state and state[slot.name].requires_grad:
            rows = slice(slot.start_row, slot.start_row + shape[0])
            changed[name] = lambda _, tensor=state[slot.name], rows=rows: whole(tensor.detach())[rows]
    if speaker_rows:
        before = changed.get(TABLE, lambda old: old)
        changed[TABLE] = lambda old: _with_rows(before(old), speaker_rows)
    return changed


def _with_rows(table: Tensor, rows: Mapping[int, np.ndarray]) -> Tensor:
    table = table.clone()
    for row, vector in rows.items():
        table[row] = torch.from_numpy(vector).to(table)
    return table


def _write(path: Path, entries: Mapping[str, TensorEntry], changed: Mapping[str, Change]) -> None:
    unknown = sorted(set(changed) - set(entries))
    if unknown:
        raise CheckpointError(f"the base checkpoint lacks {unknown[0]} and {len(unknown) - 1} more that were trained")
    shapes = {name: (entry.dtype, entry.shape) for name, entry in entries.items()}
    write_tensors(path, shapes, _pieces(entries, changed))


def _pieces(entries: Mapping[str, TensorEntry], changed: Mapping[str, Change]) -> Iterator[Any]:
    """The bytes of all tensors, one tensor (or a buffer of one that is only copied) at a time."""
    for name, entry in entries.items():
        if name not in changed:
            buffer = memoryview(bytearray(max(BUFFER_BYTES, entry.row_bytes)))
            for _, count in read_rows(entry, buffer):
                yield buffer[:count]
            continue
        dtype = _FLOATS[entry.dtype]
        old = torch.empty(entry.shape, dtype=dtype)
        flat = memoryview(old.view(-1).view(torch.uint8).numpy())
        for _ in read_rows(entry, flat):
            pass
        new = changed[name](old).to("cpu", dtype).contiguous()
        yield new.view(-1).view(torch.uint8).numpy()
