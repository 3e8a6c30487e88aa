"""Compare strategies and sweep a setting in Python: every run is a journal, and one report shows all of them."""

import torch
from torch import nn

import germline as gl
from germline.reporting.report import read_run, write_report

x = torch.randn(1000, 8, generator=torch.Generator().manual_seed(0))
data, dev = ((x[part], x[part].argmax(1)) for part in (slice(0, 800), slice(800, None)))
strategies = {f"openai-es sigma {sigma}": gl.OpenAIES(population=64, sigma=sigma) for sigma in (0.03, 0.1, 0.3)}
strategies |= {"snes": gl.SNES(population=64), "ga": gl.GA(population=64)}

results = {}
for name, strategy in strategies.items():
    model = gl.seeded(0, lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)))
    results[name] = gl.train(
        model, data, dev=dev, score=gl.accuracy, strategy=strategy, generations=100, run=f"runs/{name}"
    )
accuracies = {name: result.summary["metrics"]["dev_accuracy"] for name, result in results.items()}
write_report([read_run(result.run) for result in results.values()], results["ga"].run.parent / "report.html")
best = max(accuracies, key=accuracies.__getitem__)
print(f"dev accuracy {accuracies[best]:.3f} by {best}; all are in runs/report.html")
