"""Answers messages in place of a worker's Responder, for tests of the systems that carry messages."""

import os
import time
from pathlib import Path

from germline.fleet.cluster.backend import Message


class Echo:
    """Returns each message, with what it knows about its process."""

    def __init__(self, threads: int) -> None:
        self.about: dict[str, object] = {"pid": os.getpid(), "threads": threads}
        self.about |= {name: os.environ.get(name) for name in ("GERMLINE_DEVICE", "CUDA_VISIBLE_DEVICES")}
        self.answered = 0

    def answer(self, message: Message) -> Message | None:
        op = message.head["op"]
        if op == "wait":
            while not Path(message.head["file"]).exists():
                time.sleep(0.01)
        if op == "raise":
            raise ValueError("this message is not liked")
        self.answered += 1
        return None if op == "end" else Message(message.head | self.about | {"answered": self.answered}, message.arrays)


class Refuses(Echo):
    """Cannot be made."""

    def __init__(self, threads: int) -> None:
        raise ImportError("a library is missing")
