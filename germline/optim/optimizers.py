"""Element-wise optimizers and an exponential with a written order of operations: the same bits on CPU and CUDA.

Only operations whose result IEEE 754 fixes are used, each as its own step: ``+ - *`` of tensors and of scalars that fit
the tensor's type, tensor / tensor, comparisons, conversions, and a correctly rounded square root (on the CPU torch's is
not). Scalars are computed in Python's float64 and rounded once. Every function works on any span of columns.

All optimizers have ``init(theta)``, which returns their ``Moments`` before the first step, and ``step(theta, gradient,
moments, rate)``, which returns theta and the moments after a step with the learning rate ``rate``.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from germline.kernels import kernel_device, kernels_for
from germline.noise import round_to


@dataclass(frozen=True)
class Moments:
    """The moments are what an optimizer remembers between steps; tensors have one element per parameter."""

    first: torch.Tensor | None = None
    second: torch.Tensor | None = None
    power1: float = 1.0  # beta1^t and beta2^t, as running products
    power2: float = 1.0
    foreign: dict[str, Any] = field(default_factory=dict)  # the state of a torch.optim optimizer and its scheduler
    start: torch.Tensor | None = None  # the weights before the first step, where a decay leads back to them


@dataclass(frozen=True)
class SGD:
    """SGD is gradient descent with optional momentum and decoupled weight decay.

    theta <- theta - theta (rate decay);  m <- m momentum + g;  theta <- theta - m rate

    Args:
        momentum: 0 is plain gradient descent, which has no moments.
        weight_decay: the part of each weight that a step at a learning rate of 1 removes.
        start_decay: the part of each weight's distance from its start that such a step removes, for pretrained nets.

    >>> theta, _ = SGD().step(torch.tensor([1.0, 2.0]), torch.tensor([0.5, -1.0]), Moments(), rate=0.5)
    >>> theta.tolist()
    [0.75, 2.5]
    """

    momentum: float = 0.0
    weight_decay: float = 0.0
    start_decay: float = 0.0

    def init(self, theta: torch.Tensor) -> Moments:
        first = torch.zeros_like(theta) if self.momentum else None
        return Moments(first, start=theta.clone() if self.start_decay else None)

    def step(
        self, theta: torch.Tensor, gradient: torch.Tensor, moments: Moments, rate: float
    ) -> tuple[torch.Tensor, Moments]:
        theta = pull_back(theta, moments.start, rate * self.start_decay)
        theta = decay(theta, rate * self.weight_decay)
        if self.momentum:
            assert moments.first is not None, "momentum needs the moments that init returns"
            gradient = moments.first * round_to(self.momentum, theta.dtype) + gradient
            moments = Moments(first=gradient, start=moments.start)
        return theta - gradient * round_to(rate, theta.dtype), moments


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma, Ba 2015) has decoupled weight decay (Loshchilov, Hutter 2019).

    theta <- theta - theta (rate decay);  m <- m beta1 + g (1 - beta1);  v <- v beta2 + (g g) (1 - beta2);
    theta <- theta - (m (rate / (1 - beta1^t))) / (sqrt(v) (1 / sqrt(1 - beta2^t)) + eps)

    Args:
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the denominator.
        weight_decay: the part of each weight that a step at a learning rate of 1 removes.
        start_decay: the part of each weight's distance from its start that such a step removes, for pretrained nets.

    >>> theta = torch.zeros(2)
    >>> theta, _ = Adam().step(theta, torch.tensor([3.0, -4.0]), Adam().init(theta), rate=0.5)
    >>> [round(x, 6) for x in theta.tolist()]
    [-0.5, 0.5]
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    start_decay: float = 0.0

    def init(self, theta: torch.Tensor) -> Moments:
        start = theta.clone() if self.start_decay else None
        return Moments(first=torch.zeros_like(theta), second=torch.zeros_like(theta), start=start)

    def step(
        self, theta: torch.Tensor, gradient: torch.Tensor, moments: Moments, rate: float
    ) -> tuple[torch.Tensor, Moments]:
        assert moments.first is not None, "Adam needs the moments that init returns"
        assert moments.second is not None
        dtype = theta.dtype
        power1, power2 = moments.power1 * self.beta1, moments.power2 * self.beta2
        corrected, correction = rate / (1 - power1), 1 / math.sqrt(1 - power2)
        theta = pull_back(theta, moments.start, rate * self.start_decay)
        if kernel_device(theta.device).type == "cuda" and dtype == torch.float32:
            betas = (self.beta1, 1 - self.beta1, self.beta2, 1 - self.beta2)
            values = (rate * self.weight_decay, *betas, corrected, correction, self.eps)
            scalars = tuple(round_to(value, dtype) for value in values)
            adam = kernels_for(theta.device).adam
            theta, first, second = adam(theta, moments.first, moments.second, gradient, scalars)
            return theta, Moments(first, second, power1, power2, start=moments.start)
        theta = decay(theta, rate * self.weight_decay)
        first = moments.first * round_to(self.beta1, dtype) + gradient * round_to(1 - self.beta1, dtype)
        second = moments.second * round_to(self.beta2, dtype) + (gradient * gradient) * round_to(1 - self.beta2, dtype)
        step = first * round_to(corrected, dtype)
        scale = square_root(second) * round_to(correction, dtype) + round_to(self.eps, dtype)
        return theta - step / scale, Moments(first, second, power1, power2, start=moments.start)


@dataclass(frozen=True)
class TorchOptimizer:
    """A torch optimizer runs any ``torch.optim`` optimizer, with a scheduler of its learning rate if there is one.

    The step is torch's: its bits are those of one kind of device.

    Args:
        make: returns the optimizer of a list of parameters.
        make_scheduler: returns a learning rate scheduler of that optimizer.
        own_rate: whether the learning rate is what ``make`` sets; by default, and without a scheduler, it is the
            strategy's.

    >>> optimizer = TorchOptimizer(torch.optim.SGD)
    >>> theta, _ = optimizer.step(torch.tensor([1.0, 2.0]), torch.tensor([0.5, -1.0]), Moments(), rate=0.5)
    >>> theta.tolist()
    [0.75, 2.5]
    """

    make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
    make_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    own_rate: bool = False

    def init(self, theta: torch.Tensor) -> Moments:
        return Moments()

    def step(
        self, theta: torch.Tensor, gradient: torch.Tensor, moments: Moments, rate: float
    ) -> tuple[torch.Tensor, Moments]:
        parameter = torch.nn.Parameter(theta.clone())
        optimizer, scheduler = self._build(parameter, moments)
        if scheduler is None and not self.own_rate:
            for group in optimizer.param_groups:
                group["lr"] = rate
        parameter.grad = gradient
        optimizer.step()
        foreign = {}
        if scheduler is not None:
            scheduler.step()
            foreign["scheduler"] = scheduler.state_dict()
        return parameter.detach(), Moments(foreign=foreign | {"optimizer": optimizer.state_dict()})

    def rate(self, theta: torch.Tensor, moments: Moments) -> float | None:
        """Return the learning rate of the next step, or None where the strategy decides it."""
        if self.make_scheduler is None and not self.own_rate:
            return None
        if moments.foreign:
            return float(moments.foreign["optimizer"]["param_groups"][0]["lr"])
        optimizer, _ = self._build(torch.nn.Parameter(theta), moments)
        return float(optimizer.param_groups[0]["lr"])

    def _build(self, parameter: torch.nn.Parameter, moments: Moments) -> tuple[torch.optim.Optimizer, Any]:
        """Return the optimizer and its scheduler, in the state that the moments hold."""
        optimizer = self.make([parameter])
        scheduler = self.make_scheduler(optimizer) if self.make_scheduler else None
        if moments.foreign:
            state = copy.deepcopy(moments.foreign)  # torch keeps the state it loads and changes it in place
            optimizer.load_state_dict(state["optimizer"])
            if scheduler is not None:
                scheduler.load_state_dict(state["scheduler"])
        return optimizer, scheduler


Optimizer = SGD | Adam | TorchOptimizer


def decay(theta: torch.Tensor, amount: float) -> torch.Tensor:
    """Return theta - theta * amount."""
    return theta - theta * round_to(amount, theta.dtype) if amount else theta


def pull_back(theta: torch.Tensor, start: torch.Tensor | None, amount: float) -> torch.Tensor:
    """Return theta - (theta - start) * amount.

    >>> pull_back(torch.tensor([3.0, -1.0]), torch.tensor([1.0, 1.0]), 0.5).tolist()
    [2.0, 0.0]
    """
    return theta if start is None or not amount else theta - (theta - start) * round_to(amount, theta.dtype)


def square_root(x: torch.Tensor) -> torch.Tensor:
    """Return the square root, correctly rounded on every device; torch's is on CUDA, but not on the CPU."""
    if x.device.type == "cuda":
        return torch.sqrt(x)
    return torch.from_numpy(np.asarray(np.sqrt(x.cpu().numpy()))).to(x.device)


def exponential(x: torch.Tensor) -> torch.Tensor:
    """Return e^x by a fixed sequence of safe operations, within a few units in the last place.

    x = n ln 2 + r; 2^n is built from its bits, e^r is Taylor's polynomial by Horner's rule.

    Args:
        x: float32 or float64, clamped to where the result is a normal number.

    >>> exponential(torch.tensor([0.0, 1.0])).tolist()
    [1.0, 2.7182817459106445]
    """
    is_single = x.dtype == torch.float32
    low, high, degree = (-87.0, 88.0, 7) if is_single else (-708.0, 709.0, 13)
    # ln 2 in two parts, the first with so few bits that n times it is exact
    ln2_high, ln2_low = (
        (0.693359375, -2.12194440e-4) if is_single else (6.93147180369123816490e-01, 1.90821492927058770002e-10)
    )
    to_integer = 1.5 * 2.0**23 if is_single else 1.5 * 2.0**52  # adding it rounds to an integer
    x = torch.clamp(x, low, high)
    n = (x * round_to(1.4426950408889634, x.dtype) + to_integer) - to_integer
    r = (x - n * round_to(ln2_high, x.dtype)) - n * round_to(ln2_low, x.dtype)
    p = torch.full_like(x, round_to(1 / math.factorial(degree), x.dtype))
    for k in range(degree - 1, -1, -1):
        p = p * r + round_to(1 / math.factorial(k), x.dtype)
    bits, bias, shift = (torch.int32, 127, 23) if is_single else (torch.int64, 1023, 52)
    return p * ((n.to(bits) + bias) << shift).view(x.dtype)
