"""Tabular data scored by scikit-learn's F1, which has no gradient."""

from sklearn.datasets import load_breast_cancer
from sklearn.metrics import f1_score
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import Tensor, manual_seed, nn

import germline as gl

x, y = load_breast_cancer(return_X_y=True)
x = StandardScaler().fit_transform(x).astype("float32")
x, x_test, y, y_test = train_test_split(x, y, random_state=0)  # NumPy arrays
manual_seed(0)
model = nn.Sequential(nn.Linear(30, 8), nn.ReLU(), nn.Linear(8, 2))


def f1(output: Tensor, target: Tensor) -> float:
    return float(f1_score(target.numpy(), output.argmax(1).numpy(), average="macro"))


result = gl.train(model, data=(x, y), test=(x_test, y_test), score=f1, generations=40, strategy="snes")
print(f"test F1 {result.summary['metrics']['test_score']:.3f}")
