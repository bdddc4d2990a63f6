"""Download the published files into a cache and check them; nothing is fetched without being asked for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from blockmean.lab.sources import SOURCES, Source


def cache_folder() -> Path:
    """The folder for downloads: $BLOCKMEAN_CACHE, or the cache folder of the system."""
    given = os.environ.get("BLOCKMEAN_CACHE")
    if given:
        return Path(given).expanduser()
    import pooch

    return Path(pooch.os_cache("blockmean"))


def download(
    dataset: str | Source, cache: Path | None = None, mirrors: Sequence[str] | None = None, progress: bool = True
) -> Path:
    """Fetch the files that are not in the cache yet, and return their folder.

    A file gets its name only once it is complete and its checksum is right. Mirrors are tried in order.
    """
    if isinstance(dataset, str) and dataset not in SOURCES:
        raise ValueError(f"Only {' and '.join(SOURCES)} can be downloaded. Got {dataset!r} instead.")
    import pooch

    source = SOURCES[dataset] if isinstance(dataset, str) else dataset
    folder = (cache or cache_folder()) / source.name
    folder.mkdir(parents=True, exist_ok=True)  # fails here, before any mirror is blamed
    for name, md5 in source.published.items():
        failures = []
        for mirror in mirrors or source.mirrors:
            url = f"{mirror.rstrip('/')}/{name}"
            fetch = pooch.HTTPDownloader(progressbar=progress, chunk_size=1 << 16)
            try:
                pooch.retrieve(url, f"md5:{md5}", fname=name, path=folder, downloader=fetch)
                break
            except (OSError, ValueError) as error:
                failures.append(f"{url} ({_reason(error)})")
        else:
            raise ConnectionError(
                f"{source.name} could not be downloaded: {', '.join(failures)}. Get {', '.join(source.published)} in "
                "another way and name the folder with --data-dir or BLOCKMEAN_DATA, or use the embedded digits with "
                "--dataset digits."
            )
    return folder


def _reason(error: OSError | ValueError) -> str:
    """Why a download failed, in a few words: messages of `requests` take several lines."""
    if isinstance(error, ValueError):  # a wrong checksum; the first sentence has both
        return str(error).partition(". ")[0]
    response = getattr(error, "response", None)
    if response is not None:
        return f"{response.status_code} {response.reason}"
    return error.strerror or type(error).__name__
