"""For a Hydra app of one's own: what was probably meant, below Hydra's text."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from .compose import hydra_session
from .explain import what_was_meant


@contextmanager
def override_hints(folder: Path, config_name: str) -> Iterator[None]:
    """Print what was probably meant when `@hydra.main` ends because an override does not fit.

        if __name__ == "__main__":
            with override_hints(Path(__file__).parent / "conf", "train"):
                main()

    Hydra prints its own text and exits, so that a `SystemExit` is all that comes out of it; the error is its
    context.

    Args:
        folder: the app's config folder.
        config_name: the app's primary config.
    """
    try:
        yield
    except SystemExit as leaving:
        error = leaving.__context__
        if isinstance(error, (HydraException, OmegaConfBaseException)) and not _comes_from_the_job(error):
            overrides = [text for text in sys.argv[1:] if "=" in text and not text.startswith("-")]
            with hydra_session(folder):
                text = what_was_meant(error, overrides, config_name)
            if text:
                print(f"\n{text}", file=sys.stderr)
        raise


def _comes_from_the_job(error: BaseException) -> bool:
    """Whether Hydra had composed the config, and the job itself failed; Hydra looks for the same frame."""
    return any(
        frame.f_code.co_name == "run_job" and frame.f_globals.get("__name__") == "hydra.core.utils"
        for frame, _ in walk_tb(error.__traceback__)
    )
