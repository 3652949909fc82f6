#!/usr/bin/env python3
"""Loads a model folder with transformers and, given what Umbra computed on it, compares the logits.

    scripts/check_hf.py umbra-out/model --prompt "Question: what is 2 + 3?"
    scripts/check_hf.py umbra-out/model --ids 1,17,42 --logits dump/dump.safetensors --dtype float32
    scripts/check_hf.py umbra-out/model --batch batch.json --logits dump/dump.safetensors

--batch is a JSON object with input_ids: a list of rows of the same length; --logits a safetensors file with a tensor
`logits` of [rows, tokens, vocabulary], or the same elements in a flatter shape. Exits 1 when they are further apart than --tolerance.
"""
import argparse
import json
import sys

import torch
import transformers
from safetensors.torch import load_file


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="model folder")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", help="text, tokenized with the folder's tokenizer")
    what.add_argument("--ids", help="token ids, separated by commas")
    what.add_argument("--batch", help="JSON file with input_ids")
    parser.add_argument("--logits", help="safetensors file to compare with")
    parser.add_argument("--tensor", default="logits", help="the tensor's name in that file (default: logits)")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="what transformers computes in")
    parser.add_argument("--attention", default="sdpa", choices=["sdpa", "eager"])
    parser.add_argument("--tolerance", type=float, help="largest relative distance that passes")
    parser.add_argument("--new-tokens", type=int, default=0, help="also continue the first row greedily")
    return parser.parse_args()


def input_rows(args):
    if args.prompt is not None:
        return transformers.AutoTokenizer.from_pretrained(args.model)(args.prompt, return_tensors="pt").input_ids
    if args.ids is not None:
        return torch.tensor([[int(i) for i in args.ids.split(",")]])
    with open(args.batch, encoding="utf-8") as file:
        return torch.tensor(json.load(file)["input_ids"])


def continuation(args, model, ids):
    """The first row's greedy continuation: text where the folder has a tokenizer, ids where not."""
    new = model.generate(ids[:1], max_new_tokens=args.new_tokens, do_sample=False)[0, ids.shape[1]:]
    if args.prompt is None:
        return new.tolist()
    return transformers.AutoTokenizer.from_pretrained(args.model).decode(new)


def compare(args, logits):
    ours = load_file(args.logits)[args.tensor].float()
    if ours.numel() != logits.numel():
        sys.exit(f"{args.logits}: expected logits of shape {tuple(logits.shape)}, found {tuple(ours.shape)}")
    difference = (ours.reshape(logits.shape) - logits).double()
    relative = (difference.norm() / logits.double().norm()).item()
    print(f"largest difference {difference.abs().max().item():.3e}, relative distance {relative:.3e}")
    if args.tolerance is not None and not relative <= args.tolerance:
        sys.exit(f"further apart than {args.tolerance:.3e}")


def main():
    args = parse()
    ids = input_rows(args)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        args.model, dtype=getattr(torch, args.dtype), attn_implementation=args.attention, output_loading_info=True)
    print(f"transformers {transformers.__version__}, torch {torch.__version__}: loaded {args.model}, "
          f"{model.num_parameters():,} parameters, computing in {args.dtype}")
    unexpected = {kind: names for kind, names in report.items() if names}
    if unexpected:
        sys.exit(f"tensors that do not fit the model: {unexpected}")
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=ids).logits.float()
    print(f"{ids.shape[0]} rows of {ids.shape[1]} tokens; the likeliest next token of each: {logits[:, -1].argmax(-1).tolist()}")
    if args.new_tokens:
        print(continuation(args, model, ids))
    if args.logits:
        compare(args, logits)


if __name__ == "__main__":
    main()
