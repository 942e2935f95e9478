"""Collect how a target and a checkpoint differ, and raise all of it as one error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Sequence

from ..errors import CheckpointLoadError, MissingKeysError, UnexpectedKeysError, first_keys, missing_keys

#: How many of the values that do not fit an error names.
_MOST = 20
#: How many renames an error suggests.
_MOST_RENAMES = 4


class Misfit(Exception):
    """A value of the target that the checkpoint cannot fill.

    Args:
        key: its key
        fact: a clause that names the key and says what differs
        advice: what to do about it, or empty
    """

    def __init__(self, key: str, fact: str, advice: str = "") -> None:
        super().__init__(fact)
        self.key = key
        self.fact = fact
        self.advice = advice

    @classmethod
    def of_kind(cls, key: str, here: str, there: str) -> Misfit:
        """A value of the type `here` in the target and `there` in the checkpoint."""
        fact = f"'{key}' is of type {here} in the target and of type {there} in the checkpoint"
        return cls(key, fact, "give a target of that kind, or None to take what the checkpoint has")

    @classmethod
    def of_shape(cls, key: str, here: Sequence[int], there: Sequence[int]) -> Misfit:
        """A tensor of the shape `here` in the target and `there` in the checkpoint."""
        return cls(key, f"'{key}' has shape {tuple(here)} in the target and {tuple(there)} in the checkpoint")

    @classmethod
    def of_dtype(cls, key: str, here: object, there: str) -> Misfit:
        """A tensor of the dtype `here` in the target and, by its short name, `there` in the checkpoint."""
        fact = f"'{key}' is {here} in the target and torch.{there} in the checkpoint"
        return cls(key, fact, "pass allow_dtype_cast=True to convert it")


class Mismatches:
    """All differences between a target and a checkpoint.

    Args:
        where: the checkpoint's path
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._misfits: dict[str, Misfit] = {}

    def add(self, misfit: Misfit) -> None:
        """Add a value that does not fit."""
        self._misfits.setdefault(misfit.key, misfit)

    def refuse(
        self,
        missing: Sequence[str],
        unexpected: Sequence[str],
        *,
        strict: bool,
        allow_unexpected: bool,
        needed: Container[str] = (),
    ) -> None:
        """Raise one error for everything that does not fit, if there is anything.

        Args:
            missing: keys of the target that the checkpoint lacks
            unexpected: keys of the checkpoint that the target lacks
            strict: whether missing keys are an error
            allow_unexpected: whether unexpected keys are no error
            needed: missing keys that are an error in any case, because the target has no values there

        Raises:
            MissingKeysError: keys are missing, and `strict`, or they are needed
            UnexpectedKeysError: no keys are missing, but some are unexpected and not allowed
            CheckpointLoadError: only values differ
        """
        misfits = [misfit for misfit in self._misfits.values() if not self._is_inside(misfit.key)]
        lacking = [key for key in missing if (strict or key in needed) and not self._is_inside(key)]
        extra = [] if allow_unexpected else [key for key in unexpected if key not in self._misfits]
        extra = [key for key in extra if not self._is_inside(key)]
        facts, advice = [], dict.fromkeys(misfit.advice for misfit in misfits[:_MOST] if misfit.advice)
        if misfits:
            more = f" and {len(misfits) - _MOST} more" if len(misfits) > _MOST else ""
            facts.append(", ".join(misfit.fact for misfit in misfits[:_MOST]) + more)
        if lacking:
            facts.append(missing_keys(lacking))
            if any(key in needed for key in lacking):
                advice["the target has no values there, on the meta device: give them memory and values first"] = None
            else:
                advice["strict=False leaves these values as they are"] = None
        if extra:
            facts.append(f"has keys that the target does not have: {first_keys(extra)}")
            advice["pass allow_unexpected=True to leave them"] = None
        if not facts:
            return
        if misfits or len(facts) > 1:
            of_keys = [f"it {fact}" for fact in facts[bool(misfits) :]]
            text = f"{self._where} does not fit the target: {'; '.join([*facts[: bool(misfits)], *of_keys])}"
        else:
            text = f"{'Checkpoint at ' if lacking else ''}{self._where} {facts[0]}"
        text = "; ".join([text, *advice]) + "."
        if lacking:
            other_names = how_to_find(lacking, unexpected) or ""
            raise MissingKeysError(f"{text} {other_names}".rstrip(), lacking, other_names)
        raise UnexpectedKeysError(text, extra) if extra else CheckpointLoadError(text)

    def _is_inside(self, key: str) -> bool:
        """Whether a key is below that of a value that does not fit, so that it says nothing new."""
        return bool(self._misfits) and any(outer in self._misfits for outer in _beginnings(key))


def how_to_find(missing: Sequence[str], unexpected: Sequence[str]) -> str | None:
    """Advice, if a load would probably find the missing keys under other names that the checkpoint has; or None."""
    renames = _likely_renames(missing, unexpected)
    if renames is None:
        return None
    if [*renames] == [""]:
        return f"Did you mean prefix={renames['']!r}?"
    (old, new), *others = renames.items()
    if others:
        return f"Did you mean rename={renames}?"
    if new == "":
        below = f"In the checkpoint these keys are below {old!r}"
        return f"{below}: load them into {{{old!r}: ...}}, or pass rename={renames}."
    return f"The checkpoint has {new!r} as {old!r}: use that name, or pass rename={renames}."


def _likely_renames(missing: Sequence[str], unexpected: Sequence[str]) -> dict[str, str] | None:
    """Old and new beginnings of names with which most of the missing keys would be found; the longest first."""
    by_ending: dict[str, list[str]] = {}
    for key in unexpected:
        for ending in _endings(key):
            by_ending.setdefault(ending, []).append(key)
    pairs: Counter[tuple[str, str]] = Counter()
    for key in missing:
        ending = next((each for each in _endings(key) if each in by_ending), "")
        if len(others := by_ending.get(ending, [])) == 1:
            old, new = others[0].removesuffix(ending), key.removesuffix(ending)
            pairs[old.removesuffix("."), new.removesuffix(".")] += 1
    best = pairs.most_common(_MOST_RENAMES)
    if not best or 2 * sum(count for _, count in best) < min(len(missing), len(unexpected)):
        return None
    return {old: new for (old, new), _ in reversed(best)}


def _beginnings(key: str) -> Iterator[str]:
    """The keys of the containers around a key, the innermost first."""
    while "." in key:
        key = key.rpartition(".")[0]
        yield key


def _endings(key: str) -> Iterator[str]:
    """The key itself, and the key without its first parts, the longest first."""
    yield key
    while "." in key:
        key = key.partition(".")[2]
        yield key
