"""Colours and signs of a figure's lines: Okabe and Ito's colours, for colour-blind readers; signs, for black and white."""

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31", "#7F7F7F")
SIGNS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "hexagon", "triangle-down")
