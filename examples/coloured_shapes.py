"""The pictures that tiny-vision knows: one coloured shape on a dark to grey background, and questions about it.

Run by examples/train_tiny_vision.py.
"""

import math
import random
from typing import Any

from PIL import Image, ImageDraw

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 170, 50),
    "blue": (40, 70, 220),
    "yellow": (240, 220, 40),
    "purple": (140, 40, 170),
    "white": (250, 250, 250),
}
CORNERS = {"circle": 60, "square": 4, "triangle": 3, "star": 10}
WORDS = (list(COLOURS), list(CORNERS))
QUESTIONS = ("What colour is the shape?", "What shape is it?")
SIDE = 96  # pixels

Picture = tuple[Image.Image, tuple[int, int]]  # with the places of its colour and its shape in WORDS
Chat = list[dict[str, Any]]


def draw(rng: random.Random, variety: float = 1.0) -> Picture:
    """One shape, nearly upright. Without variety it is large, and near the middle."""
    labels = (rng.randrange(len(WORDS[0])), rng.randrange(len(WORDS[1])))
    colour, shape, grey = WORDS[0][labels[0]], WORDS[1][labels[1]], rng.randrange(130)
    radius = SIDE * rng.uniform(0.4 - 0.18 * variety, 0.4)
    turn = rng.uniform(-0.1, 0.1) + (math.pi / 4 if shape == "square" else 0)
    x, y = (rng.uniform(radius, SIDE - radius) for _ in "xy")
    rough = [(grey, grey, grey), COLOURS[colour]]
    back, fill = (tuple(max(0, min(255, value + rng.randint(-20, 20))) for value in rgb) for rgb in rough)
    angles = [turn + math.tau * i / CORNERS[shape] for i in range(CORNERS[shape])]
    radii = [radius * (0.42 if shape == "star" and i % 2 else 1) for i in range(len(angles))]
    outline = [(x + r * math.sin(a), y - r * math.cos(a)) for r, a in zip(radii, angles, strict=True)]
    image = Image.new("RGB", (SIDE, SIDE), back)
    ImageDraw.Draw(image).polygon(outline, fill=fill)
    return image, labels


def chat(labels: tuple[int, int], kinds: tuple[int, ...]) -> Chat:
    """Questions about a picture's colour (kind 0) and shape (kind 1), each with its answer."""
    messages: Chat = []
    for kind in kinds:
        question = {"type": "text", "text": QUESTIONS[kind]}
        messages.append({"role": "user", "content": [question] if messages else [{"type": "image"}, question]})
        messages.append({"role": "assistant", "content": WORDS[kind][labels[kind]]})
    return messages
