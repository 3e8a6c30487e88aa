"""Scores the generations of a run again, in one process, and compares them with its journal.

    python benchmarks/rescore.py RUN [--first 0] [--last N]

A run is the fold of its scores. If the scores of every generation are those that one process computes with the weights
of that generation, then the run is that of one process, whichever worker has computed it. Unlike a second training,
parts of a run can be checked at the same time. RUN must be of one of Germline's own recipes.
"""

import argparse
import sys
from pathlib import Path

from germline.cli.options import AgainOptions
from germline.engine import opening
from germline.engine.journal import Journal
from germline.engine.replay import replay
from germline.fleet import Local


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the directory of the run")
    parser.add_argument("--first", type=int, default=0, help="the first generation to score (default 0)")
    parser.add_argument("--last", type=int, default=None, help="one past the last (default: all)")
    options = parser.parse_args()
    journal = Journal.open(options.run, read_only=True)
    recipe = AgainOptions().build_recipe(journal.header, str(options.run))
    session = opening.rebuild(recipe, journal, Local("cpu", 1))
    replay(session, until=options.first)
    last, different = options.last or journal.length(), []
    for record in journal.records():
        result = record.result
        if options.first <= result.generation < last:
            scores = session.evaluate(result.generation, session.batch(result.generation)).scores
            if scores.tobytes() != result.scores.tobytes():
                different.append(result.generation)
            session.tell(result)
            session.generation += 1
    print(f"generations {options.first} to {last - 1}: {len(different)} have other scores {different[:5]}")
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
