"""`AsyncRequest`."""

from __future__ import annotations

import inspect
import pickle
from typing import Any, NamedTuple

import pytest

from ckpt_component.compat.async_request import AsyncRequest
from ckpt_component.errors import CheckpointStageError


def nothing() -> None:
    pass


def test_fields_and_their_order() -> None:
    assert AsyncRequest._fields == (
        "async_fn",
        "async_fn_args",
        "finalize_fns",
        "async_fn_kwargs",
        "preload_fn",
        "is_frozen",
        "call_idx",
    )
    assert list(inspect.signature(AsyncRequest).parameters) == list(AsyncRequest._fields)
    assert AsyncRequest() == (None, (), [], {}, None, False, 0)
    assert AsyncRequest(nothing, (1,), [nothing]) == (nothing, (1,), [nothing], {}, None, False, 0)


def test_requests_share_no_container() -> None:
    first, second = AsyncRequest(), AsyncRequest()
    first.add_finalize_fn(nothing)
    first.async_fn_kwargs["a"] = 1
    assert second == AsyncRequest()


def test_finalize_functions_are_added_until_it_is_frozen() -> None:
    request = AsyncRequest(None, (), [nothing], {"key": 1}, call_idx=4)
    frozen = request.freeze()
    assert frozen == request._replace(is_frozen=True) and not request.is_frozen
    with pytest.raises(RuntimeError, match="frozen"):
        frozen.add_finalize_fn(nothing)
    request.add_finalize_fn(print)
    request.finalize_fns.append(print)
    request.async_fn_kwargs["late"] = 2
    assert frozen.finalize_fns == [nothing] and frozen.async_fn_kwargs == {"key": 1}


def test_execute_sync_runs_everything_in_order() -> None:
    seen: list[Any] = []
    request = AsyncRequest(
        lambda *args, **kwargs: seen.append((args, kwargs)),
        (0, "placeholder", 2),
        [lambda: seen.append("first"), lambda: seen.append("second")],
        {"key": "word"},
        preload_fn=lambda: "preloaded",
    )
    request.execute_sync()
    assert seen == [((0, "preloaded", 2), {"key": "word"}), "first", "second"]


def test_execute_sync_without_a_function_finalizes() -> None:
    seen: list[str] = []
    AsyncRequest(None, (), [lambda: seen.append("done")], preload_fn=lambda: seen.append("no")).execute_sync()
    assert seen == ["done"]


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, GeneratorExit])
def test_execute_sync_does_not_finalize_what_failed(kind: type[BaseException]) -> None:
    seen: list[str] = []

    def fail() -> None:
        raise kind("on purpose")

    with pytest.raises(kind, match="on purpose"):
        AsyncRequest(fail, (), [lambda: seen.append("no")]).execute_sync()
    assert seen == []


def test_a_preload_function_needs_an_argument_to_replace() -> None:
    with pytest.raises(CheckpointStageError, match="positional argument 1 of async_fn, but async_fn_args has 1"):
        AsyncRequest(nothing, (1,), [], preload_fn=nothing).execute_sync()


def test_it_can_be_pickled() -> None:
    request = AsyncRequest(nothing, (1, [2]), [nothing], {"a": 3}, nothing, True, 9)
    copy = pickle.loads(pickle.dumps(request))
    assert copy == request and type(copy) is AsyncRequest


class Foreign(NamedTuple):
    """As megatron-core's, with other defaults."""

    async_fn: Any
    async_fn_args: Any
    finalize_fns: Any
    async_fn_kwargs: Any = None
    preload_fn: Any = None
    is_frozen: bool = False
    call_idx: int = 0


def test_a_foreign_request_is_taken_by_its_fields() -> None:
    assert AsyncRequest.of(Foreign(print, ("a",), [nothing])) == AsyncRequest(print, ("a",), [nothing])

    class Newer(NamedTuple):
        async_fn: Any
        async_fn_args: Any
        finalize_fns: Any
        async_fn_kwargs: Any
        preload_fn: Any
        is_frozen: bool
        call_idx: int
        more: str

    newer = Newer(None, (), [nothing], {}, None, False, 3, "more")
    assert AsyncRequest.of(newer) == AsyncRequest(None, (), [nothing], call_idx=3)
    request = AsyncRequest(print)
    assert AsyncRequest.of(request) is request


def test_what_is_no_request_is_refused() -> None:
    with pytest.raises(CheckpointStageError, match=r"An AsyncRequest is needed, got builtins\.tuple"):
        AsyncRequest.of((print, ()))
