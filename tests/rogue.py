"""Workers of a cluster that give wrong answers."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from germline.engine.follower import Follower
from germline.fleet import Local
from germline.fleet.cluster.backend import Head, Message

HONEST_ANSWERS = 4  # that a rogue gives first


class Rogue(Follower):
    """A worker that gives honest answers at first, and then wrong ones."""

    def __init__(self, fleet: Local, fault: str) -> None:
        super().__init__(fleet)
        self.fault, self.count = fault, 0

    def compute(self, head: Head, arrays: Sequence[bytes]) -> Message:
        answer = super().compute(head, arrays)
        self.count += 1
        if self.count <= HONEST_ANSWERS or answer.head["op"] != "answer":
            return answer
        about, (scores, *_) = answer
        if self.fault == "nan":
            return Message(about, [np.full_like(np.frombuffer(scores, np.float32), np.nan).tobytes()])
        if self.fault == "garbage":
            return Message(about, [b"no scores"])
        if self.fault == "short":
            return Message(about, [scores[:-4]])
        if self.fault == "old":
            return Message(about | {"job": about["job"] - 1}, [scores])
        if self.fault == "astray":  # it has other weights, and does not know
            self.asked = replace(self.asked, theta=self.asked.theta + 1.0)
            return super().compute(head, arrays)
        if self.fault == "odd":
            return Message(about | {"chunk": [1], "seconds": float("nan"), "first": -(10**400), "last": "x"}, [scores])
        if self.fault == "stale":
            return Message(about | {"op": "stale"}, [scores])
        assert self.fault == "error"
        raise RuntimeError("its memory is broken")
