"""What an exchange will cost, and which one to take. Pure functions of floats: equal inputs, equal plans on all ranks.

`link.py` measures a link, `cost.py` predicts one exchange, `events.py` a training step, `choice.py` decides.
`forecast.py` puts them together for `hvd-sparse plan`.
"""
