"""Periodic averaging: ranks train alone for a while, then average their models.

`round.py` is what ranks say to each other, `averager.py` a whole round of one rank, `trigger.py` when it is due,
`outer.py` what becomes of the mean, `settings.py` what the user may ask for. No framework and no network: the fronts
bring both.
"""
