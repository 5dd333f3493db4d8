"""Where the kernel sources are."""

from pathlib import Path


def csrc() -> Path:
    """The folder with `common/`, `cpu/` and `cuda/`: a wheel carries it inside the package, a checkout (and so an
    editable install) has it beside the package.

    Raises FileNotFoundError if it is in neither place.
    """
    package = Path(__file__).resolve().parent.parent
    places = package / "csrc", package.parent / "csrc"
    for folder in places:
        if (folder / "common").is_dir():
            return folder
    raise FileNotFoundError(f"No kernel sources in {places[0]} or {places[1]}: install bytesplat-ns again.")
