"""Workers of a cluster that give wrong answers: some that cannot be right, and some that lie."""

from collections.abc import Callable, Sequence
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


class Liar(Follower):
    """A worker that gives honest answers at first, and then the scores that one of its ways to lie makes of them."""

    def __init__(self, fleet: Local, lie: "Lie", honest: int = 12) -> None:
        super().__init__(fleet)
        self.lie, self.honest, self.count, self.earlier = lie, honest, 0, b""

    def compute(self, head: Head, arrays: Sequence[bytes]) -> Message:
        answer = super().compute(head, arrays)
        self.count += 1
        if self.count <= self.honest or answer.head["op"] != "answer":
            self.earlier = b"".join(answer.arrays) or self.earlier
            return answer
        return self.lie(self, head, answer)


Lie = Callable[[Liar, Head, Message], Message]


def lie_always(liar: Liar, head: Head, answer: Message) -> Message:
    """Return scores that are a little better than the right ones."""
    return Message(answer.head, [(np.frombuffer(answer.arrays[0], np.float32) * 1.01).tobytes()])


def lie_when_unchecked(liar: Liar, head: Head, answer: Message) -> Message:
    """Lie where nothing in the message says that the answer is going to be checked."""
    return answer if head.get("check") else lie_always(liar, head, answer)


def omit_fields(liar: Liar, head: Head, answer: Message) -> Message:
    """Lie, and leave out all by which an answer could be checked."""
    needed = {name: answer.head[name] for name in ("op", "job", "chunk", "seconds")}
    return lie_always(liar, head, Message(needed, answer.arrays))


def copy_answers(liar: Liar, head: Head, answer: Message) -> Message:
    """Compute nothing: return scores that were right for another chunk, cut or repeated to the right number."""
    size = len(answer.arrays[0])
    return Message(answer.head, [(liar.earlier * (size // len(liar.earlier) + 1))[:size]])


LIES: tuple[Lie, ...] = (lie_always, lie_when_unchecked, omit_fields, copy_answers)
GARBAGE = ("nan", "garbage", "short", "old", "astray", "odd", "stale", "error")  # the faults of a rogue
