"""The status page of a coordinator: one page that loads nothing from other sites, and the same content as JSON."""

import json
import math
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rich.table import Table
from rich.text import Text

from germline.engine.history import Row
from germline.engine.session import Session
from germline.engine.stopping import Stop
from germline.errors import BadInput
from germline.fleet import Elastic
from germline.fleet.cluster.messages import parse_address

POINTS = 500  # of a curve
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>germline</title>
<meta name="viewport" content="width=device-width"><style>
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem;color:#222;background:#fff}
h1{font-size:1.3rem;margin:0}table{border-collapse:collapse;width:100%;margin-top:1rem}
th,td{text-align:left;padding:.3rem .6rem;border-bottom:1px solid #ddd;font-variant-numeric:tabular-nums}
td.n,th.n{text-align:right}.quiet{color:#666}svg{width:100%;height:14rem;margin-top:1rem;background:#f7f7f7}
.away{color:#a00}#numbers{display:flex;flex-wrap:wrap;gap:1.5rem;margin-top:.6rem}
#numbers b{display:block;font-size:1.2rem}
@media (prefers-color-scheme:dark){body{color:#ddd;background:#181818}svg{background:#222}th,td{border-color:#444}}
</style><h1 id="title">germline</h1><div class="quiet" id="state">connecting ...</div><div id="numbers"></div>
<svg id="curve" viewBox="0 0 1000 240" preserveAspectRatio="none" role="img" aria-label="scores by generation"></svg>
<table><thead><tr><th>worker<th>device<th>machine<th>state<th class="n">members/s<th class="n">share<th class="n">sent
<th class="n">received</tr></thead><tbody id="workers"></tbody></table><ul class="away" id="away"></ul><script>
const put=(id,text)=>document.getElementById(id).textContent=text;
const bytes=n=>n<1e4?n+" B":n<1e7?(n/1e3).toFixed(0)+" kB":(n/1e6).toFixed(0)+" MB";
const cell=(row,text,number)=>{const c=row.insertCell();c.textContent=text;if(number)c.className="n"};
function line(points,key,color,low,high){const n=points.length;if(n<2)return"";const path=points.map((p,i)=>{
const y=230-220*(p[key]-low)/((high-low)||1);return(i?"L":"M")+(1000*i/(n-1)).toFixed(1)+" "+y.toFixed(1)}).join("");
return`<path d="${path}" fill="none" stroke="${color}" stroke-width="2" vector-effect="non-scaling-stroke"/>`}
async function look(){try{const s=await(await fetch("status.json",{cache:"no-store"})).json();
put("title",s.recipe+" by "+s.strategy);document.title=s.generation+" · "+s.recipe;
put("state",s.run+" · "+(s.workers.length?s.workers.length+" workers":"waiting for workers at "+s.address));
const numbers=document.getElementById("numbers");numbers.replaceChildren();
for(const[name,value]of Object.entries(s.numbers)){const d=document.createElement("div"),b=document.createElement("b");
b.textContent=value;d.append(b,name);numbers.append(d)}
const good=s.curve.filter(p=>Number.isFinite(p.best)&&Number.isFinite(p.mean)),all=good.flatMap(p=>[p.best,p.mean]);
const low=Math.min(...all),high=Math.max(...all);document.getElementById("curve").innerHTML=
line(good,"mean","#888",low,high)+line(good,"best","#27c",low,high);
const body=document.getElementById("workers");body.replaceChildren();for(const w of s.workers){const r=body.insertRow();
cell(r,w.name);cell(r,w.device);cell(r,w.machine);cell(r,w.state);cell(r,w.members_per_second.toFixed(0),1);
cell(r,(100*w.share).toFixed(0)+" %",1);cell(r,bytes(w.bytes_sent),1);cell(r,bytes(w.bytes_received),1)}
const away=document.getElementById("away");away.replaceChildren();for(const t of s.turned_away){
const li=document.createElement("li");li.textContent="turned away: "+t;away.append(li)}
}catch(e){put("state","the coordinator does not answer: it has ended, or is being started again")}}
look();setInterval(look,1000);</script></html>"""


class Status:
    """A callback that serves the state of a run and its fleet as a page.

    Args:
        fleet: The fleet of the coordinator.
        recipe: The name of the recipe.
        stop: When the run will end.
    """

    can_wait = True  # several generations may be reported together, a moment later

    def __init__(self, fleet: Elastic, recipe: str, stop: Stop) -> None:
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
        step = -(-len(rows) // POINTS) or 1
        metrics = dict(session.metrics) if session is not None else {}
        generation = session.generation if session is not None else 0
        numbers: dict[str, Any] = {"generations": generation}
        if rows:
            numbers |= {"best score": f"{rows[-1]['best']:.4g}", "mean score": f"{rows[-1]['mean']:.4g}"}
        numbers |= {"generations a second": f"{self.rate():.2f}"}
        numbers |= {name.replace("_", " "): f"{value:.4f}" for name, value in metrics.items() if "accuracy" in name}
        return {
            "recipe": self.recipe,
            "strategy": session.strategy.name if session is not None else "",
            "run": str(session.path) if session is not None else "",
            "address": fleet.hub.address,
            "generation": generation,
            "generations_per_second": self.rate(),
            "numbers": numbers,
            "metrics": metrics,
            "curve": [{key: row[key] for key in ("generation", "best", "mean")} for row in rows[::step]],
            "workers": fleet.describe_workers(),
            "turned_away": fleet.hub.refusals[-5:],
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
        for w in self.fleet.describe_workers():
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
        status = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                pages = {"/": ("text/html; charset=utf-8", PAGE), "/status.json": ("application/json", None)}
                if self.path not in pages:
                    self.send_error(404)
                    return
                kind, text = pages[self.path]
                content = (text or json.dumps(replace_nonfinite(status.snapshot()))).encode()
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.send_header("Cache-Control", "no-store")
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *arguments: Any) -> None:
                pass

        try:
            self.server = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            message = f"The status page cannot be served at {address}: {error}. Choose another address with --status."
            raise BadInput(message) from error
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, name="germline-status", daemon=True).start()
        return f"http://{host}:{self.server.server_address[1]}/"

    def close(self) -> None:
        """Stop serving the page."""
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()


def replace_nonfinite(value: Any) -> Any:
    """Return nested dicts and lists with None for NaN and infinities, which JSON has no numbers for."""
    if isinstance(value, dict):
        return {key: replace_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [replace_nonfinite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
