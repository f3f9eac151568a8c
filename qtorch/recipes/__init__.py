"""Recipes for inference, in files by family. `recipes.base` has `Recipe` and the registry.

A recipe is added by registering it in a file of this package; its public name is added here, and so in `qtorch`.
"""

from .codebook import LUTWeightOnly as lut_weight_only
from .codebook import NF4WeightOnly as nf4_weight_only
from .float8 import Float8DynamicActivationFloat8Weight as float8_dynamic_activation_float8_weight
from .float8 import Float8DynamicActivationInt4Weight as float8_dynamic_activation_int4_weight
from .float8 import Float8WeightOnly as float8_weight_only
from .float8 import FpxWeightOnly as fpx_weight_only
from .gguf import GgufIQ4_NL as gguf_iq4_nl
from .gguf import GgufQ2_K as gguf_q2_k
from .gguf import GgufQ3_K as gguf_q3_k
from .gguf import GgufQ4_0 as gguf_q4_0
from .gguf import GgufQ4_1 as gguf_q4_1
from .gguf import GgufQ4_K as gguf_q4_k
from .gguf import GgufQ5_0 as gguf_q5_0
from .gguf import GgufQ5_1 as gguf_q5_1
from .gguf import GgufQ5_K as gguf_q5_k
from .gguf import GgufQ6_K as gguf_q6_k
from .gguf import GgufQ8_0 as gguf_q8_0
from .integer import Int4WeightOnly as int4_weight_only
from .integer import Int8DynamicActivationInt4Weight as int8_dynamic_activation_int4_weight
from .integer import Int8DynamicActivationInt8Weight as int8_dynamic_activation_int8_weight
from .integer import Int8WeightOnly as int8_weight_only
from .integer import IntxWeightOnly as intx_weight_only
from .integer import UIntxWeightOnly as uintx_weight_only
from .low_rank import LowRank as low_rank
from .mx import Mxfp4DynamicActivationMxfp4Weight as mxfp4_dynamic_activation_mxfp4_weight
from .mx import Mxfp4WeightOnly as mxfp4_weight_only
from .mx import Mxfp6WeightOnly as mxfp6_weight_only
from .mx import Mxfp8DynamicActivationMxfp8Weight as mxfp8_dynamic_activation_mxfp8_weight
from .mx import Mxfp8WeightOnly as mxfp8_weight_only
from .mx import Nvfp4DynamicActivationNvfp4Weight as nvfp4_dynamic_activation_nvfp4_weight
from .mx import Nvfp4WeightOnly as nvfp4_weight_only
from .sparse import BlockSparse as block_sparse
from .sparse import Float8DynamicActivationFloat8SemiSparseWeight as float8_dynamic_activation_float8_semi_sparse_weight
from .sparse import Int8DynamicActivationInt8SemiSparseWeight as int8_dynamic_activation_int8_semi_sparse_weight
from .static import Float8StaticActivationFloat8Weight as float8_static_activation_float8_weight
from .static import Int8StaticActivationInt8Weight as int8_static_activation_int8_weight
from .codebook import VectorCodebookWeightOnly as vector_codebook_weight_only

__all__ = [
    "block_sparse", "float8_dynamic_activation_float8_semi_sparse_weight", "float8_dynamic_activation_float8_weight",
    "float8_dynamic_activation_int4_weight", "float8_static_activation_float8_weight", "float8_weight_only",
    "fpx_weight_only", "gguf_iq4_nl", "gguf_q2_k", "gguf_q3_k", "gguf_q4_0", "gguf_q4_1", "gguf_q4_k", "gguf_q5_0",
    "gguf_q5_1", "gguf_q5_k", "gguf_q6_k", "gguf_q8_0", "int4_weight_only", "int8_dynamic_activation_int4_weight",
    "int8_dynamic_activation_int8_semi_sparse_weight", "int8_dynamic_activation_int8_weight",
    "int8_static_activation_int8_weight", "int8_weight_only", "intx_weight_only", "low_rank", "lut_weight_only",
    "mxfp4_dynamic_activation_mxfp4_weight", "mxfp4_weight_only", "mxfp6_weight_only",
    "mxfp8_dynamic_activation_mxfp8_weight", "mxfp8_weight_only", "nf4_weight_only",
    "nvfp4_dynamic_activation_nvfp4_weight", "nvfp4_weight_only", "uintx_weight_only", "vector_codebook_weight_only",
]  # fmt: skip
