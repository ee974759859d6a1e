"""Heads in the files of other engines: which format a folder has, what its config.json says, and what its tensors are
called; and the way back.

A module per format (`HeadFormat`), in the order in which they are tried. What is read is checked like a head of our
own: tensors that the format does not name are rejected.
"""
