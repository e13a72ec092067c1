"""Which part of a model is on which device: a `device_map` as people write it, read into one device for each part.

Names are the official package's module paths, or the short names of parts. Knows no devices: whether one is here is
the loader's to say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from sottovoce.types import InputError, nearest

# Short names for module paths; longer paths go before shorter ones, as in every such map.
SHORT = {
    "text_embedding": "talker.model.text_embedding",
    "predictor": "talker.code_predictor",
    "codec": "speech_tokenizer",
}
LAYERS = "talker.model.layers"
KNOWN = (
    "talker", "talker.model", LAYERS, "talker.model.text_embedding", "talker.model.codec_embedding",
    "talker.model.norm", "talker.text_projection", "talker.codec_head", "talker.code_predictor", "speaker_encoder",
    "speech_tokenizer",
)  # fmt: skip
DeviceMap = Mapping[str, str | int]


@dataclass(frozen=True)
class Placement:
    """Names of devices.

    Args:
        home: where requests live: the talker's head, norm, embeddings of codes, and everything not named here.
        layers: of the talker, one by one.
        predictor, codec: of these parts.
        text: of the text embedding; "cpu" is the host, whose rows are fetched for each prompt. None: as planned.
    """

    home: str
    layers: tuple[str, ...]
    predictor: str
    codec: str
    text: str | None = None

    @property
    def is_split(self) -> bool:
        """Whether a step crosses devices."""
        return len({self.home, self.predictor, *self.layers}) > 1

    @property
    def devices(self) -> tuple[str, ...]:
        """All of them, home first, each once."""
        return tuple(dict.fromkeys((self.home, *self.layers, self.predictor, self.codec)))

    def of(self, official: str) -> str:
        """The device of a tensor, by its official name."""
        match = re.match(rf"{re.escape(LAYERS)}\.(\d+)\.", official)
        if match:
            return self.layers[int(match[1])]
        return self.predictor if official.startswith("talker.code_predictor.") else self.home


def parse_device_map(device_map: DeviceMap, num_layers: int, default: str) -> Placement:
    """Reads a map from names to devices ("cuda:1", "cpu", or the number of a GPU); the longest name that fits counts.

    "" stands for everything, `default` is where what no name fits goes. The talker's small modules share one place:
    that of `talker.codec_head`. Raises InputError for a name that is no module, or what can be no device.
    """
    places: dict[str, str] = {"": _device(default)}
    for name, device in device_map.items():
        path = SHORT.get(name, name).rstrip(".")
        layer = re.fullmatch(rf"{re.escape(LAYERS)}\.(\d+)", path)
        if path not in ("", *KNOWN) and not (layer and int(layer[1]) < num_layers):
            known = (*SHORT, *KNOWN, f"{LAYERS}.0 to {LAYERS}.{num_layers - 1}")
            raise InputError(
                f"device_map: there is no module {name!r}{nearest(name, known)}; known: {', '.join(known)}",
                field="device_map",
            )
        places[path] = _device(device)

    def of(path: str) -> str:
        fitting = [name for name in places if not name or path == name or path.startswith(f"{name}.")]
        return places[max(fitting, key=len)]

    text = of("talker.model.text_embedding") if any("text_embedding" in name for name in places) else None
    home = of("talker.codec_head")
    if text not in (None, "cpu", home):
        raise InputError(
            f"device_map: the text embedding can be on {home}, where the talker's small modules are, or on the host "
            f"('cpu'), not on {text}",
            field="device_map",
        )
    return Placement(
        home=home,
        layers=tuple(of(f"{LAYERS}.{index}") for index in range(num_layers)),
        predictor=of("talker.code_predictor"),
        codec=of("speech_tokenizer"),
        text=text,
    )


def _device(value: str | int) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return f"cuda:{value}"
    if isinstance(value, str) and re.fullmatch(r"cpu|mps|cuda(:\d+)?", value):
        return "cuda:0" if value == "cuda" else value
    raise InputError(
        f"device_map: {value!r} is no device; write 'cpu', 'cuda:1' or the number of a GPU", field="device_map"
    )
