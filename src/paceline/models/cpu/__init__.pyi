from .block_packing import packer as packer
from .compilation import source_number as source_number
from .latent import compiled_latent as compiled_latent
from .matrix_unit import has_matrix_unit as has_matrix_unit
from .pages import Pages as Pages
from .processor import features as features
from .products import MatrixProduct as MatrixProduct
from .two_sided import TwoSidedAttention as TwoSidedAttention
