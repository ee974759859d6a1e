from .base import NO_TENANT as NO_TENANT
from .base import Ahead as Ahead
from .base import Context as Context
from .base import DraftedToken as DraftedToken
from .base import Drafter as Drafter
from .base import DrafterArgs as DrafterArgs
from .base import Models as Models
