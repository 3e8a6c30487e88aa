"""The noise field: a function of (seed, stream, generation, member, parameter), with the same bits on every device.

Nothing is seeded and nothing advances. A slice of the field is generated where it is needed, from its address alone;
its integers are so small that sums weighted by integers are exact in any order, on any device. ``docs/design.md``
defines the field; ``kernels/reference.py`` is that definition as code.
"""

from germline.noise.addresses import ADDRESS_LIMIT as ADDRESS_LIMIT
from germline.noise.addresses import VALUES as VALUES
from germline.noise.addresses import Kind as Kind
from germline.noise.addresses import Matrix as Matrix
from germline.noise.addresses import Span as Span
from germline.noise.addresses import Stream as Stream
from germline.noise.addresses import check_whole_number as check_whole_number
from germline.noise.addresses import low_rank_matrices as low_rank_matrices
from germline.noise.field import DIGEST_SPAN as DIGEST_SPAN
from germline.noise.field import VERSION as VERSION
from germline.noise.field import Field as Field
from germline.noise.field import field_digest as field_digest
from germline.noise.members import Noise as Noise
from germline.noise.members import recordings as recordings
from germline.noise.scaling import LiveScalars as LiveScalars
from germline.noise.scaling import Sigma as Sigma
from germline.noise.scaling import as_tensor as as_tensor
from germline.noise.scaling import cached_tensor as cached_tensor
from germline.noise.scaling import round_to as round_to
from germline.noise.scaling import scale_sigma as scale_sigma
