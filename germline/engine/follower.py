"""A session as a worker of a cluster has it: it follows a run from afar, and computes the chunks that it is given.

Its State comes from records, which it folds as a replay does, or is sent to it.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from germline.engine.drivers import TrainMembers, gradient_strategy, member_strategy
from germline.engine.header import recipe_for_run
from germline.engine.opening import rebuild_from_header
from germline.engine.session import Session
from germline.errors import BadInput
from germline.fleet.cluster import messages
from germline.fleet.cluster.elastic import decode_members, encode_members
from germline.fleet.cluster.messages import Head, Message, answer_to
from germline.fleet.executor import time_update
from germline.fleet.gradients import encode_rows
from germline.fleet.local import Local
from germline.fleet.protocol import TrainedMember
from germline.genome import theta_sha256
from germline.objective import Batch
from germline.population import Plan
from germline.recipes import RECIPES, Recipe
from germline.strategies import AnyStrategy, GenerationResult, unpack

NEVER = 1e9  # seconds of a record that a worker cannot fold

MakeRecipe = Callable[[dict[str, str], int], Recipe]  # of a recipe's settings and a seed


@dataclass
class Follower:
    """The run as a worker knows it.

    Attributes:
        make_recipe: Makes the recipe from the settings and the seed of the run.
        fleet: The device and the threads of this worker.
        recipe: The name of the recipe that this worker was given.
        strategy: The strategy that this worker was given, if it is not part of this package.
        run: The name of the run; None before the coordinator has said it.
        version: The version of the State; None if it is not known.
        has_whole_state: Whether the State has all its fields, and not only what candidates are made of.
        given_batch: The number of the batch that was sent last, and the batch, where batches are sent.
        newest: The latest generation that was mentioned; work for older ones is not needed any more.
    """

    make_recipe: MakeRecipe
    fleet: Local
    recipe: str | None = None
    strategy: AnyStrategy | None = None
    followed: Session | None = None
    run: str | None = None
    version: str | None = None
    has_whole_state: bool = False
    given_batch: tuple[int, Batch] | None = None
    newest: int = 0

    @property
    def session(self) -> Session:
        if self.followed is None:
            raise BadInput("this worker has not been told which run it follows")
        return self.followed

    def join(self, run: str, header: dict[str, Any]) -> Message:
        """Build the run that a coordinator trains, and prove that it is the same by the scores of a sample."""
        names = {self.recipe, header["recipe"]}
        if len(names) > 1 and names <= set(RECIPES):  # a file may have another path here
            raise BadInput(f"the coordinator trains {header['recipe']}, and this worker was given {self.recipe}")
        if self.run != run:
            recipe = recipe_for_run(self.make_recipe(header["recipe_settings"], header["seed"]), header, self.strategy)
            self.followed = rebuild_from_header(recipe, header, self.fleet, "the coordinator's run")
            self.run, self.version, self.has_whole_state = run, "0", True
            self.given_batch = None if header["data"] else self.given_batch
        self.newest = 0
        session = self.session
        if theta_sha256(session.read_theta()) != header["initial_theta_sha256"]:
            raise BadInput("its initial weights are not those of the run: give both the same recipe and versions")
        session.scorer.adopt(Plan(**header["plan"]))
        sample = session.score_sample(self.batch(0))
        about = {"version": self.version, "whole": self.has_whole_state, "tell": self.measure_tell()}
        return Message({"op": "ready", **about}, [sample.tobytes()])

    def batch(self, number: int) -> Batch | None:
        """Return the batch of a generation: the one that was sent, or that of the run's data."""
        if self.given_batch is not None:
            return self.given_batch[1] if self.given_batch[0] == number else None
        return self.session.batch(number)

    def measure_tell(self) -> float:
        """Return the seconds that a record takes, by trying one with made-up scores."""
        session = self.session
        if session.strategy.kind != "evolve":
            return NEVER
        return time_update(session.strategy, session.state, session.driver.share_update(session).advance)

    def handle(self, message: Message) -> Message | None:
        """Do what a message asks for; return the answer, if it needs one."""
        head, arrays = message
        if head["op"] == "tell":
            self.fold_records(head["records"], arrays)
        elif head["op"] == "state":
            self.load_state(head, arrays)
        elif head["op"] == "batch":
            self.given_batch = head["batch"], messages.decode_batch(head, arrays, self.fleet.find_device())
        elif head["op"] == "job":
            return self.compute(head, arrays)
        return None

    def fold_records(self, records: list[Any], arrays: Sequence[bytes]) -> None:
        """Advance the State by records; if one is missing, the version becomes unknown."""
        for (generation, values), scores in zip(records, arrays, strict=True):
            if self.version != str(generation):
                self.version = None
                return
            self.session.tell(GenerationResult(generation, np.frombuffer(scores, np.float32), values))
            self.version = str(generation + 1)

    def load_state(self, head: Head, arrays: Sequence[bytes]) -> None:
        """Take a State that was sent, or the fields of it that candidates are made of."""
        session, self.version = self.session, None
        if hashlib.sha256(b"".join(arrays)).hexdigest() != head["sha256"]:
            return
        tensors = messages.decode_tensors(head["layout"], arrays, session.scorer.device)
        if head["whole"]:
            session.state = unpack(session.state, head["tree"], tensors)
        else:  # the other fields stay as they were, and are not read
            names, plain = {name.split(".")[0] for name in tensors}, messages.plain_items(head["tree"])
            items = [item for item in head["tree"]["items"] if item[0] in names or item in plain]
            parts = {name: unpack(getattr(session.state, name), part, tensors) for name, part in items}
            session.state = replace(session.state, **parts)
        self.version, self.has_whole_state = head["version"], head["whole"]

    def compute(self, head: Head, arrays: Sequence[bytes]) -> Message:
        """Compute one chunk of a job."""
        if head["generation"] < self.newest:
            return answer_to(head, "dropped")
        if head["version"] != self.version:
            return answer_to(head, "stale")
        session = self.session
        if head["plan"] is not None:
            session.scorer.adopt(Plan(**head["plan"]))
        started = time.perf_counter()
        about: Head = {"checksum": messages.checksum(head["checked_fields"], session.state)}
        work = {"scores": self.score_blocks, "gradient": self.differentiate, "train": self.train_members}
        answer = work[head["kind"]](head, arrays)
        about["seconds"] = time.perf_counter() - started
        if head["check"]:
            about["theta"] = theta_sha256(session.state.theta)
        return answer_to(head, "answer", answer, **about)

    def score_blocks(self, head: Head, arrays: Sequence[bytes]) -> list[bytes]:
        """Score some blocks of the members of a generation."""
        session, share = self.session, slice(head["first"], head["last"])
        strategy = session.strategy
        batch = session.dev_batch(head["batch"]) if head["on_dev"] else self.batch(head["batch"])
        candidates = strategy.ask(session.state, session.noise, head["address"], head["values"])
        evaluator = session.scorer.evaluator
        scores = self.fleet.executor.score_blocks(evaluator, candidates, strategy.population, batch, share)
        return [scores.astype(np.float32).tobytes()]

    def differentiate(self, head: Head, arrays: Sequence[bytes]) -> list[bytes]:
        """Compute the gradients of some slices of a batch."""
        session, batch = self.session, self.batch(head["batch"])
        assert batch is not None
        evaluator, theta = session.scorer.gradient_evaluator, session.state.theta
        parts = batch.split(evaluator.plan.slices)[head["first"] : head["last"]]
        scores, rows = self.fleet.executor.gradients(evaluator, theta, parts, batch.size)
        return [scores.tobytes(), encode_rows(rows, gradient_strategy(session).wire).cpu().numpy().tobytes()]

    def train_members(self, head: Head, arrays: Sequence[bytes]) -> list[bytes]:
        """Train some members, whose weights and moments come with the job."""
        session, count = self.session, head["last"] - head["first"]
        strategy, device = member_strategy(session), session.scorer.device
        train = cast(TrainMembers, session.driver).make_trainer(session, head["batch"], head["values"])
        templates, sends_moments = [strategy.moments(session.state, 0)] * count, bool(strategy.row_arrays)
        members = decode_members(arrays, templates, sends_moments, device)

        def work(place: int) -> TrainedMember:
            return train(head["first"] + place, members[place].theta, members[place].moments)

        trained = self.fleet.executor.run(work, count, device)
        return encode_members(trained, with_moments=sends_moments)
