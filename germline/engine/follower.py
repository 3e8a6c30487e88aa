"""A session as a worker of a cluster has it: it follows a run from afar, and computes the chunks that it is given.

Its State comes from records, which it folds as a replay does, or is sent to it.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
from torch import Tensor

from germline.engine.drivers import CHECK_SIGMA, TrainMembers, gradient_strategy, member_strategy
from germline.engine.header import recipe_for_run
from germline.engine.opening import rebuild_from_header
from germline.engine.session import Session
from germline.errors import BadInput
from germline.fleet.cluster import messages
from germline.fleet.cluster.backend import Head, Message
from germline.fleet.executor import time_update
from germline.fleet.gradients import encode_rows
from germline.fleet.local import Local
from germline.fleet.protocol import TrainedMember, scores_of
from germline.genome import theta_sha256
from germline.objective import Batch
from germline.population import Plan
from germline.recipes import Recipe
from germline.strategies import AnyStrategy, GenerationResult, unpack

NEVER = 1e9  # seconds of a record that a worker cannot fold


@dataclass
class Follower:
    """The run as a worker knows it.

    Attributes:
        fleet: The device and the threads of this worker.
        run: The name of the run; None before the coordinator has said it.
        version: The version of the State; None if it is not known.
        has_whole_state: Whether the State has all its fields, and not only what candidates are made of.
        asked: The State that the version means: that of the session, or one that includes the next gradient.
        gradient: That gradient.
        given_batch: The number of the batch that was sent last, and the batch, where batches are sent.
        trained: The members that were trained in the last two generations, by generation and number.
    """

    fleet: Local
    followed: Session | None = None
    run: str | None = None
    version: str | None = None
    has_whole_state: bool = False
    asked: Any = None
    gradient: Tensor | None = None
    given_batch: tuple[int, Batch] | None = None
    trained: dict[tuple[int, int], TrainedMember] = field(default_factory=dict)

    @property
    def session(self) -> Session:
        if self.followed is None:
            raise BadInput("this worker has not been told which run it follows")
        return self.followed

    def join(self, run: str, header: dict[str, Any], recipe: Recipe, given: AnyStrategy | None) -> Message:
        """Build the run that a coordinator trains, and prove that it is the same by the scores of a sample.

        Args:
            run: The name of the run.
            header: Its header.
            recipe: Its recipe, as this worker has it.
            given: The strategy that this worker was given, if it is not part of this package.
        """
        if self.run != run:
            recipe = recipe_for_run(recipe, header, given)
            session = self.followed = rebuild_from_header(recipe, header, self.fleet, "the coordinator's run")
            if theta_sha256(session.read_theta()) != header["initial_theta_sha256"]:
                raise BadInput("its initial weights are not those of the run: give both the same recipe and versions")
            self.run, self.trained = run, {}
            self.set_state("0", session.state, is_whole=True)
            self.given_batch = None if header["data"] else self.given_batch
        session, batch = self.session, self.batch(0)
        session.scorer.try_module(batch)
        session.scorer.adopt(Plan(**header["plan"]))
        sample = session.score_sample(batch)
        about = {"run": run, "version": self.version, "whole": self.has_whole_state, "tell": self.measure_tell()}
        return Message({"op": "ready", **about}, [sample.tobytes()])

    def set_state(self, version: str | None, state: Any, *, is_whole: bool) -> None:
        """Have a State, of which no gradient is known yet."""
        self.session.state = self.asked = state
        self.version, self.has_whole_state, self.gradient = version, is_whole, None

    def batch(self, number: int) -> Batch | None:
        """Return the batch of a generation: the one that was sent, or that of the run's data."""
        if self.given_batch is not None:
            return self.given_batch[1] if self.given_batch[0] == number else None
        return self.session.batch(number)

    def measure_tell(self) -> float:
        """Return the seconds that a record takes, by trying one with made-up scores."""
        session, strategy = self.session, self.session.strategy
        if strategy.kind == "train_members":
            return NEVER
        if strategy.needs_probe:  # which these workers are going to score
            strategy = strategy.after_probe({"sigma": CHECK_SIGMA, "lr": CHECK_SIGMA})
        return time_update(strategy, session.state, session.driver.share_update(session).advance)

    def is_ready(self, head: Head) -> bool:
        """Return whether what a message builds on is there."""
        needed = head.get("version") if head["op"] == "job" else None
        if head["op"] in ("tell", "gradient"):
            return self.version is not None and self.version.rstrip("+") == str(head.get("generation"))
        return needed is None or needed == self.version

    def handle(self, message: Message) -> Message | None:
        """Do what a message asks for; return the answer, if it needs one."""
        head, arrays = message
        if head["op"] == "job":
            return self.compute(head, arrays)
        if head["op"] == "batch":
            self.given_batch = head["batch"], messages.decode_batch(head, arrays, self.fleet.find_device())
        elif head["op"] == "state":
            self.load_state(head, arrays)
        elif not self.is_ready(head):
            self.version = None  # something is missing
        elif head["op"] == "tell":
            self.fold_record(head, arrays)
        elif head["op"] == "gradient":
            self.take_gradient(head, arrays)
        return None

    def fold_record(self, head: Head, arrays: Sequence[bytes]) -> None:
        """Advance the State by the record of a generation."""
        session, scores = self.session, np.frombuffer(arrays[0], np.float32)
        gradient = self.gradient
        if head["wire"] is not None:
            gradient = messages.decode_gradient(arrays[1], head["wire"], session.state.theta)
        session.tell(GenerationResult(head["generation"], scores, head["values"], gradient))
        self.set_state(str(head["generation"] + 1), session.state, is_whole=self.has_whole_state)

    def take_gradient(self, head: Head, arrays: Sequence[bytes]) -> None:
        """Take the gradient of a generation, around which its samples are."""
        session, generation = self.session, head["generation"]
        self.gradient = messages.decode_gradient(arrays[0], head["wire"], session.state.theta)
        strategy, maximize = gradient_strategy(session), session.scorer.objective.maximize
        self.asked = strategy.with_gradient(session.state, self.gradient, generation, maximize=maximize)
        self.version = f"{generation}+"

    def load_state(self, head: Head, arrays: Sequence[bytes]) -> None:
        """Take a State that was sent, or the fields of it that candidates are made of."""
        session, self.version = self.session, None
        if hashlib.sha256(b"".join(arrays)).hexdigest() != head["sha256"]:
            return
        tensors = messages.decode_tensors(head["layout"], arrays, session.scorer.device)
        items = head["tree"]["items"]  # other fields stay as they were, and are not read
        parts = {name: unpack(getattr(session.state, name), part, tensors) for name, part in items}
        self.set_state(head["version"], replace(session.state, **parts), is_whole=head["whole"])

    def compute(self, head: Head, arrays: Sequence[bytes]) -> Message:
        """Compute one chunk of a job."""
        if not self.is_ready(head):
            return messages.answer_to(head, "stale")
        started, session = time.perf_counter(), self.session
        if head["kind"] in ("train", "rows"):
            about, answer = self.train_members(head, arrays) if head["kind"] == "train" else self.read_rows(head)
        else:
            if head["plan"] is not None:
                session.scorer.adopt(Plan(**head["plan"]))
            weights = {name: getattr(self.asked, name) for name in head["checked_fields"]}
            about = {"checksum": messages.checksum(weights)}
            answer = self.score_blocks(head) if head["kind"] == "scores" else self.differentiate(head)
        if about is None:
            return messages.answer_to(head, "stale")
        return messages.answer_to(head, "answer", answer, **about, seconds=time.perf_counter() - started)

    def score_blocks(self, head: Head) -> list[bytes]:
        """Score some blocks of the members of a generation."""
        session, share = self.session, slice(head["first"], head["last"])
        strategy = session.strategy
        batch = session.dev_batch(head["batch"]) if head["on_dev"] else self.batch(head["batch"])
        candidates = strategy.ask(self.asked, session.noise, head["address"], head["values"])
        evaluator = session.scorer.evaluator
        session.scorer.normalize(head.get("observations", ()))
        scores = self.fleet.executor.score_blocks(evaluator, candidates, strategy.population, batch, share)
        return [scores.astype(np.float32).tobytes()]

    def differentiate(self, head: Head) -> list[bytes]:
        """Compute the gradients of some slices of a batch."""
        session, batch = self.session, self.batch(head["batch"])
        assert batch is not None
        evaluator, theta = session.scorer.gradient_evaluator, self.asked.theta
        parts = batch.split(evaluator.plan.slices)[head["first"] : head["last"]]
        scores, rows = self.fleet.executor.gradients(evaluator, theta, parts, batch.size)
        return [scores.tobytes(), encode_rows(rows, gradient_strategy(session).wire).cpu().numpy().tobytes()]

    def train_members(self, head: Head, arrays: Sequence[bytes]) -> tuple[Head | None, list[bytes]]:
        """Train some members, which are sent or made of those of the last generation; keep them, return scores."""
        session, generation, numbers = self.session, head["generation"], range(head["first"], head["last"])
        strategy, sent = member_strategy(session), [n for n in numbers if n not in head["made"]]
        templates = [strategy.moments(session.state, 0)] * len(sent)
        try:
            given = messages.decode_members(arrays[1:], templates, session.state.theta)
            starts = dict(zip(sent, given, strict=True))
            starts |= {n: self.make_member(n, generation, arrays[0]) for n in head["made"]}
        except KeyError:  # it does not have them
            return None, []
        train = cast(TrainMembers, session.driver).make_trainer(session, head["batch"], head["values"])

        def work(place: int) -> TrainedMember:
            start = starts[numbers[place]]
            return train(numbers[place], start.theta.clone(), start.moments)

        about = {"checksum": sum(messages.checksum(starts[n]) for n in numbers)}
        trained = self.fleet.executor.run(work, len(numbers), session.scorer.device)
        self.trained |= {(generation, n): member for n, member in zip(numbers, trained, strict=True)}
        self.trained = {key: member for key, member in self.trained.items() if key[0] >= generation - 1}
        return about, [scores_of(trained).tobytes()]

    def make_member(self, number: int, generation: int, scores: bytes) -> TrainedMember:
        """Return a member of a generation, made of those that this worker has trained in the one before."""
        session, strategy, before = self.session, member_strategy(self.session), generation - 1
        result = GenerationResult(before, np.frombuffer(scores, np.float32), {})
        selection = strategy.select(session.state, result, session.noise, maximize=session.scorer.objective.maximize)

        def row(member: int, array: str = "members") -> Tensor:
            one = self.trained[before, member]
            value: Tensor = one.theta if array == "members" else getattr(one.moments, array)
            return value

        rows = set() if selection is None else strategy.rows_needed(selection, range(number, number + 1))
        source = self.trained[before, min((member for member, _ in rows), default=number)]
        state = strategy.with_members(session.state.theta, source.theta[None])
        state = strategy.after_training(state, [source.theta], [source.moments])
        if rows:
            members = range(number, number + 1)
            state = strategy.apply_selection(state, selection, members, row, session.noise, before)
        return TrainedMember(state.members[0], strategy.moments(state, 0), 0.0)

    def read_rows(self, head: Head) -> tuple[Head | None, list[bytes]]:
        """Return members that were trained here."""
        members = [self.trained.get((head["generation"], number)) for number in head["members"]]
        present = [member for member in members if member is not None]
        if len(present) < len(members):
            return None, []
        has_moments = bool(member_strategy(self.session).row_arrays)
        return {}, messages.encode_members(present, with_moments=has_moments)
