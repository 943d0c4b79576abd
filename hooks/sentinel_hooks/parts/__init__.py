"""The parts of a session, each with state of its own; session.py is the step that they serve.

    assembly.Parts              all of them, in the order in which they need each other
    turns.Turns                 which optimizers have stepped, which forwards were seen
    agreeing.Alone, .Together   what is observed and who decides: one process, or all ranks as one
    open_step.OpenStep          a step from its decision to its outcome
    late_reads.LateReads        reads="late": the device decides, and is heard one step later
    between.Between             what is due at the safe point, and done there
    pausing.PauseFile           a file pauses automation
    chronicle.Chronicle         everybody who is told what became of the run
    switch.Switch               on, asleep or off; where a failing part ends
    blind_spots.BlindSpots      what is not seen
    registry.Registry           the sessions of this process; crashing.Ending: how training ends

None of them knows the session, but as a Host (saving.py): the engine's state, and what moves it.
"""
