"""Speech to text: audio as Whisper hears it, the rules by which it decodes, and what is made of its tokens.

Reading audio and its features, the ids and the logit rule of a checkpoint, fallback over temperatures, segments and
word times, live captions, and the formats of transcripts: functions over arrays, token ids and logits. Nothing here
runs a model, knows drafters or the engine.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
