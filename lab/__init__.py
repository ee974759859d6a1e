"""The laboratory: what people run who compare Paceline with other engines and libraries, or write papers.

Run from the root of the repository, as `python -m lab peers list`. It is no part of the wheel, and imports public
names of the package only.
"""
