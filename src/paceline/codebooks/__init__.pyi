from .books import Books as Books
from .books import write_books as write_books
from .codebook_model import CodebookModel as CodebookModel
from .codebook_model import Firing as Firing
