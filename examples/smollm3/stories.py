"""Short stories in plain words, made by rule: something to train a small model on where there is no network.

python examples/smollm3/stories.py stories          2,000 of them, into stories/*.jsonl
"""

import json
import random
import sys
from pathlib import Path

NAMES = ["Ana", "Ben", "Chidi", "Dora", "Emil", "Fatou", "Goro", "Hana", "Ines", "Juan", "Kofi", "Lena"]
ANIMALS = ["cat", "dog", "frog", "bird", "fox", "mouse", "goat", "duck"]
PLACES = ["the garden", "the river", "the old mill", "the market", "the hill", "the kitchen", "the beach"]
THINGS = ["a red ball", "a small key", "a green hat", "a warm bun", "a blue stone", "a tin drum", "a kite"]
FEELINGS = ["sad", "happy", "afraid", "proud", "tired", "curious"]
STARTS = ["Once upon a time", "One day", "On a rainy morning", "Long ago", "Last summer"]
TURNS = [
    "{name} looked everywhere, but {thing} was gone.",
    'The {animal} said, "Do not be {feeling}. I will help you."',
    "They walked to {place} and sat down to think.",
    "{friend} came along and asked what was wrong.",
    '"I had {thing}, and now I cannot find it," said {name}.',
    "The wind blew, and something moved behind the tree.",
    "{name} felt {feeling}, but went on.",
    "Under a leaf, near {place}, there it was!",
]
ENDS = [
    "{name} thanked the {animal}, and they were friends from then on.",
    "They all went home, and {name} slept well that night.",
    '"Next time I will share it," said {name}. And so it was.',
]


def story(number: int) -> str:
    """The story of that number, always the same: 5 to 40 sentences."""
    chance = random.Random(number)
    name, friend = chance.sample(NAMES, 2)
    words = {
        "name": name,
        "friend": friend,
        "animal": chance.choice(ANIMALS),
        "place": chance.choice(PLACES),
        "thing": chance.choice(THINGS),
        "feeling": chance.choice(FEELINGS),
    }
    begin = f"{chance.choice(STARTS)}, {name} and a little {words['animal']} went to {words['place']}."
    middle = [chance.choice(TURNS) for _ in range(chance.randint(3, 38))]
    return " ".join([begin, *middle, chance.choice(ENDS)]).format(**words)


def main(directory: str, stories: int = 2000) -> None:
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    with (path / "stories.jsonl").open("w", encoding="utf-8") as file:
        for number in range(stories):
            file.write(json.dumps({"text": story(number)}) + "\n")
    print(f"{path / 'stories.jsonl'}: {stories} stories")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "stories")
