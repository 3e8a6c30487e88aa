"""Shows what a trained model predicts for examples of test or dev: classes, masks of images, or numbers."""

import base64
import html
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from germline.engine.files import write_atomically
from germline.engine.session import Session
from germline.errors import BadInput
from germline.objective import EVALUATION_BATCH, Batch, seeded_generators
from germline.population.isolation import single_threaded_torch
from germline.reporting.svg import Curve, draw_axes

FILE = "predictions.json"
CLASSES = 30  # of a confusion matrix, at most
PICTURES, POINTS = 4, 300  # images, and examples of a curve
Pixels = NDArray[np.uint8]


def write_predictions(session: Session) -> None:
    """Write the predictions of a run's model for the first examples of test, or of dev, into the run's directory."""
    split = next((name for name in ("test", "dev") if name in session.splits), None)
    if split is None or session.scorer.objective.of_model:
        return
    data = session.splits[split]
    batch = data.fetch(np.arange(min(data.length, EVALUATION_BATCH)), session.scorer.device)
    with torch.no_grad(), single_threaded_torch(), seeded_generators(0):
        output = session.model()(*batch.args, **batch.kwargs)
    content = describe_predictions(output, batch)
    if content is not None:
        write_atomically(session.path / FILE, json.dumps({"split": split, "examples": batch.size, **content}).encode())


def describe_predictions(output: Any, batch: Batch) -> dict[str, Any] | None:
    """Return predictions and what they should be, as far as a report can show them.

    >>> describe_predictions(torch.tensor([[0.1, 0.9], [0.2, 0.8]]), Batch((), {}, torch.tensor([1, 0]), 2))
    {'matrix': [[0, 1], [0, 1]]}
    """
    target = batch.target
    if not isinstance(output, Tensor) or not isinstance(target, Tensor) or output.is_complex():
        return None
    output, target = output.detach().cpu(), target.detach().cpu()
    has_classes = target.dtype == torch.int64 and target.dim() == 1 and output.dim() == 2
    if has_classes and 1 < output.shape[1] <= CLASSES and 0 <= int(target.min()) <= int(target.max()) < output.shape[1]:
        classes = output.shape[1]
        counts = torch.bincount(target * classes + output.argmax(1), minlength=classes**2)
        return {"matrix": counts.reshape(classes, classes).tolist()}
    is_number = output.is_floating_point() and target.is_floating_point() and len(output) == len(target) > 0
    if is_number and output.dim() == 4 and output.shape == target.shape and output.shape[1] == 1:
        image = next((x for x in batch.args if isinstance(x, Tensor) and x.shape[2:] == output.shape[2:]), target)
        threshold = 0.5 if float(output.min()) >= 0 and float(output.max()) <= 1 else 0.0
        parts = zip(image.cpu()[:PICTURES], target[:PICTURES], output[:PICTURES] > threshold, strict=True)
        drawn = [base64.b64encode(encode_png(draw_masks(*part))).decode() for part in parts]
        return {"pictures": drawn}
    if is_number and output.dim() in (1, 2) and target.dim() in (1, 2):
        is_series = any(isinstance(x, Tensor) and x.dim() == 3 for x in batch.args)
        width = output.shape[1] if output.dim() == 2 else 1
        expected, predicted = target.reshape(len(target), -1)[:, -width], output.reshape(len(output), -1)[:, 0]
        if is_series:
            order = torch.arange(min(POINTS, len(expected)))
        else:
            order = expected.argsort()[:: -(-len(expected) // POINTS)]
        return {"is_series": is_series, "target": expected[order].tolist(), "output": predicted[order].tolist()}
    return None


def draw_masks(image: Tensor, target: Tensor, output: Tensor) -> Pixels:
    """Return an image in gray with the target in green and the prediction in magenta: white is where they agree."""
    gray = image.float().mean(0)
    gray = (gray - gray.min()) / (gray.max() - gray.min()).clamp_min(1e-9) * 0.45
    inside, predicted = (target[0] > 0.5).float() * 0.5, output[0].float() * 0.5
    colors = torch.stack([gray + predicted, gray + inside, gray + predicted], 2)
    pixels: Pixels = (colors.clamp(0, 1) * 255).to(torch.uint8).numpy()
    return pixels


def encode_png(pixels: Pixels) -> bytes:
    """Return pixels, (height, width, 3), as a PNG file."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)  # each row without a filter
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def render_predictions(folder: Path) -> str:
    """Return the predictions in a run's directory as HTML, if there are any."""
    file = folder / FILE
    if not file.is_file() or file.is_symlink():
        return ""
    try:
        return render_content(json.loads(file.read_bytes()))
    except Exception as error:  # whatever a stranger has written there
        raise BadInput(f"{file} cannot be shown ({type(error).__name__}: {error}): copy the run again.") from error


def render_content(content: dict[str, Any]) -> str:
    """Return predictions as HTML; nothing of them becomes part of the page but numbers and text."""
    where = f"the first {content['examples']:,} examples of {html.escape(content['split'])}"
    if "matrix" in content:
        return f"<p>Confusion matrix of {where}: rows are the true classes, columns the predicted ones.</p>" + (
            render_matrix(content["matrix"])
        )
    if "pictures" in content:
        sources = [html.escape(picture) for picture in content["pictures"]]
        images = "".join(f'<img alt="masks" src="data:image/png;base64,{source}">' for source in sources)
        note = "The target is green, the prediction magenta, and white is where they agree."
        return f"<p>{note}</p><div class=pictures>{images}</div>"
    points = {name: list(enumerate(content[key])) for name, key in (("target", "target"), ("prediction", "output"))}
    order = "in their order" if content["is_series"] else "sorted by their targets"
    curves = [Curve(name, values) for name, values in points.items()]
    return f"<p>Predictions of examples of {html.escape(content['split'])}, {order}.</p>" + (
        draw_axes(curves, "example", "value", width=820)
    )


def render_matrix(matrix: list[list[int]]) -> str:
    """Return a confusion matrix as a table; the share of a row is the strength of a cell's color."""
    lines = ["<tr><th></th>" + "".join(f"<th>{label}</th>" for label in range(len(matrix))) + "<th>recall</th></tr>"]
    for label, row in enumerate(matrix):
        total = sum(row)
        cells = []
        for column, number in enumerate(row):
            color = "30,158,90" if column == label else "214,60,60"
            share = number / total if total else 0.0
            text = html.escape(str(number or ""))
            cells.append(f"<td style='background:rgba({color},{share:.2f})'>{text}</td>")
        recall = f"{row[label] / total:.3f}" if total else ""
        lines.append(f"<tr><th>{label}</th>{''.join(cells)}<td>{recall}</td></tr>")
    return f"<div class=wide><table class=matrix>{''.join(lines)}</table></div>"
