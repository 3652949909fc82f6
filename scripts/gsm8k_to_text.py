#!/usr/bin/env python3
"""Turns GSM8K's rows ({"question", "answer"}, one JSON object a line) into {"text"} rows that `umbra train --data` reads.

    scripts/gsm8k_to_text.py test.jsonl > gsm8k.jsonl
"""
import argparse
import json
import sys


def main():
    parser = argparse.ArgumentParser(description="GSM8K question and answer rows to text rows, on standard output.")
    parser.add_argument("input", type=argparse.FileType("r", encoding="utf-8"), help="GSM8K JSONL file, or - for standard input")
    parser.add_argument("--limit", type=int, help="stop after this many rows")
    args = parser.parse_args()
    written = 0
    for number, line in enumerate(args.input, 1):
        if args.limit is not None and written >= args.limit:
            break
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            text = f"Question: {row['question']}\nAnswer: {row['answer']}"
        except (ValueError, KeyError, TypeError) as error:
            sys.exit(f"{args.input.name}:{number}: expected an object with question and answer: {error!r}")
        print(json.dumps({"text": text}))
        written += 1


if __name__ == "__main__":
    main()
