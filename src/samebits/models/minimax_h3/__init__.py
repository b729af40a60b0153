"""MiniMax-H3, the audio-video diffusion transformer: layouts, pinned weights, and the replay of its conditioning chain.

The modules are imported by name (``samebits.models.minimax_h3.layouts`` and so on); none of them imports diffusers except
``peer``, and that one only when it is asked for something.
"""
