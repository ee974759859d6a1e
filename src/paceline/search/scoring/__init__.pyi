from .byte_scores import ByteScorer as ByteScorer
from .byte_scores import ByteVocabulary as ByteVocabulary
from .likelihood import candidate_logprobs as candidate_logprobs
from .scorers import GivenScorer as GivenScorer
from .scorers import NamedScorer as NamedScorer
from .scorers import prompt_of as prompt_of
from .uni_encoder import UniEncoder as UniEncoder
from .uni_encoder import candidate_mask as candidate_mask
