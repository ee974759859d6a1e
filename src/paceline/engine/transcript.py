"""The text of one output: detokenisation, stop conditions, and what of it may be shown already.

In: committed tokens with the drafter each came from. Out: how many of them stand, the text so far, pieces ready to show.
Tokens are taken one at a time, so that an output ends where plain decoding would end it. Not here: sampling.
"""
