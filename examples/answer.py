"""Lets an exported model answer held-out conversations, and prints its answers beside theirs.

python examples/answer.py MODEL_DIRECTORY CHATS.jsonl [NUMBER]

CHATS.jsonl has {"messages": [{"role": …, "content": …}, …]} on each line, of which the last is the answer.
The prompt is all messages before it, written by the chat template of the tokenizer in MODEL_DIRECTORY.
"""

import json
import sys
from itertools import islice
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer


def main(directory: str, chats: str, number: str = "5") -> None:
    if not Path(directory, "config.json").is_file():
        sys.exit(
            f"error: {directory} has no config.json, so it is not an exported model.\n"
            f"  try: fullshard ckpt export RUN_DIRECTORY {directory}-hf --format hf, and then {directory}-hf"
        )
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    with open(chats, encoding="utf-8") as file:
        for line in islice(file, int(number)):
            *prompt, expected = json.loads(line)["messages"]
            tokens = tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            generated = model.generate(**tokens, max_new_tokens=200, do_sample=False)
            answer = tokenizer.decode(generated[0, tokens["input_ids"].shape[1] :], skip_special_tokens=True)
            for name, text in (
                *((one["role"], one["content"]) for one in prompt),
                ("expected", expected["content"]),
            ):
                print(f"{name:<10} {text}")
            print(f"{'answer':<10} {answer}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
