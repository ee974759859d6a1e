from .drafter import SuffixDrafter as SuffixDrafter
