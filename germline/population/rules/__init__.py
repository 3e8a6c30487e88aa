"""Rules: how a kind of layer computes all members of a block at once. ``RULES`` is the table of them.

A layer without a rule is right, too: its own code runs under ``torch.func.vmap`` with the weights of the block. A rule
is for layers that vmap cannot do or does slowly. To add one, write a function in a file of this folder and add one line
to ``RULES``. Then add a case for each branch of the rule to ``LEAVES`` in ``tests/test_leaves.py`` (an input that all
members share and one that differs, frozen parameters, an input without examples), which compares the outputs with those
of plain copies of the layer, with dense noise and with noise of low rank; update the table of rules in
``docs/design.md``, and the changelog if scores change in their last bits.

The function is given a ``LayerCall``. Its ``inputs`` are the tensors among the layer's arguments, in their order;
``batched`` says which of them differ between members, and those have the members as their first dimension. ``module``
is the layer, with its settings. The parameters of all members, with the members first, are ``call.weights("weight")``,
or ``call.optional_weights("bias")`` where there may be none. ``call.block.size`` is the number of members, and
``call.has_shared_input`` says whether all members see the same inputs. ``call.forward_member(i)`` is the layer's own
forward for one member, and ``per_member`` the rule that loops over it. The function returns what the layer returns for
one member (a tensor, or tuples, lists and dicts of them), but with the members as the first dimension of each tensor.

Rules are looked up by the exact class of a layer when an ``Evaluator`` is built: subclasses have none. An error in a
rule makes a run fall back to vmap with a ``SlowPath`` warning that names the rule; ``Evaluator.outputs``, as below,
raises it.

A layer that multiplies its input by a weight for each feature, and its rule:

>>> import numpy as np, torch
>>> from torch import nn
>>> class Scale(nn.Module):
...     def __init__(self, size):
...         super().__init__()
...         self.weight = nn.Parameter(torch.ones(size))
...     def forward(self, x):
...         return x * self.weight
>>> def scale(call):
...     (x,) = call.inputs_of_members()  # (members, examples, size): expanded where all members see the same x
...     return x * call.weights("weight")[:, None]
>>> RULES[Scale] = Rule(scale)

Each member's output is that of a plain copy of the layer with its weights:

>>> from germline.genome import Genome
>>> from germline.objective import Batch, Objective
>>> from germline.population import Evaluator, Plan
>>> from germline.strategies import Candidates, OpenAIES
>>> net, x = Scale(3), torch.rand(5, 3)
>>> genome = Genome.from_module(net)
>>> candidates = Candidates(OpenAIES().field(seed=1, genome=genome), 0, genome.read(net), sigma=0.1)
>>> evaluator = Evaluator.build(net, genome, Objective(nn.MSELoss()), torch.device("cpu"), Plan(4, "population"))
>>> generation = evaluator.generation(candidates, Batch.from_raw((x, x)))
>>> outputs = evaluator.outputs(generation, np.arange(4))  # (4, 5, 3)
>>> torch.equal(outputs[2], x * candidates.weights(np.array([2]), 0, 3)[0])
True
>>> del RULES[Scale]

Fresh memory for large outputs often costs more than the arithmetic: compute into ``buffers.allocate(shape, like)`` by
``out=``, and where the input is shared do once what does not depend on the weights, instead of expanding the input.

Two settings of a ``Rule`` are for speed. ``applies`` is a function of the layer and its arguments by name, as one
member sees them; where it returns False, the layer's own code runs. With ``takes_epilogue=True`` a relu or a max
pooling of the output is not done by torch: the rule finds it in ``call.epilogue``, and applies it while it computes the
output, or by ``apply_epilogue``.

Layers that are linear in their weights need not generate the weights of each member: with ``blend`` they compute the
product with the center once, and add each member's noise to it. See ``linear`` and ``convolution``.
"""

from torch import nn

from germline.population.rules.attention import attends_to_itself, attention
from germline.population.rules.convolution import convolution
from germline.population.rules.embedding import embedding
from germline.population.rules.layer import Rule, per_member
from germline.population.rules.linear import linear
from germline.population.rules.norm import has_norm_kernel, layer_norm
from germline.population.rules.recurrent import cell, recurrent

__all__ = ["RULES", "Rule"]

RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: Rule(linear, takes_epilogue=True),
    nn.Embedding: Rule(embedding),
    nn.LayerNorm: Rule(layer_norm, applies=has_norm_kernel),
    nn.MultiheadAttention: Rule(attention, applies=attends_to_itself),
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), Rule(convolution, takes_epilogue=True)),
    **dict.fromkeys((nn.LSTM, nn.GRU, nn.RNN), Rule(recurrent)),
    **dict.fromkeys((nn.LSTMCell, nn.GRUCell, nn.RNNCell), Rule(cell)),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), Rule(per_member)),
    **dict.fromkeys((nn.EmbeddingBag, nn.Bilinear), Rule(per_member)),
}
