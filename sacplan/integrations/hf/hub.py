"""Find ``config.json`` of a model in the local cache of the hub, or fetch that one file if the user says so.

    cached("Qwen/Qwen3-8B")         # the path of the file, or None
    fetched("Qwen/Qwen3-8B")        # the same, from the hub: no weights, no tokenizer, no code

The caller has asked the user. The file stays in the cache, so the question comes once for each model.
"""

from __future__ import annotations

import re
from pathlib import Path

from sacplan.integrations.hf.target import TargetError

FILE = "config.json"


def is_name(name: str) -> bool:
    """Return whether a text can be the name of a model on the hub: ``org/name``."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None


def cached(name: str) -> Path | None:
    """Return the configuration of a model in the hub's cache (``HF_HUB_CACHE``, ``HF_HOME``), or None.

    That of the branch main counts. A cache that was copied without its branches has snapshots only: of these the
    newest.
    """
    import huggingface_hub
    from huggingface_hub import constants

    # Models from the first years of the hub have no owner in the cache.
    if not is_name(name) and re.fullmatch(r"[\w.-]+", name) is None:
        return None
    found = huggingface_hub.try_to_load_from_cache(name, FILE, cache_dir=constants.HF_HUB_CACHE)
    if isinstance(found, str):
        return Path(found)
    return newest_in(Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}"))


def newest_in(folder: Path) -> Path | None:
    """Return the newest configuration in a model's folder of the cache, ``models--org--name``; None if it has none."""
    snapshots = folder.glob(f"snapshots/*/{FILE}")
    return max(snapshots, key=lambda path: (path.stat().st_mtime, path), default=None)


def fetched(name: str) -> Path:
    """Fetch the configuration of a model from the hub into its cache.

    Raises:
        TargetError: The hub has no such file, does not give it to the user, or cannot be reached.
    """
    import huggingface_hub
    from huggingface_hub import constants

    telemetry = constants.HF_HUB_DISABLE_TELEMETRY
    # Otherwise the library also asks the hub which tools there are, to name the one that calls it.
    constants.HF_HUB_DISABLE_TELEMETRY = True
    try:
        return Path(huggingface_hub.hf_hub_download(name, FILE, cache_dir=constants.HF_HUB_CACHE))
    except OSError as error:  # as all errors of the library are; its text says what to do
        reason = " ".join(str(error).split())[:400]
        raise TargetError(
            f"{FILE} of {name} could not be fetched: {reason} Or give the file itself: hf:{FILE}."
        ) from error
    finally:
        constants.HF_HUB_DISABLE_TELEMETRY = telemetry
