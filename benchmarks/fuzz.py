"""Mutated journals, snapshots, headers, records and messages: no crash, no hang, no wrong answer.

    python benchmarks/fuzz.py [--inputs 100000] [--seed 0] [--processes 1]

Each input is a run of six generations with one to four mutations, or a message to a worker or from one:

- ``journal``: bytes of journal.sqlite or its write-ahead log are flipped, cut, zeroed, repeated or moved. The run must
  be refused with a sentence, or replay to the true hash of as many generations as it has.
- ``snapshot``: the same of a snapshot, by a replay that starts from it.
- ``header``, ``record``: their JSON is mutated under hashes that are right again, as a forger would do. The run must be
  refused with a sentence or replay; what it replays to is what the forger says.
- ``message``: the bytes or the head of a message to a worker are mutated. The worker must not fail. If it then answers
  a job with the checksum of the right weights, the scores must be the right ones.
- ``answer``: the bytes of a worker's answer are mutated. It must be refused, or have the shape that was asked for.
- ``rank``: what another rank of an spmd fleet sends is mutated: lengths, values, layouts, and the status that comes
  with scores. It must be refused with a sentence, or be taken for what the other rank says.

Everything else is printed and counted: other exceptions, wrong hashes, inputs that twice in a row take longer than ten
seconds, and processes that die.
"""

import argparse
import json
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from forgery import forge, make_run, small_recipe

from germline.engine.follower import Follower
from germline.engine.header import build_header
from germline.engine.journal import Journal
from germline.engine.opening import open_for_replay, set_up
from germline.engine.replay import replay
from germline.errors import BadInput, MachineError
from germline.fleet import Local
from germline.fleet.cluster import messages
from germline.fleet.cluster.backend import Message
from germline.fleet.cluster.worker import Responder
from germline.fleet.spmd.collective import Collective
from germline.fleet.spmd.group import Ranks
from germline.fleet.spmd.shares import Shares
from germline.genome import theta_sha256
from germline.optim.optimizers import Moments
from germline.reporting.report import read_run, write_report
from germline.strategies import pack

GENERATIONS = 6
SLOW = 10.0  # seconds
MEMORY = 16 << 30  # bytes of addresses: a layout that takes all memory is a failure here, and does not end the machine
KINDS = {
    "journal": 5,
    "snapshot": 3,
    "header": 4,
    "record": 3,
    "message": 3,
    "answer": 2,
    "rank": 2,
}  # and how frequent they are
SPECIAL: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1.5,
    "",
    "x",
    "os:system",
    [],
    {},
    1 << 40,
    10**30,
    float("nan"),
    float("inf"),
    [[]],
    [0],
)


def mutate_bytes(content: bytes, chance: random.Random) -> bytes:
    """Return bytes with a few mutations."""
    for _ in range(chance.randint(1, 4)):
        at, length = chance.randrange(len(content) + 1), chance.choice((1, 2, 8, 100, 4096))
        kind = chance.randrange(6)
        if kind == 0 and content:
            at = min(at, len(content) - 1)
            content = content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :]
        elif kind == 1:
            content = content[:at] + (content[at + length :] if chance.random() < 0.7 else b"")
        elif kind == 2:
            content = content[:at] + bytes(min(length, len(content) - at)) + content[at + length :]
        elif kind == 3:
            content = content[: at + length] + content[at:]
        elif kind == 4:
            content = content[:at] + chance.randbytes(length) + content[at + length :]
        else:
            other = chance.randrange(len(content) + 1)
            content = content[:at] + content[other : other + length] + content[at + length :]
    return content


def mutate_json(value: Any, chance: random.Random) -> Any:
    """Return a JSON value with one mutation somewhere in it."""
    children = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    if not children or chance.random() < 0.1:
        return chance.choice(SPECIAL)
    key, kind = chance.choice(children), chance.random()
    if isinstance(value, dict):
        if kind < 0.15:
            return {name: item for name, item in value.items() if name != key}
        if kind < 0.2:
            return value | {chance.choice(("x", "", "population")): chance.choice(SPECIAL)}
        return value | {key: mutate_json(value[key], chance)}
    copy = list(value)
    if kind < 0.15:
        del copy[key]
    elif kind < 0.3:
        copy.insert(key, copy[key])
    else:
        copy[key] = mutate_json(copy[key], chance)
    return copy


class Fuzzer:
    """Makes inputs in a folder and tries them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run, self.copy = folder, folder / "run", folder / "copy"
        make_run(self.run)
        session = open_for_replay(Journal.open(self.run))
        self.hashes = []
        for generation in range(GENERATIONS + 1):
            session = open_for_replay(Journal.open(self.run))
            replay(session, until=generation, from_start=True)
            self.hashes.append(theta_sha256(session.state.theta))
        recipe = small_recipe()
        self.session = set_up(recipe, Local("cpu", 1), seed=0)
        self.session.prepare(self.session.batch(0))
        self.header = {**build_header(self.session, {}), "recipe": None}
        self.recipe = recipe

    def try_input(self, kind: str, chance: random.Random) -> str:
        """Try one input; return "refused" or "right", or raise an error."""
        attempt: Callable[[random.Random], str] = getattr(self, f"try_{kind}")
        try:
            return attempt(chance)
        except (BadInput, MachineError) as error:
            if not str(error).strip().endswith((".", ")")):
                raise AssertionError(f"not a sentence: {error}") from error
            return "refused"

    def copy_run(self) -> Path:
        shutil.rmtree(self.copy, ignore_errors=True)
        shutil.copytree(self.run, self.copy)
        return self.copy

    def replay_copy(self, *, is_forged: bool = False) -> str:
        journal = Journal.open(self.copy)
        try:
            _, _, rows, _ = run = read_run(self.copy)
            write_report([run], self.copy / "report.html")
            session = open_for_replay(journal)
            replay(session)
        finally:
            journal.close()
        digest = theta_sha256(session.state.theta)
        if not is_forged and (digest != self.hashes[session.generation] or len(rows) != session.generation):
            raise AssertionError(f"a wrong hash after {session.generation} generations")
        return "right"

    def try_journal(self, chance: random.Random) -> str:
        file = self.copy_run() / "journal.sqlite"
        if chance.random() < 0.2:  # as if the process had been killed: the log holds pages that the journal lacks
            file = self.copy / "journal.sqlite-wal"
            file.write_bytes((self.run / "journal.sqlite").read_bytes())
        file.write_bytes(mutate_bytes(file.read_bytes(), chance))
        return self.replay_copy()

    def try_snapshot(self, chance: random.Random) -> str:
        file = chance.choice(sorted((self.copy_run() / "snapshots").iterdir()))
        file.write_bytes(mutate_bytes(file.read_bytes(), chance))
        for other in (self.copy / "snapshots").iterdir():
            if other != file and other.stem != "00000000":
                other.unlink()
        return self.replay_copy()

    def try_header(self, chance: random.Random) -> str:
        forge(self.copy_run(), lambda header: mutate_json(header, chance))
        return self.replay_copy(is_forged=True)

    def try_record(self, chance: random.Random) -> str:
        place, column = chance.randrange(GENERATIONS), chance.choice(("scores", "schedule_values", "info", "theta"))

        def edit(record: dict[str, Any]) -> None:
            if record["generation"] != place:
                return
            if column == "scores":
                record["scores"] = mutate_bytes(record["scores"], chance)
            elif column == "theta":
                record["theta"] = chance.choice(("", "x", "0" * 64))
            else:
                record[column] = json.dumps(mutate_json(json.loads(record[column]), chance))

        forge(self.copy_run(), record=edit)
        return self.replay_copy(is_forged=True)

    def try_message(self, chance: random.Random) -> str:
        session = self.session
        follower = Follower(Local("cpu", 1))
        responder = Responder(fleet=follower.fleet, say=lambda text: None, make_follower=lambda fleet: follower)
        follower.join("run", self.header, self.recipe, None)
        moved = torch.linspace(-1, 1, session.state.theta.numel())
        state = type(session.state)(**{f.name: getattr(session.state, f.name) for f in fields(session.state)})
        object.__setattr__(state, "theta", moved)
        weights = messages.candidate_fields(session.strategy, state)
        sent = messages.encode_state(weights, "3", is_whole=False)
        scores = np.linspace(0, 1, session.strategy.population, dtype=np.float32)
        values = {"sigma": 0.1, "lr": 0.1}
        record = Message({"op": "tell", "generation": 0, "values": values, "wire": None}, [scores.tobytes()])
        original = chance.choice((sent, record))
        head, arrays = dict(original.head), list(original.arrays)
        if chance.random() < 0.5:
            mutated = mutate_json(head, chance)
            head = mutated | {"op": head["op"]} if isinstance(mutated, dict) else head
        else:
            arrays[0] = mutate_bytes(arrays[0], chance)
        responder.answer(Message(head | {"token": "t"}, arrays))
        version = "3" if original is sent else "1"
        job = {"op": "job", "token": "t", "job": 1, "chunk": 0, "kind": "scores", "version": version, "plan": None}
        job |= {"checked_fields": list(weights), "check": True, "first": 0, "last": 1, "batch": 0, "on_dev": False}
        answer = responder.answer(Message({**job, "address": 3, "values": values}, ()))
        assert answer is not None
        if answer.head["op"] != "answer" or original is record:
            return "refused"
        if answer.head["checksum"] != messages.checksum(weights):
            return "refused"  # by the coordinator
        candidates = session.strategy.ask(state, session.noise, 3, values)
        evaluator, population = session.scorer.evaluator, session.strategy.population
        first = session.fleet.executor.score_blocks(evaluator, candidates, population, session.batch(0), slice(0, 1))  # type: ignore[attr-defined]
        if first.astype(np.float32).tobytes() != answer.arrays[0]:
            raise AssertionError("a wrong answer with the checksum of the right weights")
        return "right"

    def try_rank(self, chance: random.Random) -> str:
        operations, state = FuzzedRank(chance), self.session.state
        root, group = (Ranks(Collective(rank, 2, operations, 1.0)) for rank in (0, 1))
        plan = {"plan": {"block": 8}, "sigma": 0.1}
        try:
            kind = chance.choice(("agree", "say", "state", "fail", "scores"))
            if kind == "agree":
                group.agree(lambda: {"seed": 3, "recipe": "digits"})
            elif kind == "say":
                root.broadcast(plan)
                operations.is_root = False
                group.broadcast(plan)
            elif kind == "state":
                root.broadcast_state(state)
                operations.is_root = False
                assert type(group.broadcast_state(state)) is type(state)
            elif kind == "fail":
                group.all_or_none(lambda: 1 // 0)
            else:
                shares = Shares((2, 2), 3)
                scores = group.share_work(shares, lambda share: np.ones(6, np.float32))
                assert scores.shape == (12,)
        except ZeroDivisionError:
            return "right"
        except (BadInput, MachineError, RuntimeError):  # a sentence, which ends this rank
            return "refused"
        return "right"

    def try_answer(self, chance: random.Random) -> str:
        like = torch.zeros(40)
        kind = chance.choice(("scores", "slices", "members", "batch", "gradient"))
        scores = np.linspace(0, 1, 8, dtype=np.float32).tobytes()
        try:
            if kind == "scores":
                assert messages.decode_scores(mutate_bytes(scores, chance), 8).shape == (8,)
            elif kind == "slices":
                rows = [mutate_bytes(scores, chance), mutate_bytes(torch.zeros(8, 40).numpy().tobytes(), chance)]
                found, gradients = messages.decode_slices(rows, 8, like, "float32")
                assert (found.shape, gradients.shape) == ((8,), (8, 160))
            elif kind == "gradient":
                assert messages.decode_gradient(mutate_bytes(bytes(160), chance), "float32", like).shape == like.shape
            elif kind == "members":
                templates = [Moments(torch.zeros(40), None)] * 2
                members = [messages.TrainedMember(like, moments, 0.5) for moments in templates]
                arrays = messages.encode_members(members, with_moments=True)
                place = chance.randrange(len(arrays))
                arrays[place] = mutate_bytes(arrays[place], chance)
                for member in messages.decode_members(arrays, templates, like):
                    assert member.theta.shape == like.shape
                    assert [array.shape for array in pack(member.moments)[1].values()] == [like.shape]
            else:
                batch = self.session.batch(0)
                assert batch is not None
                head, contents = messages.encode_batch(batch, 0)
                messages.decode_batch(mutate_json(head, chance), contents, torch.device("cpu"))
        except AssertionError:
            raise
        except Exception:  # a coordinator drops the answer and the worker, whatever the error is
            return "refused"
        return "right"


class FuzzedRank:
    """The operations of one of two ranks; one of the messages that it receives is mutated.

    What is gathered from the other rank is what this one sends. What rank 0 broadcasts, rank 1 receives later.
    """

    def __init__(self, chance: random.Random) -> None:
        self.chance, self.at = chance, chance.randrange(4)  # the message that is mutated
        self.sent: list[torch.Tensor] = []
        self.is_root = True

    def mutate(self, tensor: torch.Tensor) -> torch.Tensor:
        self.at -= 1
        content = tensor.detach().clone().contiguous().view(torch.uint8).flatten()
        if self.at == -1 and content.numel():
            mutated = mutate_bytes(content.numpy().tobytes(), self.chance)[: content.numel()]
            content = torch.frombuffer(bytearray(mutated.ljust(content.numel())), dtype=torch.uint8)
        return content.view(tensor.dtype).reshape(tensor.shape)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack([tensor, self.mutate(tensor)])

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        if self.is_root:
            self.sent.append(tensor.clone())
            return
        received = self.mutate(self.sent.pop(0))
        if (received.shape, received.dtype) != (tensor.shape, tensor.dtype):
            raise RuntimeError("the lengths of a message differ")  # as gloo says it
        tensor.copy_(received)

    def add(self, tensor: torch.Tensor) -> None: ...

    def trade(self, sent: torch.Tensor, sent_sizes: list[int], sizes: list[int]) -> torch.Tensor:
        return sent

    def beat(self, flag: torch.Tensor, root: int) -> None: ...

    def team(self, width: int) -> "FuzzedRank":
        return self


def fuzz(inputs: int, seed: int, first: int, step: int) -> Counter[str]:
    """Try every ``step``-th of some inputs; return how many of each kind were refused, right or wrong."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    torch.set_num_threads(1)
    np.seterr(all="ignore")  # the means of forged scores may overflow
    counts: Counter[str] = Counter()
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="germline-fuzz-", dir=place) as folder:
        fuzzer = Fuzzer(Path(folder))
        for number in range(first, inputs, step):
            kind, outcome = try_number(fuzzer, seed, number)
            if outcome == "slow":  # the machine may have been busy
                kind, outcome = try_number(fuzzer, seed, number)
            counts[f"{kind} {outcome}"] += 1
    return counts


def try_number(fuzzer: Fuzzer, seed: int, number: int) -> tuple[str, str]:
    """Try the input of a number; return its kind and what became of it."""
    chance = random.Random(f"{seed} {number}")
    kind = chance.choices(list(KINDS), list(KINDS.values()))[0]
    started = time.monotonic()
    try:
        outcome = fuzzer.try_input(kind, chance)
    except Exception as error:
        outcome = "wrong"
        print(f"input {number} ({kind}): {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    seconds = time.monotonic() - started
    if seconds > SLOW:
        outcome = "slow"
        print(f"input {number} ({kind}) took {seconds:.0f} s", file=sys.stderr, flush=True)
    return kind, outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000, help="number of inputs (default 100,000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the mutations (default 0)")
    parser.add_argument("--processes", type=int, default=1, help="processes that share the inputs (default 1)")
    parser.add_argument("--part", type=int, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part is not None:
        print(json.dumps(fuzz(arguments.inputs, arguments.seed, arguments.part, arguments.processes)))
        return
    started = time.monotonic()
    command = [sys.executable, __file__, "--inputs", str(arguments.inputs), "--seed", str(arguments.seed)]
    command += ["--processes", str(arguments.processes), "--part"]
    parts = range(arguments.processes)
    started_processes = [subprocess.Popen([*command, str(part)], stdout=subprocess.PIPE, text=True) for part in parts]
    counts: Counter[str] = Counter()
    crashes = 0
    for process in started_processes:
        output, _ = process.communicate()
        crashes += process.returncode != 0
        counts.update(json.loads(output) if process.returncode == 0 else {})
    for kind in KINDS:
        print(f"{kind:9}", *(f"{counts[f'{kind} {o}']:7,} {o}" for o in ("refused", "right", "wrong", "slow")))
    wrong = sum(count for name, count in counts.items() if name.endswith("wrong"))
    slow = sum(count for name, count in counts.items() if name.endswith("slow"))
    minutes = (time.monotonic() - started) / 60
    print(f"{sum(counts.values()):,} inputs in {minutes:.0f} minutes: {wrong} wrong, {slow} slow, {crashes} crashes")
    sys.exit(bool(wrong or slow or crashes))


if __name__ == "__main__":
    main()
