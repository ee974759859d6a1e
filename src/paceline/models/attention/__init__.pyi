from .tree_attention import Masks as Masks
