"""The noise field: a function of (seed, stream, generation, member, parameter), with the same bits on every device.

Nothing is seeded and nothing advances. A slice of the field is generated where it is needed, from its address alone;
its integers are so small that sums weighted by integers are exact in any order, on any device. ``docs/design.md``
defines the field; ``kernels/reference.py`` is that definition as code.
"""

from germline.noise.addresses import (
    ADDRESS_LIMIT,
    VALUES,
    Kind,
    Matrix,
    Span,
    Stream,
    check_whole_number,
    low_rank_matrices,
)
from germline.noise.field import DIGEST_SPAN, VERSION, Field, field_digest
from germline.noise.members import Noise, recordings
from germline.noise.scaling import LiveScalars, Sigma, as_tensor, cached_tensor, round_to, scale_sigma
from germline.noise.weights import MemberWeights
