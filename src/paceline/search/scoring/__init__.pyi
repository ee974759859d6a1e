from .byte_scores import ByteScorer as ByteScorer
from .likelihood import candidate_logprobs as candidate_logprobs
from .scorers import GivenScorer as GivenScorer
from .scorers import NamedScorer as NamedScorer
from .scorers import prompt_of as prompt_of
