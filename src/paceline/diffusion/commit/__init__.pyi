from .learned import BlockFilter as BlockFilter
