"""The status page of a coordinator: one page that loads nothing from other sites, and the same content as JSON."""

import ipaddress
import json
import math
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any

from rich.table import Table
from rich.text import Text

from germline.engine.history import Row
from germline.engine.session import Session
from germline.engine.stopping import Stop
from germline.errors import BadInput
from germline.fleet import Cluster
from germline.fleet.cluster.backend import parse_address
from germline.fleet.cluster.crew import RemoteWorker
from germline.reporting.page import Charts, render_page
from germline.reporting.progress import format_time, time_left
from germline.reporting.report import choose_rows, is_metric

POINTS = 300  # of a curve
CONNECTIONS = 32  # at a time
PATIENCE = 10.0  # seconds for a request
SILENCE = 8.0  # seconds after which a worker that owes an answer is called silent
BODY = resources.files("germline.cli").joinpath("status.html").read_text(encoding="utf-8")


class Status:
    """A callback that serves the state of a run and its fleet as a page.

    Args:
        fleet: The fleet of the coordinator.
        recipe: The name of the recipe.
        stop: When the run will end.
    """

    can_wait = True  # several generations may be reported together, a moment later

    def __init__(self, fleet: Cluster, recipe: str, stop: Stop) -> None:
        self.fleet, self.recipe, self.stop = fleet, recipe, stop
        self.session: Session | None = None
        self.server: ThreadingHTTPServer | None = None
        self.recent: list[tuple[float, int]] = []  # when generations ended

    def __call__(self, session: Session, row: Row) -> None:
        self.session = session
        self.recent = [*self.recent[-20:], (time.monotonic(), row["generation"])]

    def snapshot(self) -> dict[str, Any]:
        """Return everything that the page shows."""
        session, fleet = self.session, self.fleet
        rows = list(session.history) if session is not None else []
        metrics = dict(session.metrics) if session is not None else {}
        generation = session.generation if session is not None else 0
        of_all = f" of {self.stop.generations}" if self.stop.generations is not None else ""
        numbers: dict[str, Any] = {"generations": f"{generation}{of_all}"}
        left = time_left(session, self.stop, 1 / self.rate()) if session is not None and self.rate() else None
        numbers |= {"left": format_time(left)} if left is not None else {}
        if rows:
            numbers |= {"best score": f"{rows[-1]['best']:.4g}", "mean score": f"{rows[-1]['mean']:.4g}"}
        numbers |= {"generations a second": f"{self.rate():.2f}"}
        numbers |= {
            name.replace("_", " "): f"{value:.4f}" for name, value in metrics.items() if name.startswith("dev_")
        }
        has_limit = self.stop.generations is not None or self.stop.seconds is not None
        return {
            "recipe": self.recipe,
            "strategy": session.strategy.name if session is not None else "",
            "run": str(session.path) if session is not None else "",
            "address": fleet.backend.address,
            "generation": generation,
            "generations_per_second": self.rate(),
            "part_done": session.part_used if session is not None and has_limit else None,
            "numbers": numbers,
            "metrics": metrics,
            "charts": draw_charts(rows),
            "workers": describe_workers(fleet),
            "turned_away": fleet.admission.refusals[-5:],
        }

    def rate(self) -> float:
        """Return the generations a second over the last 20 generations."""
        if len(self.recent) < 2:
            return 0.0
        (first, start), (last, end) = self.recent[0], self.recent[-1]
        return (end - start) / max(1e-9, last - first)

    def table(self) -> Table:
        """Return the table of workers for a terminal."""
        table = Table("worker", "device", "machine", "state", "members/s", "share", "sent", "received", box=None)
        for w in describe_workers(self.fleet):
            if w["is_gone"]:
                continue
            numbers = (f"{w['members_per_second']:.0f}", f"{100 * w['share']:.0f} %")
            traffic = (f"{w['bytes_sent']:,}", f"{w['bytes_received']:,}")
            table.add_row(*map(Text, (w["name"], w["device"], w["machine"], w["state"], *numbers, *traffic)))
        return table

    def serve(self, address: str) -> str:
        """Start to serve the page, which can only be read, and return its URL.

        Raises:
            BadInput: The address cannot be used.
        """
        host, port = parse_address(address)
        status, page = self, render_page("germline", [BODY], Charts({}))

        class Handler(BaseHTTPRequestHandler):
            timeout = PATIENCE

            def do_GET(self) -> None:
                if not is_own_name(self.headers.get("Host", ""), host):
                    self.send_error(421, "This page is not served under that name")
                    return
                if self.path == "/":
                    kind, content = "text/html; charset=utf-8", page
                elif self.path == "/status.json":
                    kind, content = "application/json", json.dumps(replace_nonfinite(status.snapshot())).encode()
                else:
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.send_header("Cache-Control", "no-store")
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *arguments: Any) -> None:
                pass

        try:
            self.server = LimitedServer((host, port), Handler)
        except OSError as error:
            message = f"The status page cannot be served at {address}: {error}. Choose another address with --status."
            raise BadInput(message) from error
        threading.Thread(target=self.server.serve_forever, name="germline-status", daemon=True).start()
        return f"http://{host}:{self.server.server_address[1]}/"

    def close(self) -> None:
        """Stop serving the page."""
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()


class LimitedServer(ThreadingHTTPServer):
    """A server that has few connections at a time, and closes others."""

    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.free = threading.BoundedSemaphore(CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self.free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: the other side has closed its connection, or was too slow."""


def is_own_name(name: str, host: str) -> bool:
    """Return whether a request's Host header may be that of this page: an address, or a name that it is served under.

    A page of another site, whose name its owner makes point to this machine, is not answered.

    >>> is_own_name("127.0.0.1:8787", "127.0.0.1"), is_own_name("evil.example:8787", "127.0.0.1")
    (True, False)
    """
    name = name.rpartition(":")[0] if name.rpartition(":")[2].isdigit() else name
    with suppress(ValueError):
        ipaddress.ip_address(name.strip("[]"))
        return True
    return name in ("localhost", host)


def draw_charts(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the charts of the page: scores, and metrics of dev once there are any."""
    charts, drawn = Charts({"generation": "generations"}), choose_rows(rows, POINTS)
    columns = {key: [row.get(key) for row in drawn] for row in drawn for key in row}
    if drawn:
        spread = [(row["mean"], row["spread"]) for row in drawn]
        ends = {"low": [mean - by for mean, by in spread], "high": [mean + by for mean, by in spread]}
        table = charts.add_table({**columns, **ends, "generation": [row["generation"] + 1 for row in drawn]})
        names = [key for key in sorted(columns) if is_metric(key) and key.startswith("dev_")]
        scores = [draw_series("mean", table, 0, band=["low", "high"]), draw_series("best", table, 1)]
        metrics = [draw_series(name, table, color) for color, name in enumerate(names)]
        drawings = {"scores": scores, "metrics": metrics}
        charts.charts = [{"title": title, "series": series} for title, series in drawings.items() if series]
    return {"axes": charts.axes, "tables": charts.tables, "charts": charts.charts}


def draw_series(column: str, table: int, color: int, **more: Any) -> dict[str, Any]:
    """Return a series of a chart along the generations."""
    return {"label": column.replace("_", " "), "y": column, "tables": {"generation": table}, "color": color, **more}


def describe_workers(fleet: Cluster) -> list[dict[str, Any]]:
    """Return what people want to know of each worker of a cluster, those that are gone included."""
    workers, generation = list(fleet.crew.workers.values()), fleet.coordinator.generation
    departed = list(fleet.admission.departed.values())
    total = sum(worker.rate for worker in workers if worker.is_useful(generation)) or 1.0
    states = [(worker, describe_state(worker, generation), False) for worker in workers]
    states += [(worker, f"left {format_time(time.monotonic() - since)} ago", True) for worker, since in departed]
    return [
        {
            "name": worker.name,
            "device": worker.about.get("device"),
            "machine": worker.about.get("machine"),
            "state": state,
            "is_gone": is_gone,
            "members_per_second": 0.0 if is_gone else fleet.block * worker.rate,
            "share": worker.rate / total if worker.is_useful(generation) and not is_gone else 0.0,
            "busy_seconds": worker.busy_seconds,
            "answers": worker.answers,
            "pieces": worker.pieces,
            "bytes_sent": worker.received,
            "bytes_received": worker.sent,
        }
        for worker, state, is_gone in states
    ]


def describe_state(worker: RemoteWorker, generation: int) -> str:
    """Return the state of a worker in a few words."""
    if worker.pending and time.monotonic() - worker.last_heard > SILENCE:
        return "silent"
    if not worker.is_useful(generation):
        return "too slow to be of use" if any(worker.rates.values()) else "new"
    return "follows by records" if worker.has_whole_state else "is sent weights"


def replace_nonfinite(value: Any) -> Any:
    """Return nested dicts and lists with None for NaN and infinities, which JSON has no numbers for."""
    if isinstance(value, dict):
        return {key: replace_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [replace_nonfinite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
