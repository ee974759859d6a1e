"""What Whisper's encoder reads: the log-mel spectrogram of a window of 30 s.

Each window has its own, as in training: its loudest part sets its floor, and what lies behind the audio's end is
silence. transformers computes it, with torch or with numpy alone.

Source: Robust Speech Recognition via Large-Scale Weak Supervision (arXiv:2212.04356), section 2.2.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.checkpoints import read_json
from paceline.errors import CheckpointError

Floats = npt.NDArray[np.float32]


class LogMel:
    """The features of one checkpoint; build it with `LogMel.load`.

    Args:
        extractor: transformers' WhisperFeatureExtractor.

    Attributes:
        sample_rate: of the samples that it takes, 16,000.
        samples_per_frame: 160, 10 ms.
        frames: of a window, 3,000.
        bins: of the spectrogram, 80, or 128 for large-v3.
    """

    def __init__(self, extractor: Any) -> None:
        self._extractor = extractor
        self.sample_rate, self.samples_per_frame = int(extractor.sampling_rate), int(extractor.hop_length)
        self.frames, self.bins = int(extractor.nb_max_frames), int(extractor.feature_size)

    @classmethod
    def load(cls, folder: Path) -> LogMel:
        """As `preprocessor_config.json` of a Hugging Face folder says.

        Raises:
            CheckpointError: the file is missing or is not Whisper's.
        """
        from transformers import WhisperFeatureExtractor

        path = folder / "preprocessor_config.json"
        settings = read_json(path)
        if settings.get("feature_extractor_type") != "WhisperFeatureExtractor":
            found = settings.get("feature_extractor_type", "none")
            raise CheckpointError(f"{path} must describe a WhisperFeatureExtractor, got {found}; download it again")
        return cls(WhisperFeatureExtractor.from_dict(settings))

    def frame_count(self, samples: Floats) -> int:
        """Frames of a whole audio, the last of which may be begun only; at least 1."""
        return max(1, -(-len(samples) // self.samples_per_frame))

    def window(self, samples: Floats, first_frame: int = 0) -> Floats:
        """(bins, frames) float32 of the window that begins at a frame.

        Args:
            samples: mono audio, of any length; behind its end there is silence.
            first_frame: of 10 ms.
        """
        begin = first_frame * self.samples_per_frame
        piece = samples[begin : begin + self.frames * self.samples_per_frame]
        found = self._extractor(piece, sampling_rate=self.sample_rate, return_tensors="np")
        features: Floats = found["input_features"][0].astype(np.float32, copy=False)
        return features
