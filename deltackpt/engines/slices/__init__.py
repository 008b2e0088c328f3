"""A rank that holds slices of tensors: which words of its memory they are, and how its share of a part is decoded.

`mapped` makes boxes with their words of a map of the memory, `box_words` has those that lie on a card; `decoder`
decodes on the host, `card_decoder` on the card, with the tiles of `card_tiles`; `slice_step` is what comes of it.
"""
