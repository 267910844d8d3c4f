"""A chat and a completion, on the small model in this repository or on yours.

Run `python example.py`, or `python example.py --model ~/models/Qwen3-0.6B`.
"""

import argparse
from pathlib import Path

from nanovllm import LLM, SamplingParams

DEMO_MODEL = Path(__file__).parent / "tests" / "tiny-qwen3"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEMO_MODEL, help="a model directory or a hub id")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    args = parser.parse_args()

    with LLM(args.model, tensor_parallel_size=args.tensor_parallel_size) as llm:
        conversations = [
            [{"role": "user", "content": question}] for question in ("12+34=", "71-26=", "8+15=")
        ]
        answers = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=256))
        for (message,), answer in zip(conversations, answers, strict=True):
            print(f"{message['content']!r} -> {answer['text']!r}")

        beginnings = ["In the beginning", "Call me Ishmael.", "And the LORD said unto"]
        params = SamplingParams(temperature=0.6, max_tokens=40, seed=1)
        for output in llm.generate(beginnings, params):
            print(f"{output.prompt!r} -> {output.outputs[0].text!r}")


if __name__ == "__main__":  # tensor parallel starts processes that import this file
    main()
