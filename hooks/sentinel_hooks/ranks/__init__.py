"""Several ranks: they meet at attach, agree at every step, and part together.

    meeting.meet(about)         all ranks, or none: a Met with a group of our own
    group.Group                 one all-reduce a step, one broadcast more with a sidecar
    agreement.Agreement         what is said in the reduce, and what all conclude from it
    parted.Parted               after the group was lost: did ranks act differently?

Nothing here uses the user's process groups or torch.distributed.new_group: a group that is made by
some ranks only would break the user's own later ones.
"""
