"""What is made once from the data and read by every later run: tokenizers and tokens."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from pytorch_lightning.utilities import rank_zero_info


def cache_folder(root: str | None, **settings: object) -> Path:
    """Return the folder for what is made from these settings; it need not exist yet.

    Args:
        root: Where such folders lie, by default ``~/.cache/lightning-compress`` (or in ``$XDG_CACHE_HOME``).
        settings: All that the content depends on.
    """
    base = (
        Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning-compress"
    )
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    return base / key


def make_once(folder: Path, make: Callable[[Path], None]) -> None:
    """Fill a folder unless it exists. It appears as a whole or not at all.

    Args:
        folder: What :func:`cache_folder` returned.
        make: Fills the empty folder that it is given.
    """
    if folder.is_dir():
        return
    rank_zero_info(f"Preparing the text, once: {folder}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        make(temporary)
        temporary.chmod(0o755)  # mkdtemp's is readable to its owner only
        temporary.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another node that shares the disk was faster
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
