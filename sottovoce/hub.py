"""From what a user names (a hub id, a folder, nothing) to a local folder with the files of a checkpoint.

Knows neither tensors nor configs. Without a name it is the small model that the package carries.
"""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path

from sottovoce.config import PUBLISHED
from sottovoce.types import InputError, NotFoundError, nearest

HUB_PREFIX = "Qwen/Qwen3-TTS-12Hz-"
MODEL_FILES = ["*.json", "*.safetensors", "merges.txt", "speech_tokenizer/*"]


def demo_folder() -> Path:
    """The bundled demo checkpoint."""
    return Path(str(resources.files("sottovoce") / "demo"))


def is_offline(offline: bool | None = None) -> bool:
    """What the argument says, else the environment (SOTTOVOCE_OFFLINE, HF_HUB_OFFLINE)."""
    if offline is not None:
        return offline
    return any(
        os.environ.get(name, "").lower() in ("1", "true", "yes", "on")
        for name in ("SOTTOVOCE_OFFLINE", "HF_HUB_OFFLINE")
    )


def resolve(model: str | Path | None, *, revision: str | None = None, offline: bool | None = None) -> Path:
    """The local folder of a model: an existing folder as it is, a hub id from the cache or downloaded.

    Args:
        model: folder, hub id ("Qwen/Qwen3-TTS-12Hz-1.7B-VoiceDesign"), short name of a published model
            ("1.7B-VoiceDesign"), or None for the bundled demo.
        revision: branch, tag or commit of a hub id; pins what is loaded.
        offline: never touch the network, only the cache.

    Raises:
        NotFoundError: no such folder or hub id, or it is not in the cache and downloads are off.
        InputError: a revision for a folder.
    """
    if model is None:
        return demo_folder()
    if not isinstance(model, str | Path):
        raise InputError(f"model must be a name or a folder, got {type(model).__name__}", field="model")
    path = Path(model).expanduser()
    if os.path.isdir(path):  # Path.is_dir raises where a name is too long
        if revision is not None:
            raise InputError(f"revision {revision!r} has no meaning for the folder {str(model)!r}", field="revision")
        return path
    name = str(model)
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or path.suffix == ".safetensors":
        raise NotFoundError(
            f"model folder {name!r} does not exist (a checkpoint is a folder, not a file)", field="model"
        )
    if "/" not in name:
        if name not in PUBLISHED:
            known = ", ".join(PUBLISHED)
            raise NotFoundError(
                f"no folder and no published model named {name!r}{nearest(name, PUBLISHED)}; known: {known}",
                field="model",
            )
        name = HUB_PREFIX + name
    return _download(name, revision, is_offline(offline))


def _download(repo: str, revision: str | None, offline: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=MODEL_FILES, local_files_only=offline))
    except LocalEntryNotFoundError as error:
        wish = "turn offline mode off once to download it" if offline else "check the network"
        at = f" at revision {revision!r}" if revision else ""
        raise NotFoundError(
            f"{repo!r}{at} is not in the local cache; {wish}, or name a folder", field="model"
        ) from error
    except (HfHubHTTPError, HFValidationError) as error:
        raise NotFoundError(f"cannot get {repo!r} from the hub: {error}", field="model") from error
