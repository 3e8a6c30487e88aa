"""The sweeps by which the recipes' settings were chosen: each is a ``germline sweep``, and can be resumed.

    python benchmarks/sweeps.py [NAME ...] [--device D] [--jobs N] [--runs DIR]

Sweeps of ``mnist-mlp`` have about the same cost, population x batch x steps x hidden units, in every row, so that they
show what two cores can do best in a given time; a GPU only runs them sooner. Settings are chosen by the dev set.
"""

import argparse
import subprocess
import sys
from pathlib import Path

COMMON = ("--seeds", "1")
CORES = ("mnist-mlp", "--set", "recipe.machine=cores")
UNET = ("unet-nuclei", "--metric", "dev_dice")
SWEEPS: dict[str, tuple[str, ...]] = {
    # sigma and learning rate of a net with one hidden layer, by 512 members
    "mlp-sigma": (
        *CORES, "--set", "recipe.hidden=256", "--set", "recipe.batch_size=256", "--set", "recipe.steps=8000",
        "--set", "sigma=0.01,0.02,0.05,0.1", "--set", "lr=linear(0.005, 0, 8000),linear(0.01, 0, 8000)",
        "--generations", "8000", "--metric", "dev_accuracy",
    ),
    # the same work as many members or as many examples
    "mlp-wide": (
        *CORES, "--set", "recipe.hidden=128", "--set", "recipe.steps=8500", "--set", "population=512",
        "--set", "recipe.batch_size=512", "--set", "weight_decay=0,0.1", "--set", "shaping=ranks,zscore",
        "--generations", "8500", "--metric", "dev_accuracy",
    ),
    "mlp-batch": (
        *CORES, "--set", "recipe.hidden=128", "--set", "recipe.steps=8500", "--set", "population=256",
        "--set", "recipe.batch_size=1024", "--generations", "8500", "--metric", "dev_accuracy",
    ),
    "mlp-narrow": (
        *CORES, "--set", "recipe.hidden=64", "--set", "recipe.steps=17000",
        "--generations", "17000", "--metric", "dev_accuracy",
    ),
    "unet": (
        *UNET, "--set", "population=64,128", "--set", "recipe.batch_size=8,16", "--set", "sigma=0.02,0.05",
        "--set", "lr=0.03,linear(0.04, 0, 2000)", "--generations", "2000",
    ),
    # the same number of pixels in squares of other sizes
    "unet-squares": (
        *UNET, "--set", "recipe.crop=64", "--set", "recipe.batch_size=16", "--set", "recipe.steps=1500",
        "--set", "rank=none,4", "--generations", "1500",
    ),
    "unet-small-squares": (
        *UNET, "--set", "recipe.crop=32", "--set", "recipe.batch_size=64", "--set", "recipe.steps=1500",
        "--generations", "1500",
    ),
    # strategies that have no learning rate, on the same net
    "unet-pso": (
        *UNET, "--strategy", "pso", "--set", "sigma=0.1,0.3", "--set", "topology=global,ring",
        "--set", "decay=0.9,0.7", "--generations", "120",
    ),
    "unet-pso-memory": (
        *UNET, "--strategy", "pso", "--set", "sigma=0.02,0.05,0.1", "--set", "decay=0.95,0.98",
        "--generations", "120",
    ),
    "unet-ga": (
        *UNET, "--strategy", "ga", "--set", "sigma=0.01,0.02,0.04", "--set", "parents=8,16",
        "--generations", "120",
    ),
    "unet-mu-lambda": (
        *UNET, "--strategy", "mu-lambda", "--set", "sigma=0.03,0.1", "--set", "plus=true,false",
        "--set", "parents=8,16", "--generations", "120",
    ),
    # for a GPU
    "conv": (
        "mnist-conv", "--set", "recipe.steps=1300", "--set", "weight_decay=0,0.1", "--set", "sigma=0.02,0.05",
        "--set", "lr=linear(0.01, 0, 1300),linear(0.02, 0, 1300)", "--generations", "1300", "--metric", "dev_accuracy",
    ),
    "conv-narrow": (
        "mnist-conv", "--set", "recipe.width=8", "--set", "recipe.steps=3000", "--set", "sigma=0.01,0.02",
        "--set", "lr=linear(0.005, 0, 3000),linear(0.01, 0, 3000),linear(0.02, 0, 3000)",
        "--generations", "3000", "--metric", "dev_accuracy",
    ),
    "threshold": (
        "threshold-digits", "--set", "sigma=0.1,0.2,0.3", "--set", "lr=0.03,0.05,0.1",
        "--generations", "570", "--metric", "dev_accuracy",
    ),
    "temperature-pso": (
        "lstm-temperature", "--strategy", "pso", "--set", "sigma=0.02,0.05,0.1", "--set", "decay=0.9,0.98",
        "--seconds", "30", "--metric", "dev_mse",
    ),
    "etth1-pso": (
        "lstm-etth1", "--strategy", "pso", "--set", "recipe.horizon=1", "--set", "sigma=0.02,0.05,0.1",
        "--set", "decay=0.9,0.98", "--seconds", "30", "--metric", "dev_mse",
    ),
    "etth1": (
        "lstm-etth1", "--set", "sigma=0.02,0.05", "--set", "lr=0.003,0.01",
        "--generations", "400", "--metric", "dev_mse",
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"sweeps to run (default: all of {', '.join(SWEEPS)})")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time (default 1)")
    parser.add_argument("--runs", type=Path, default=Path("runs/sweeps"), help="the folder of the runs")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in SWEEPS]
    if unknown:
        parser.error(f"there is no sweep {unknown[0]!r}: choose one of {', '.join(SWEEPS)}")
    for name in arguments.names or SWEEPS:
        where = ["--device", arguments.device, "--jobs", str(arguments.jobs), "--runs", str(arguments.runs)]
        print(f"{name}: germline sweep {' '.join(SWEEPS[name])}", flush=True)
        words = ["sweep", *SWEEPS[name], *COMMON, *where, "--name", name]
        subprocess.run([sys.executable, "-m", "germline", *words], check=True)


if __name__ == "__main__":
    main()
