"""A Dask cluster that is running already: here a LocalCluster; SSHCluster and SLURMCluster are used in the same way."""

import torch
from distributed import LocalCluster
from torch import nn

import germline as gl

if __name__ == "__main__":
    x = torch.randn(2000, 8, generator=torch.Generator().manual_seed(0))
    model = gl.seeded(0, lambda: nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)))
    about = {"data": (x, x.argmax(1)), "score": gl.accuracy, "batch_size": 500, "generations": 60}
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0", security=True) as cluster:
        fleet = gl.Dask(cluster)
        result = gl.train(model, **about, strategy=gl.OpenAIES(population=128, sigma=0.1, lr=0.05), fleet=fleet)
        fleet.close()
    print(f"accuracy {gl.accuracy(result.model(x), x.argmax(1)):.3f} by the workers of a cluster")
