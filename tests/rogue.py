"""Workers that do not do what they should: python -m tests.rogue HOST:PORT FAULT [KEYS]."""

import sys
from pathlib import Path
from typing import Any

import numpy as np

from germline import worker
from germline.errors import BadInput
from germline.fleet import Local
from germline.fleet.hub import Head
from germline.recipes import make_recipe


class Rogue(worker.Follower):
    """After some honest answers, wrong ones."""

    def __init__(self, fault: str) -> None:
        super().__init__(lambda settings, seed: make_recipe("digits", settings, seed), Local("cpu", 1))
        self.fault, self.answers = fault, 0

    def job(self, head: Head, arrays: list[bytes]) -> tuple[Head, list[bytes]]:
        about, answer = super().job(head, arrays)
        self.answers += 1
        if self.answers < 5 or about["op"] != "answer":
            return about, answer
        if self.fault == "nan":
            answer = [np.full_like(np.frombuffer(answer[0], np.float32), np.nan).tobytes()]
        elif self.fault == "garbage":
            answer = [b"no scores"]
        elif self.fault == "short":
            answer = [answer[0][:-4]]
        elif self.fault == "old":
            about["task"] -= 1
        elif self.fault == "astray":  # it has other weights, and does not know
            core: Any = self.followed.core
            core.state.theta.add_(1.0)
            return super().job(head, arrays)
        elif self.fault == "odd":
            about |= {"chunk": [1], "seconds": float("nan"), "first": -(10**400), "last": "x"}
        elif self.fault == "stale":
            about["op"] = "stale"
        elif self.fault == "error":
            raise RuntimeError("its memory is broken")
        return about, answer


if __name__ == "__main__":
    keys = Path(sys.argv[3]) if len(sys.argv) > 3 else None
    try:
        worker.run(sys.argv[1], Rogue(sys.argv[2]), name=f"rogue-{sys.argv[2]}", keys=keys)
    except BadInput as error:
        print(error, file=sys.stderr)
        sys.exit(2)
