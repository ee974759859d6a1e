from .cache import NativeCache as NativeCache
