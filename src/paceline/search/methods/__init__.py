"""The methods of search, one module each."""
