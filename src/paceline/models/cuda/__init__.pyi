from .partial_attention import CHUNK as CHUNK
from .partial_attention import by_kernel as by_kernel
from .partial_attention import far as far
from .partial_attention import kernel_agrees as kernel_agrees
from .partial_attention import merged as merged
