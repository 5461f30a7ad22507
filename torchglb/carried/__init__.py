"""The loss and its derivatives at fixed points, brought forward row by row.

At a fixed point every derivative of the loss is a sum over observations, so a new observation adds
one term to each and no pass over the history is needed: :class:`CarriedLoss`.
"""

from torchglb.carried.carried_loss import CarriedLoss

__all__ = ["CarriedLoss"]
