from .pg_td import program_of as program_of
from .superposed import NGrams as NGrams
from .voting import last_number as last_number
