from .eagle import Eagle2Drafter as Eagle2Drafter
from .eagle import Eagle3Drafter as Eagle3Drafter
from .eagle import EagleDrafter as EagleDrafter
from .feature_drafts import FeatureDrafts as FeatureDrafts
from .feature_drafts import FeatureState as FeatureState
from .tapped_states import TappedStates as TappedStates
from .tapped_states import of_pass as of_pass
from .tapped_states import of_prompt as of_prompt
