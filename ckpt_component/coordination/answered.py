"""Answered questions of the leader, whose keys stay in the store until every rank has read the answer."""

from __future__ import annotations

import threading
from collections import deque

from .question import Question

#: How many questions are kept for ranks that have not read the answer.
_KEPT = 64


class AnsweredQuestions:
    """Removes old questions from the store when a new one is added. Used by several threads."""

    def __init__(self) -> None:
        self._tags: deque[str] = deque()
        self._lock = threading.Lock()

    def add(self, question: Question) -> None:
        """Add a question, and remove those that every rank has read, or that are so old that a rank must be dead."""
        readers = question.store.world_size - 1
        with self._lock:
            old, self._tags = self._tags, deque()
            for number, tag in enumerate(old):
                earlier = Question(question.store, tag)
                if len(old) - number <= _KEPT and earlier.count("left") < readers:
                    self._tags.append(tag)
                else:
                    earlier.delete()
            self._tags.append(question.tag)
