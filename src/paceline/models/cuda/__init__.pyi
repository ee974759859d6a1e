from .partial_attention import CHUNK as CHUNK
