"""`AsyncRequest`: a call to run in the background, and functions to run on the trainer afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from ..errors import CheckpointSaveError, CheckpointStageError
from .peers import Peers
from .torch_errors import as_checkpoint_exception
from .worker_main import Call, run_call

#: Which positional argument of `async_fn` the result of `preload_fn` replaces.
PRELOADED_ARGUMENT = 1


class _Fields(NamedTuple):
    async_fn: Callable[..., Any] | None
    async_fn_args: tuple[Any, ...]
    finalize_fns: list[Callable[[], Any]]
    async_fn_kwargs: dict[str, Any]
    preload_fn: Callable[[], Any] | None
    is_frozen: bool
    call_idx: int


class AsyncRequest(_Fields):
    """A call to run in the background, and functions to call on the trainer when it is done on all ranks.

    Attributes:
        async_fn: function to run; None: run only the finalize functions
        async_fn_args: its positional arguments
        finalize_fns: called without arguments, in order, after `async_fn` is done on all ranks
        async_fn_kwargs: its keyword arguments
        preload_fn: called without arguments before `async_fn`, usually to copy tensors to the host; its result
            replaces positional argument 1 of `async_fn`
        is_frozen: whether finalize functions may no longer be added
        call_idx: orders requests; set by the queue
    """

    __slots__ = ()

    def __new__(
        cls,
        async_fn: Callable[..., Any] | None = None,
        async_fn_args: Iterable[Any] | None = None,
        finalize_fns: Iterable[Callable[[], Any]] | None = None,
        async_fn_kwargs: Mapping[str, Any] | None = None,
        preload_fn: Callable[[], Any] | None = None,
        is_frozen: bool = False,
        call_idx: int = 0,
    ) -> AsyncRequest:
        """Copy the containers, so that requests do not share them."""
        args, fns, kwargs = tuple(async_fn_args or ()), list(finalize_fns or ()), dict(async_fn_kwargs or {})
        return super().__new__(cls, async_fn, args, fns, kwargs, preload_fn, is_frozen, call_idx)

    @property
    def name(self) -> str:
        """Name in error messages."""
        return f"Request {self.call_idx}"

    @classmethod
    def of(cls, request: Any) -> AsyncRequest:
        """Convert a similar request, such as that of megatron-core or NVRx.

        Raises:
            CheckpointStageError: it is not an async request
        """
        if isinstance(request, cls):
            return request
        if not hasattr(request, "async_fn") or not hasattr(request, "finalize_fns"):
            raise CheckpointStageError(
                f"An AsyncRequest is needed, got {type(request).__module__}.{type(request).__qualname__}."
            )
        return cls(**{name: getattr(request, name) for name in cls._fields if hasattr(request, name)})

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Add a function to call after the existing ones.

        Raises:
            RuntimeError: the request is frozen, as the copies of scheduled requests are
        """
        if self.is_frozen:
            raise RuntimeError("This AsyncRequest is frozen: add finalize functions before it is scheduled.")
        self.finalize_fns.append(fn)

    def freeze(self) -> AsyncRequest:
        """A copy without shared containers, to which no finalize function can be added."""
        return AsyncRequest(**{**self._asdict(), "is_frozen": True})

    @as_checkpoint_exception()
    def execute_sync(self) -> None:
        """Run the request in this process: preload, call, wait for all ranks, finalize.

        Raises:
            RanksError: with several ranks, the request failed on one of them; the same error on all ranks, with this
                rank's own as its cause. Unless a finalize function failed, no rank has called one.
            CheckpointTimeoutError: a rank was not done within half an hour of the others
        """
        session = Peers().session()
        if session is None:
            self._run()
            self._finalize()
        else:
            try:
                session.run_step("run", self._run, self.name)
                session.run_step("finalize", self._finalize, f"Finalizing {self.name}")
            finally:
                session.rest()

    def preloaded_call(self) -> Call | None:
        """Call `preload_fn` and return `async_fn` with its arguments; None if there is nothing to run.

        Raises:
            CheckpointStageError: `preload_fn` has no argument to replace
            CheckpointSaveError: `preload_fn` failed
        """
        if self.async_fn is None:
            return None
        args = list(self.async_fn_args)
        if self.preload_fn is not None:
            if len(args) <= PRELOADED_ARGUMENT:
                raise CheckpointStageError(
                    f"preload_fn provides positional argument {PRELOADED_ARGUMENT} of async_fn, but async_fn_args has "
                    f"{len(args)}: put a placeholder such as None there."
                )
            try:
                args[PRELOADED_ARGUMENT] = self.preload_fn()
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # torch's CheckpointException is not an Exception
                text = f"preload_fn of {self.name} failed: {error}"
                raise CheckpointSaveError(text, getattr(error, "errno", None)) from error
        return self.async_fn, tuple(args), self.async_fn_kwargs

    def _run(self) -> None:
        call = self.preloaded_call()
        if call is not None:
            run_call(call)

    def _finalize(self) -> None:
        for finalize_fn in self.finalize_fns:
            finalize_fn()
