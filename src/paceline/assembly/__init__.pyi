from .build import build_parts as build_parts
from .build import check_methods as check_methods
from .controller_setup import limited as limited
from .controller_setup import split_options as split_options
from .draft_models import DraftModels as DraftModels
from .exactness import Exactness as Exactness
from .exactness import find_exactness as find_exactness
from .exactness import reject_approximate as reject_approximate
