"""Building one part: ours and the user's, by the same rules."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from ckpt_component import CheckpointConfigError
from ckpt_component.config import build_part, part_class


class Base(ABC):
    @abstractmethod
    def stage(self) -> None: ...

    def guard(self) -> None:
        raise NotImplementedError


@pytest.fixture
def my_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module `my_app_parts` of a user's, with good and bad parts."""
    (tmp_path / "my_app_parts.py").write_text(
        """
from __future__ import annotations
from enum import Enum

class Speed(Enum):
    slow = 1
    fast = 2

class Stager:
    def __init__(self, size: int, speed: Speed, other: Speed = Speed.slow, names: list[str] | None = None):
        self.size, self.speed, self.other, self.names = size, speed, other, names
    def stage(self): ...
    def guard(self): ...

class Half:
    def stage(self): ...

class Open(Stager):
    def __init__(self, **kwargs):
        super().__init__(1, Speed.slow)
        self.rest = kwargs

class Picky(Stager):
    def __init__(self, size: int = 1):
        if size > 1:
            raise ValueError("size is too big")
        raise RuntimeError("a bug")

class Outer:
    class Inner(Open): ...

def function(): ...
"""
    )
    (tmp_path / "my_app_needs.py").write_text("import a_library_that_is_not_there\n")
    (tmp_path / "my_app_broken.py").write_text("raise OSError('no licence')\n")
    (tmp_path / "my_app_torn.py").write_text("import sys; sys.nothing\n")
    lazy = "from ckpt_component.core._lazy import lazy\n__all__, __getattr__, __dir__ = lazy(__name__, {'.home': 'Stager'})\n"
    (tmp_path / "my_app_lazy").mkdir()
    (tmp_path / "my_app_lazy" / "__init__.py").write_text(lazy)
    (tmp_path / "my_app_lazy" / "home.py").write_text(
        "import sys\nif not hasattr(sys, 'my_app_whole'):\n    sys.nothing\nfrom my_app_parts import Open as Stager\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.startswith("my_app_")]:
        del sys.modules[name]


def build(target: str, **settings: Any) -> Any:
    return build_part("stager", {"_target_": target, **settings}, Base)


def refused(target: str, **settings: Any) -> str:
    with pytest.raises(CheckpointConfigError) as caught:
        build(target, **settings)
    return str(caught.value)


pytestmark = pytest.mark.usefixtures("my_app")


def test_a_users_class_is_built_with_enums_from_names() -> None:
    part = build("my_app_parts.Stager", size=3, speed="fast", other="fast", names=["a"], _convert_="all")
    assert (part.size, part.speed.name, part.other.name, part.names) == (3, "fast", "fast", ["a"])


def test_a_nested_class_and_open_settings() -> None:
    assert build("my_app_parts.Outer.Inner", anything=1).rest == {"anything": 1}


def test_deriving_from_the_base_is_enough() -> None:
    class Derived(Base):
        def __init__(self, mode: Mode) -> None:
            self.mode = mode

        def stage(self) -> None: ...

    class Mode(Enum):
        here = 1

    module = sys.modules[__name__] = sys.modules.get(__name__) or type(sys)(__name__)
    module.Derived = Derived  # type: ignore[attr-defined]
    module.Mode = Mode  # type: ignore[attr-defined]
    assert build(f"{__name__}.Derived", mode="here").mode is Mode.here


@pytest.mark.parametrize(
    ("target", "settings", "text"),
    [
        (
            "no_such_app.stagers.Mine",
            {},
            "checkpoint.stager._target_=no_such_app.stagers.Mine cannot be imported: there is no module no_such_app. "
            "Is it installed, or its folder on PYTHONPATH?",
        ),
        (
            "my_app_needs.Stager",
            {},
            "checkpoint.stager._target_=my_app_needs.Stager cannot be imported: it needs a_library_that_is_not_there, "
            "which is not installed.",
        ),
        (
            "my_app_broken.Stager",
            {},
            "checkpoint.stager._target_=my_app_broken.Stager cannot be imported: OSError: no licence",
        ),
        (
            "my_app_torn.Stager",
            {},
            "checkpoint.stager._target_=my_app_torn.Stager cannot be imported: AttributeError: module 'sys' has no "
            "attribute 'nothing'",
        ),
        (
            "my_app_lazy.Stager",
            {},
            "checkpoint.stager._target_=my_app_lazy.Stager cannot be imported: ImportError: my_app_lazy.Stager cannot be "
            "imported: module 'sys' has no attribute 'nothing'; if an import was interrupted before, restart Python",
        ),
        (
            "my_app_parts.Stagr",
            {},
            "checkpoint.stager._target_=my_app_parts.Stagr: my_app_parts has no Stagr. Did you mean Stager?",
        ),
        (
            "my_app_parts.function",
            {},
            "checkpoint.stager._target_=my_app_parts.function is a function, not a class.",
        ),
        (
            "Stager",
            {},
            "checkpoint.stager._target_=Stager is not the full name of a class, such as my_package.my_module.MyClass.",
        ),
        (
            "my_app_parts.Half",
            {},
            f"checkpoint.stager: my_app_parts.Half is not a stager: it does not derive from {Base.__module__}.Base, and "
            "has no guard.",
        ),
        (
            "my_app_parts.Stager",
            {"speed": "fast"},
            "checkpoint.stager.size is missing; my_app_parts.Stager needs it.",
        ),
        (
            "my_app_parts.Stager",
            {"size": 1, "sped": "fast"},
            "There is no key checkpoint.stager.sped. Did you mean checkpoint.stager.speed?",
        ),
        (
            "my_app_parts.Stager",
            {"size": 1, "speed": "warp"},
            "checkpoint.stager.speed must be slow or fast, got warp.",
        ),
        (
            "my_app_parts.Picky",
            {"size": 2},
            "checkpoint.stager: my_app_parts.Picky refused its settings: size is too big",
        ),
    ],
)
def test_what_cannot_be_built_is_told_in_words(target: str, settings: dict[str, Any], text: str) -> None:
    assert refused(target, **settings) == text


def test_what_could_not_be_imported_once_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook, whose import of a library is interrupted: the library may be whole the next time."""
    with pytest.raises(ImportError, match="module 'sys' has no attribute 'nothing'; if an import was interrupted"):
        from my_app_lazy import Stager  # type: ignore[import-not-found]
    monkeypatch.setattr(sys, "my_app_whole", True, raising=False)
    from my_app_lazy import Stager

    assert build("my_app_lazy.Stager").rest == {} and Stager.__name__ == "Open"


def test_the_cause_is_kept() -> None:
    with pytest.raises(CheckpointConfigError) as caught:
        build("my_app_needs.Stager")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_a_bug_in_a_users_class_keeps_its_traceback() -> None:
    with pytest.raises(RuntimeError, match="a bug"):
        build("my_app_parts.Picky", size=1)


def test_a_class_can_be_checked_without_building_it() -> None:
    plain = {"_target_": "my_app_parts.Picky"}
    assert part_class("stager", plain, Base).__name__ == "Picky"
    with pytest.raises(CheckpointConfigError, match="no key"):
        part_class("stager", {**plain, "length": 1}, Base)


def test_a_class_with_open_methods_is_told_which() -> None:
    sys.modules["my_app_abstract"] = type(sys)("my_app_abstract")
    sys.modules["my_app_abstract"].Unfinished = type("Unfinished", (Base,), {"__module__": "my_app_abstract"})  # type: ignore[attr-defined]
    assert refused("my_app_abstract.Unfinished") == (
        "checkpoint.stager: my_app_abstract.Unfinished does not define stage."
    )


@pytest.mark.slow
def test_our_own_parts_are_built_from_their_files() -> None:
    from ckpt_component.callers.write_callers import WriteCaller
    from ckpt_component.config import resolve_config
    from ckpt_component.config.schema import PARTS
    from ckpt_component.formats.writer import Writer
    from ckpt_component.stagers.base import Stager

    config = resolve_config("sync")
    for kind, base in (("stager", Stager), ("caller", WriteCaller), ("writer", Writer)):
        for option in PARTS[kind]:
            plain = getattr(resolve_config(config, [f"checkpoint/{kind}={option}"]), kind)
            assert type(build_part(kind, plain, base)) is part_class(kind, plain, base)
