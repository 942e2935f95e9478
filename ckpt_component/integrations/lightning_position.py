"""Where a Trainer is in its data and its random numbers, so that a resumed run draws what an undisturbed one would.

Lightning does not save random states, and starts a plain `DataLoader` again from its first batch. So the random state
from which an epoch's order followed is saved too: a resumed run makes that order again, and skips the batches that were
trained.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from .lightning_package import fabric, part

#: The states of the generators of Python, NumPy (or None), torch, and torch on each CUDA device. A tuple is one value
#: of a state dict, so that its form does not depend on what is in it.
RandomState = tuple[Any, ...]


def random_state() -> RandomState:
    """The state of the global generators, of plain values and tensors."""
    numpy = sys.modules.get("numpy")  # if it was never imported, nothing has drawn from it
    return (
        random.getstate(),
        None if numpy is None else numpy.random.get_state(),
        torch.get_rng_state(),
        tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else (),
    )


def set_random_state(state: RandomState) -> None:
    """Set the generators to a result of `random_state`. Those of CUDA are unchanged if there are other devices now."""
    python, numpy_state, cpu, cuda = state
    random.setstate(python)
    torch.set_rng_state(cpu)
    if numpy_state is not None:
        import numpy

        numpy.random.set_state(numpy_state)
    if cuda and len(cuda) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(list(cuda))


logger = logging.getLogger(__name__)

_set_sampler_epoch = fabric("utilities.data")._set_sampler_epoch
_IteratorFetcher = part("loops.fetchers")._DataLoaderIterDataFetcher


class Position:
    """The position of one rank. Its state can be saved before a batch, and when a training ends.

    Args:
        trainer: the Trainer
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._loaded: dict[str, Any] = {}
        self._fit = self._epoch = random_state()
        #: Before the next batch is fetched; None: no batch of this epoch was trained.
        self._next: RandomState | None = None
        self._loaders: tuple[Any, ...] = ()
        self._in_batch = self._started = False

    def state_dict(self) -> dict[str, Any]:
        """The random states, and how many batches of the epoch were trained; nothing before the training."""
        if not self._started:
            return {}
        now, loop = random_state(), self._trainer.fit_loop
        inside = loop.epoch_progress.current.processed < loop.epoch_progress.current.ready
        batches = loop.epoch_loop.batch_progress.current.processed if inside else 0
        return {
            "batches": batches,
            "loaders": self._loaders if batches else (),
            "fit": self._fit,
            "epoch": self._epoch if inside else now,
            "next": self._next if batches else None,
            "now": now if self._in_batch else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a loaded state, for `replay`."""
        self._loaded = state

    def restore_loaders(self) -> None:
        """Give Lightning the states of data loaders that have any."""
        if self._loaded.get("loaders"):
            loops = self._trainer._checkpoint_connector._loaded_checkpoint["loops"]
            loops["fit_loop"]["state_dict"]["combined_loader"] = list(self._loaded["loaders"])

    def begin_fit(self) -> None:
        """Before `train_dataloader()` is called: it may draw random numbers too."""
        if self._loaded:
            set_random_state(self._loaded["fit"])
        self._fit, self._started = random_state(), True

    def begin_epoch(self) -> None:
        """Before the first batch of an epoch is fetched."""
        if not self._loaded:
            self._epoch, self._next = random_state(), None

    def begin_batch(self) -> None:
        """When a batch was fetched."""
        loaded, self._loaded, self._in_batch = self._loaded, {}, True
        if loaded.get("now"):
            set_random_state(loaded["now"])

    def end_batch(self) -> None:
        """When a batch was trained, and again when its validation is over."""
        self._next, self._in_batch = random_state(), False
        if self._has_states():
            self._loaders = tuple(self._trainer.fit_loop._combined_loader._state_dicts())

    def replay(self) -> bool:
        """Go to the batch that follows the saved ones. Called before the first epoch begins.

        Returns:
            Whether the batches that follow are those of an undisturbed run.
        """
        if not self._loaded:  # saved by another number of ranks
            return False
        loop, batches = self._trainer.fit_loop, self._loaded["batches"]
        self._epoch, self._next = self._loaded["epoch"], self._loaded["next"]
        set_random_state(self._epoch)
        stateful = batches and self._has_states()
        exactly = self._has_states(all) if stateful else self._skip(loop._data_fetcher, batches)
        fetcher = loop._data_fetcher
        fetcher.iterator = _from(self._next or random_state(), fetcher.iterator)
        epoch_loop = loop.epoch_loop
        if self._loaded["now"] is not None:
            # Saved when this batch was fetched. Lightning counts it again in the total, which then tells the next
            # resume that a batch had been begun.
            epoch_loop.batch_progress.total.ready -= 1
        if self._loaded["now"] is None and not batches:
            epoch_loop.restarting = False  # with max_steps, Lightning would end the saved epoch a second time
        elif self._loaded["now"] is not None and epoch_loop.restarting and not epoch_loop._should_accumulate():
            epoch_loop._batches_that_stepped -= 1  # it was counted before the save, and Lightning counts it again
        return exactly

    def _skip(self, fetcher: Any, batches: int) -> bool:
        loop = self._trainer.fit_loop
        for loader in loop._combined_loader.flattened:
            _set_sampler_epoch(loader, loop.epoch_progress.current.processed)
        if self._trainer.current_epoch > 0:
            iter(fetcher)  # the first epoch's iterator exists already
        if not batches:
            return True
        if isinstance(fetcher, _IteratorFetcher):
            logger.warning(
                "training_step(dataloader_iter) fetches for itself, so the %d batches of this epoch that were trained "
                "before the checkpoint come again",
                batches,
            )
            return False
        logger.info("skipping the %d batches of this epoch that were trained before the checkpoint", batches)
        for _ in range(batches):
            next(fetcher)
        fetcher.fetched -= batches  # Lightning adds them again
        return True

    def _has_states(self, of: Callable[[Iterable[bool]], bool] = any) -> bool:
        """Whether a data loader has its own state, which then replaces the skipping; `of=all`: each of them."""
        loaders = self._trainer.fit_loop._combined_loader.flattened
        return of(hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict") for loader in loaders)


def _from(state: RandomState, batches: Iterator[Any]) -> Iterator[Any]:
    """The same batches, the first of which is fetched from a random state: before it, Lightning may draw numbers."""
    set_random_state(state)
    while True:  # `yield from` would call iter(), which starts Lightning's iterator again
        try:
            batch = next(batches)
        except StopIteration:
            return
        yield batch
