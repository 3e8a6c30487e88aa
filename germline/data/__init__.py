"""Data sets by name: ``fetch`` finds their files, the other modules read them, one kind each."""

from germline.data.images import load_cifar10, load_digits, load_mnist, load_mnist_of_hybrid_es, make_synthetic
from germline.data.nuclei import load_nuclei, load_nuclei_arrays
from germline.data.series import load_series, make_windows
from germline.data.shapes import make_shapes
from germline.data.splits import Splits
