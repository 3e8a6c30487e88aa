"""Run directories from strangers: nothing in them is executed, and each ends in a sentence, at once.

``FINDINGS`` names the tests of what else was found under attack, which lie next to what they need.
"""

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forgery import forge, make_run
from safetensors.torch import save_file
from typer.testing import CliRunner

import germline as gl
from germline.cli.app import app
from germline.engine.journal import END, Journal
from germline.engine.opening import open_for_replay
from germline.engine.replay import replay, verify
from germline.fleet.cluster.messages import decode_gradient
from germline.machine import product_mode

RECIPE = """
from pathlib import Path
import torch
from torch import nn
import germline as gl

Path("executed").touch()

def recipe(*, seed=0):
    x = torch.linspace(-1, 1, 240).reshape(48, 5)
    model = gl.seeded(seed, lambda: nn.Linear(5, 3))
    return gl.Recipe(model, (x, x[:, :3].argmax(1)), loss=nn.functional.cross_entropy, generations=2,
                     strategy=gl.Gradient())
"""


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hostile") / "run"
    make_run(path)
    return path


@pytest.fixture
def run(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of a run, in the working directory."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(original, tmp_path / "run")
    return Path("run")


FINDINGS = {
    "workers lie, omit checksums, or copy answers": "test_liars.py::test_a_liar_is_turned_away_and_the_result_is_the",
    "a liar is audited when it leaves": "test_liars.py::test_a_liar_that_leaves_is_audited_before_it_is_forgotten",
    "a liar becomes slow, or fails": "test_liars.py::test_a_liar_whose_answers_are_not_used_any_more_is_audited",
    "audits are foreseen": "test_liars.py::test_audits_are_drawn_as_promised",
    "half-open connections end a coordinator": "test_door.py::test_a_flood_of_connections_does_not_end_a_run",
    "half of a handshake": "test_door.py::test_a_stranger_that_begins_to_speak_and_stops_is_turned_away",
    "the scheduler dies": "test_cluster_processes.py::test_a_fault_does_not_change_the_weights",
    "descriptors are exhausted": "test_door.py::test_descriptors_that_are_exhausted_are_waited_out",
    "the status page": "test_door.py::test_the_status_page_answers_to_its_own_names_and_few_connections",
    "control characters from workers": "test_door.py::test_text_of_workers_cannot_change_a_terminal",
    "serve without keys": "test_door.py::test_serve_makes_keys_and_says_where_they_are",
    "certificates and folders": "test_door.py::test_keys_are_private_whatever_the_umask_is_and_expire",
    "revoked names": "test_door.py::test_a_machine_whose_key_is_revoked_is_turned_away_without_a_restart",
    "files in the working directory": "test_door.py::test_a_file_in_the_working_directory_is_not_run_by_workers",
    "reports of a stranger's run": "test_hostile_reports.py::test_a_report_escapes_what_a_stranger_wrote",
    "types of arguments, and nothing is written before they are checked": "test_arguments.py::test_train",
    "types of settings": "test_arguments.py::test_strategy",
    "types of recipes": "test_arguments.py::test_recipe",
    "types of fleets": "test_arguments.py::test_fleets",
    "generations=nan, maximize='x'": "test_arguments.py::test_sentences",
    "integers of NumPy": "test_arguments.py::test_numbers_of_numpy_are_accepted_and_become_those_of_python",
    "inference mode": "test_arguments.py::test_a_module_made_in_inference_mode_is_refused_before_the_run",
    "NaN losses": "test_arguments.py::test_losses_that_are_nan_are_reported",
    "NaN weights": "test_arguments.py::test_weights_that_are_nan_are_refused",
    "memory of a replay": "test_journal.py::test_the_memory_of_a_replay_does_not_grow_with_the_run",
    "memory of a history": "test_runs.py::test_a_long_history_is_on_disk_and_not_in_memory",
}


@pytest.mark.parametrize("finding", FINDINGS)
def test_every_finding_has_its_test(finding: str) -> None:
    file, _, name = FINDINGS[finding].partition("::")
    assert f"def {name}" in (Path(__file__).parent / file).read_text()


def call(*words: str) -> tuple[int, str]:
    """Run a command; return its exit code and what it says, which must not be a traceback."""
    result = CliRunner().invoke(app, list(words))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stderr


COMMANDS = [
    ("verify", "run"),
    ("replay", "run", "--generation", "1", "--export", "w.safetensors"),
    ("resume", "run", "--generations", "9"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
@pytest.mark.parametrize("strategy", ["openai-es", "gradient"])
def test_a_recipe_that_a_header_names_is_not_called(command: tuple[str, ...], strategy: str, run: Path) -> None:
    classes = {
        "openai-es": "germline.strategies.openai_es:OpenAIES",
        "gradient": "germline.strategies.gradient:Gradient",
    }
    settings = {"command": "touch executed"}
    names = {"recipe": "os:system", "recipe_settings": settings, "strategy": strategy}
    forge(run, lambda header: header.update(names | {"strategy_class": classes[strategy], "settings": {}}))
    for given in ((), ("--trust",), ("--recipe", "os:system")):
        code, error = call(*command, *given)
        assert code == 2
        if command[0] == "resume" or strategy == "gradient":  # else the journal alone is read
            said = "does not say that it returns a recipe" if given else "give it again, with --recipe, or add --trust"
            assert said in error
        assert not Path("executed").exists()
        Path("w.safetensors").unlink(missing_ok=True)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
def test_a_strategy_that_a_header_names_is_not_imported(command: tuple[str, ...], run: Path) -> None:
    Path("evil.py").write_text("from pathlib import Path\nPath('executed').touch()\nclass Thing: pass\n")
    sys.modules.pop("evil", None)
    forge(run, lambda header: header.update(strategy="evil", strategy_class="evil:Thing", recipe="digits"))
    code, error = call(*command)
    assert (code, Path("executed").exists()) == (2, False)
    assert "evil:Thing, which is not part of germline: give it again" in error
    code, error = call(*command, "--trust")
    assert (code, Path("executed").exists()) == (2, True)  # the user has asked for it
    assert "note: --trust loads the strategy 'evil:Thing'" in error
    assert "is not a strategy" in error


def test_workers_of_a_resumed_run_do_not_load_what_its_header_names(run: Path) -> None:
    """They were started with the recipe of the header before anything was refused."""
    Path("evil.py").write_text("from pathlib import Path\nPath('executed').touch()\n")
    forge(run, lambda header: header.update(recipe=str(Path("evil.py").resolve())))
    code, error = call("resume", "run", "--fleet", "elastic", "--workers", "1", "--generations", "9")
    assert code == 2
    assert "give it again, with --recipe, or add --trust" in error
    assert not Path("executed").exists()


def test_a_trusted_run_goes_on_and_its_recipe_is_shown_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own_recipe.py").write_text(RECIPE)
    assert call("train", "own_recipe.py", "--name", "run")[0] == 0
    Path("executed").unlink()
    code, error = call("verify", "runs/run")
    assert (code, Path("executed").exists()) == (2, False)
    assert str(Path("own_recipe.py").resolve()) in error
    code, error = call("verify", "runs/run", "--trust")
    assert code == 0, error
    assert f"note: --trust loads the recipe {str(Path('own_recipe.py').resolve())!r}" in error
    assert Path("executed").exists()


def test_a_function_that_is_no_recipe_is_not_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("os:system", "shutil:rmtree", "builtins:exec", "subprocess:Popen"):
        code, error = call("train", name)
        assert code == 2
        assert "does not say that it returns a recipe" in error or "There is no function" in error


def test_an_optimizer_that_a_header_names_is_one_of_torch(run: Path) -> None:
    for name in ("torch.lr_scheduler", "torch.__init__", "os.system", "torch.Optimizer", ""):
        forge(run, lambda header, name=name: header["settings"].update(optimizer=name))  # type: ignore[misc]
        code, error = call("verify", "run")
        assert (code, "optimizer" in error) == (2, True), error


def endless(name: str, columns: str) -> list[str]:
    rows = f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT {columns} FROM n"
    return [f"DROP TABLE {name}", f"CREATE VIEW {name} AS {rows}"]


STATEMENTS = {
    "header is a view that never ends": endless("header", "'{}' AS json, x'00' AS chain"),
    "records are a view that never ends": endless(
        "record", "i AS generation, x'' AS scores, '{}' AS schedule_values, '' AS theta, x'' AS chain, '{}' AS info, 1"
    ),
    "tip is a view that never ends": endless("tip", "0 AS id, i AS generation, x'00' AS chain"),
    "a trigger": ["CREATE TRIGGER t AFTER INSERT ON record BEGIN DELETE FROM record; END"],
    "an index": ["CREATE INDEX i ON record (theta)"],
    "another table": ["CREATE TABLE more (id)"],
    "no header": ["DELETE FROM header"],
    "no tables": [f"DROP TABLE {name}" for name in ("header", "record", "outcome", "tip")],
    "a header of bytes": ["UPDATE header SET json = x'ff'"],
    "a header that is not JSON": ["UPDATE header SET json = 'x'"],
}


@pytest.mark.parametrize("what", STATEMENTS)
def test_a_hostile_sqlite_file_gets_a_sentence(what: str, run: Path) -> None:
    connection = sqlite3.connect(run / "journal.sqlite")
    for statement in STATEMENTS[what]:
        connection.execute(statement)
    connection.commit()
    connection.close()
    for command in (*COMMANDS, ("report", "run")):
        code, error = call(*command)
        assert code == 2, command
        assert "journal.sqlite of run is not a journal" in error or "header of run is damaged" in error
    assert not Journal.header_matches(run, {})


def nest(depth: int) -> str:
    return "[" * depth + "]" * depth


HEADERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a layout of a trillion parameters": lambda h: h.update(layout=[["w", [10**12], "torch.float32", []]]),
    "a layout of a huge number": lambda h: h.update(layout=[["w", [10**400], "torch.float32", []]]),
    "a negative shape": lambda h: h.update(layout=[["w", [-3], "torch.float32", []]]),
    "an empty layout": lambda h: h.update(layout=[]),
    "a layout of numbers": lambda h: h.update(layout=[1, 2]),
    "a type that is none": lambda h: h.update(layout=[["w", [3], "torch.nn", []]]),
    "JSON nested too deeply": lambda h: f'{{"format": {nest(100_000)}}}',
    "a list": lambda h: "[]",
    "a seed that is a text": lambda h: h.update(seed="x"),
    "a seed beyond 64 bits": lambda h: h.update(seed=1 << 70),
    "a population of a trillion": lambda h: h["settings"].update(population=10**12),
    "a population that is a text": lambda h: h["settings"].update(population="x"),
    "an unknown setting": lambda h: h["settings"].update(nonsense=1),
    "a setting that is NaN": lambda h: h["settings"].update(weight_decay=float("nan")),
    "a strategy that is a number": lambda h: h.update(strategy=1),
    "another format": lambda h: h.update(format=3),
    "no initial weights": lambda h: h.update(initial_theta_sha256="0" * 64),
    "another class": lambda h: h.update(strategy_class="germline.strategies.pso:PSO"),
}


@pytest.mark.parametrize("what", HEADERS)
def test_a_hostile_header_gets_a_sentence(what: str, run: Path) -> None:
    forge(run, HEADERS[what])
    for command in COMMANDS:
        code, error = call(*command)
        assert code == 2, command
        assert error.startswith("error: ")
    code, error = call("report", "run")  # it shows what a header says, and computes nothing by it
    assert code == 0 or error.startswith("error: ")


def test_a_header_without_a_key_gets_a_sentence(original: Path, tmp_path: Path) -> None:
    journal = Journal.open(original, read_only=True)
    journal.close()
    for name in set(journal.header) - {"fixed_norms", "products"}:
        shutil.copytree(original, tmp_path / "copy")
        forge(tmp_path / "copy", lambda content, name=name: content.pop(name) and None)  # type: ignore[misc]
        with pytest.raises(gl.BadInput, match=r"format|has no valid"):
            verify(open_for_replay(Journal.open(tmp_path / "copy")))
        shutil.rmtree(tmp_path / "copy")


RECORDS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "fewer scores": lambda r: r.update(scores=r["scores"][:12]),
    "no scores": lambda r: r.update(scores=b""),
    "half a score": lambda r: r.update(scores=r["scores"][:-1]),
    "no values": lambda r: r.update(schedule_values="{}"),
    "values that are texts": lambda r: r.update(schedule_values='{"sigma": "x", "lr": []}'),
    "a sigma of zero": lambda r: r.update(schedule_values='{"sigma": 0, "lr": 0.1}'),
    "values that are a list": lambda r: r.update(schedule_values="[]"),
    "values nested too deeply": lambda r: r.update(schedule_values=f'{{"sigma": {nest(100_000)}}}'),
    "no times": lambda r: r.update(info="{}"),
    "times that are texts": lambda r: r.update(info='{"seconds": "x", "samples": 1, "bytes": [0, 0]}'),
    "metrics that are texts": lambda r: r.update(
        info='{"seconds": 1, "samples": 1, "bytes": [0, 0], "metrics": {"dev_loss": "<script>"}}'
    ),
}


@pytest.mark.parametrize("what", RECORDS)
def test_a_hostile_record_gets_a_sentence(what: str, run: Path) -> None:
    forge(run, record=RECORDS[what])
    with pytest.raises(gl.BadInput, match="run"):
        replay(open_for_replay(Journal.open(run)))
    code, error = call("report", "run")
    assert code == 0 or error.startswith("error: ")


SNAPSHOTS: dict[str, Callable[[Path], Any]] = {
    "a pickle": lambda file: torch.save({"theta": torch.zeros(3)}, file),
    "an empty file": lambda file: file.write_bytes(b""),
    "a header of exabytes": lambda file: file.write_bytes((1 << 62).to_bytes(8, "little") + b"{}"),
    "no metadata": lambda file: save_file({"theta": torch.zeros(39)}, file),
    "a tree nested too deeply": lambda file: save_file(
        {"theta": torch.zeros(39)}, file, {"tree": nest(100_000), "sha256": "", "chain": ""}
    ),
    "a pipe": lambda file: file.unlink() or os.mkfifo(file),  # type: ignore[func-returns-value]
    "a folder": lambda file: file.unlink() or file.mkdir(),  # type: ignore[func-returns-value]
}


@pytest.mark.parametrize("what", SNAPSHOTS)
def test_a_hostile_snapshot_gets_a_sentence(what: str, run: Path) -> None:
    expected = verify(open_for_replay(Journal.open(run)))["theta_sha256"]
    SNAPSHOTS[what](run / "snapshots" / "00000004.safetensors")
    session = open_for_replay(Journal.open(run))
    replay(session, until=6)  # from the snapshot before
    assert gl.genome.theta_sha256(session.state.theta) == expected
    (run / "snapshots" / "00000006.safetensors").unlink()
    SNAPSHOTS[what](run / "snapshots" / "00000000.safetensors")
    with pytest.raises(gl.BadInput, match="run"):
        replay(open_for_replay(Journal.open(run)), until=2)


def test_odd_file_names_do_no_harm(run: Path) -> None:
    for name in ("²", "00000001x", "-1", "\N{ARABIC-INDIC DIGIT ONE}", "9" * 200, " 3"):
        (run / "snapshots" / f"{name}.safetensors").write_bytes(b"")
    code, error = call("verify", "run")
    assert code == 2
    assert "but 9999" in error  # a snapshot of a generation that is not in the journal
    (run / "snapshots" / f"{'9' * 200}.safetensors").unlink()
    assert call("verify", "run")[0] == 0
    odd = Path("what?#%41 \x1b[31m;'\n")
    run.rename(odd)
    assert call("verify", str(odd))[0] == 0
    (odd / "journal.sqlite").unlink()
    code, error = call("verify", str(odd))
    assert (code, "\x1b" in error) == (2, False)
    code, error = call("verify", b"\xff".decode(errors="surrogateescape"))
    assert (code, "is not valid UTF-8" in error) == (2, True)


@pytest.mark.parametrize("kind", ["pipe", "link", "device"])
@pytest.mark.parametrize("name", ["journal.sqlite", "journal.sqlite-wal", "journal.sqlite-journal", END, "snapshots"])
def test_a_file_that_is_a_pipe_or_a_link_gets_a_sentence(name: str, kind: str, run: Path) -> None:
    """A pipe never ends, nor does a device; what is written to a link would be written to another file."""
    file, other = run / name, Path("other")
    if file.exists():
        file.rename(other)
    else:
        other.write_text("precious")
    if kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero" if kind == "device" else other.resolve())
    for command in (*COMMANDS, ("report", "run")):
        code, error = call(*command)
        assert (code, "is no plain file of a run" in error or "is not a run" in error) == (2, True), error
    assert not Journal.header_matches(run, {})


def test_a_journal_copied_without_its_write_ahead_log_is_noticed(tmp_path: Path) -> None:
    from tests.test_journal import start

    session = start(tmp_path / "run")
    for _ in range(8):
        session.step()
    assert (tmp_path / "run" / "journal.sqlite-wal").stat().st_size  # the run goes on, or was killed
    shutil.copytree(tmp_path / "run", tmp_path / "whole")
    shutil.copytree(tmp_path / "run", tmp_path / "part", ignore=shutil.ignore_patterns("*-wal", "*-shm"))
    assert verify(open_for_replay(Journal.open(tmp_path / "whole")))["generations"] == 8
    with pytest.raises(gl.BadInput, match=r"but 8 were written: copy the run again, with journal\.sqlite-wal"):
        verify(open_for_replay(Journal.open(tmp_path / "part")))


def test_a_snapshot_beyond_the_end_of_the_journal_is_noticed(run: Path) -> None:
    shutil.copy(run / "snapshots" / "00000004.safetensors", run / "snapshots" / "00000011.safetensors")
    code, error = call("verify", "run")
    assert (code, "has 6 generations, but 11 were written" in error) == (2, True)


def test_a_gradient_of_another_length_is_refused() -> None:
    like = torch.zeros(40)
    assert torch.equal(decode_gradient(bytes(160), "float32", like), like)
    for length in (156, 164, 4):
        with pytest.raises(RuntimeError):
            decode_gradient(bytes(length), "float32", like)


def test_every_forged_run_that_is_right_still_replays(run: Path, original: Path) -> None:
    """Otherwise the tests above would pass for a forgery that is always refused."""
    forge(run)
    hashes = [verify(open_for_replay(Journal.open(path)))["theta_sha256"] for path in (run, original)]
    assert hashes[0] == hashes[1]


PRODUCT = "import torch\ntorch.ones(8, 8) @ torch.ones(8, 8)\n"
TRAIN = """
import sys
from pathlib import Path
import torch
from torch import nn
import germline as gl
from germline.machine import product_mode
x = torch.randn(64, 33, generator=torch.Generator().manual_seed(0))
model = gl.seeded(0, lambda: nn.Sequential(nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, 3)))
place = {"resume" if Path(sys.argv[1]).exists() else "run": sys.argv[1]}
result = gl.train(model, (x, x[:, :3].argmax(1)), loss=nn.functional.cross_entropy, batch_size=16,
                  strategy=gl.Gradient(), generations=int(sys.argv[2]), **place)
print(product_mode(), result.header["products"], result.summary["theta_sha256"])
"""


def run_script(script: str, *words: str, **variables: str) -> tuple[str, str]:
    environment = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"} | variables
    command = [sys.executable, "-c", script, *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    return done.stdout.strip(), done.stderr.strip().rpartition("\n")[2]


@pytest.mark.slow
@pytest.mark.skipif(product_mode() is None, reason="torch has no MKL here")
def test_a_product_before_the_import_is_recorded_and_named_as_the_cause(tmp_path: Path) -> None:
    """Backprop has other last bits then; such a run could not be resumed, and nothing said why."""
    run = str(tmp_path / "run")
    assert run_script(TRAIN, str(tmp_path / "auto"), "12")[0].startswith("AUTO AUTO ")
    straight, _ = run_script(PRODUCT + TRAIN, str(tmp_path / "straight"), "12")
    assert straight.startswith("OFF OFF ")
    run_script(PRODUCT + TRAIN, run, "6")
    (tmp_path / "run" / "snapshots" / "00000006.safetensors").unlink()
    shutil.copytree(run, tmp_path / "copy")
    output, error = run_script(TRAIN, run, "12")
    if not output:  # the bits differ on this processor
        assert "its matrix products are in MKL's mode OFF, those of this process in AUTO" in error
        assert "a matrix product came before import germline there: set MKL_CBWR=''" in error
    again, error = run_script(TRAIN, str(tmp_path / "copy"), "12", MKL_CBWR="")
    assert again == straight, error


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "5", "WORLD_SIZE": "2"}, "does not hold for RANK=5, WORLD_SIZE=2"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK must be a whole number of at least 0, not 'x'"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK must be a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "does not hold for RANK=0, WORLD_SIZE=0"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "x"}, "MASTER_PORT must be a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK=3"),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK=2"),
        ({"SLURM_PROCID": "9", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4"}, "SLURM_PROCID=9"),
    ],
)
def test_wrong_ranks_get_a_sentence(variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", **variables}.items():
        monkeypatch.setenv(name, value)
    code, error = call("train", "digits", "--fleet", "spmd")
    assert (code, message in error) == (2, True), error


def test_two_unnamed_runs_at_once_get_two_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    inner: list[Any] = []

    def train(**more: Any) -> gl.Result:
        model = torch.nn.Linear(2, 1)
        return gl.train(model, objective=lambda net: net.bias.item() ** 2, generations=1, **more)

    create = Journal.create

    def create_late(*arguments: Any, **more: Any) -> Journal:
        monkeypatch.setattr(Journal, "create", create)
        inner.append(train())  # a run that starts after this one has chosen its name, and before it has taken it
        return create(*arguments, **more)

    monkeypatch.setattr(Journal, "create", create_late)
    outer = train()
    assert [str(inner[0].run), str(outer.run)] == ["runs/linear", "runs/linear-2"]
    assert outer.summary["run"] == "runs/linear-2"
    with pytest.raises(gl.BadInput, match="exists already"):
        train(run="runs/linear")
