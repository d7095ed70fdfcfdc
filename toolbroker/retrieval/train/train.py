"""Makes the table of word vectors that retrieval ships: ../data/table.bin.

A text's vector is the weighted sum of its tokens' rows, so embedding a request
costs a few additions where the teacher runs six layers. The rows start from
what the teacher says of each token alone, and are then moved until the sums
say what the teacher says of whole texts, and that a request is near what it
asks for (asked.py). Seeded throughout: the same versions (requirements.txt) on
the same kind of CPU, with one thread, make the same table.

    apt-get download wordnet-base; dpkg -x wordnet-base_*.deb wn
    apt-get -o Acquire::Languages=en update
    pip install -r requirements.txt
    OMP_NUM_THREADS=1 python train.py --wordnet wn/usr/share/wordnet \\
        --debian /var/lib/apt/lists/*_main_i18n_Translation-en* --out ../data/table.bin
"""

import argparse
import hashlib
import pathlib
import random
import struct
import sys
import time

import lz4.frame
import numpy as np
from scipy import sparse

import asked
import corpus
import teacher

DIMENSIONS = 256
SIF = 5e-4
# Runs from the same start, of which the mean is kept: steps, and what telling
# pairs apart and telling requests apart are worth beside saying what the
# teacher says. One run alone learns its own texts too well, and more steps make
# that worse.
RUNS = [
    *[(300, 0.3, 0.0), (480, 0.0, 0.0)],
    *[(300, 0.3, 0.3), (480, 0.0, 0.3)] * 2,
]
BATCH = 1024
PAIRS = 512
RATE = 0.01
ASKED = 40_000
DROPOUT = 0.3
TEMPERATURE = 0.05


def unit(rows):
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9)


def bags(rows, columns, kept):
    """(1 + ln tf) of each kept token of each text, sparse."""
    indptr, indices, data = [0], [], []
    for ids in rows:
        counts = {}
        for token in ids:
            if kept[token]:
                counts[token] = counts.get(token, 0) + 1
        indices.extend(counts)
        data.extend(1 + np.log(n) for n in counts.values())
        indptr.append(len(indices))
    return sparse.csr_matrix((np.array(data, np.float32), indices, indptr), (len(rows), columns))


def dropped(bag, dice):
    """The same texts with some tokens gone."""
    data = bag.data * (dice.random(len(bag.data)) >= DROPOUT)
    return sparse.csr_matrix((data.astype(np.float32), bag.indices, bag.indptr), bag.shape)


class Adam:
    """Adam over rows; those that a batch does not touch stand still."""

    def __init__(self, shape):
        self.mean = np.zeros(shape, np.float32)
        self.square = np.zeros(shape, np.float32)
        self.step = 0

    def move(self, table, grad, rows, rate):
        self.step += 1
        self.mean[rows] = 0.9 * self.mean[rows] + 0.1 * grad
        self.square[rows] = 0.999 * self.square[rows] + 0.001 * grad * grad
        mean = self.mean[rows] / (1 - 0.9**self.step)
        square = self.square[rows] / (1 - 0.999**self.step)
        table[rows] -= rate * mean / (np.sqrt(square) + 1e-8)


def through_unit(sums, grad):
    """The gradient of a sum, from that of its unit vector."""
    norms = np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), 1e-9)
    units = sums / norms
    return (grad - (grad * units).sum(axis=1, keepdims=True) * units) / norms


def contrast(left, right, same=None):
    """Symmetric InfoNCE, and its gradients by the unit vectors. Where `same`
    says that two pairs are of one kind, they need not be told apart."""
    logits = left @ right.T / TEMPERATURE
    n = len(left)
    if same is not None:
        logits[same & ~np.eye(n, dtype=bool)] = -50
    loss, grad = 0.0, np.zeros_like(logits)
    for axis in (1, 0):
        shifted = np.exp(logits - logits.max(axis=axis, keepdims=True))
        p = shifted / shifted.sum(axis=axis, keepdims=True)
        loss -= np.log(np.maximum(np.diag(p), 1e-12)).mean() / 2
        grad += (p - np.eye(n, dtype=np.float32)) / (2 * n)
    grad /= TEMPERATURE
    return loss, grad @ right, grad.T @ left


class Apart:
    """Pairs of texts that are to be told apart from all others: `PAIRS` of
    them a step, with some tokens gone."""

    def __init__(self, left, right, kinds=None):
        self.left, self.right, self.kinds = left, right, kinds

    def some(self, dice):
        chosen = dice.choice(self.left.shape[0], PAIRS, replace=False)
        same = None
        if self.kinds is not None:
            same = self.kinds[chosen][:, None] == self.kinds[chosen][None, :]
        return dropped(self.left[chosen], dice), dropped(self.right[chosen], dice), same


def train(table, bag, targets, apart, dice, steps):
    """`apart`: [(pairs, what they are worth)]"""
    table = table.copy()
    adam = Adam(table.shape)
    apart = [(pairs, worth) for pairs, worth in apart if worth]
    for step in range(steps):
        rate = RATE * (1 - step / steps)
        chosen = dice.choice(len(targets), BATCH, replace=False)
        drawn = [pairs.some(dice) for pairs, _ in apart]
        some = sparse.vstack([bag[chosen], *(side for pair in drawn for side in pair[:2])]).tocsr()
        # Only the rows that stand in these texts.
        touched, places = np.unique(some.indices, return_inverse=True)
        some = sparse.csr_matrix((some.data, places, some.indptr), (some.shape[0], len(touched)))
        sums = some @ table[touched]
        grad = np.zeros_like(sums)
        cosine = (unit(sums[:BATCH]) * targets[chosen]).sum(axis=1).mean()
        grad[:BATCH] = through_unit(sums[:BATCH], -8.0 / BATCH * targets[chosen])

        losses = []
        for at, (_, worth), (_, _, same) in zip(range(BATCH, len(sums), 2 * PAIRS), apart, drawn):
            left, right = slice(at, at + PAIRS), slice(at + PAIRS, at + 2 * PAIRS)
            loss, by_left, by_right = contrast(unit(sums[left]), unit(sums[right]), same)
            grad[left] = through_unit(sums[left], worth * by_left)
            grad[right] = through_unit(sums[right], worth * by_right)
            losses.append(f"{loss:.4f}")

        adam.move(table, some.T @ grad, touched, rate)
        if step % 40 == 0 or step == steps - 1:
            print(f"step {step}: cosine {cosine:.4f}, apart {losses}", file=sys.stderr, flush=True)
    return table


def write(path, tokens, table):
    """`forgetb1`, rows, dimensions; a scale for each row; the rows in int8;
    the tokens, each ended by a line feed. Little-endian."""
    scales = np.abs(table).max(axis=1) / 127
    scales[scales == 0] = 1
    rows = np.rint(table / scales[:, None]).astype(np.int8)
    words = "".join(token + "\n" for token in tokens).encode("ascii")
    head = b"forgetb1" + struct.pack("<II", *rows.shape)
    path.write_bytes(head + scales.astype("<f4").tobytes() + rows.tobytes() + words)


def main():
    flags = argparse.ArgumentParser()
    flags.add_argument("--wordnet", type=pathlib.Path, required=True)
    flags.add_argument("--debian", type=pathlib.Path, required=True)
    flags.add_argument("--out", type=pathlib.Path, required=True)
    flags.add_argument("--texts", type=int, default=100_000)
    flags.add_argument("--seed", type=int, default=1)
    flags.add_argument("--taught", type=pathlib.Path, help="keep the teacher's vectors here, or take them from here")
    flags = flags.parse_args()
    started = time.monotonic()

    compressed = flags.debian.suffix == ".lz4"
    with lz4.frame.open(flags.debian, "rb") if compressed else open(flags.debian, "rb") as file:
        debian = file.read().decode()
    texts, pairs = corpus.build(flags.wordnet, debian, flags.texts, flags.seed)
    digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()
    print(f"{len(texts)} texts, {len(pairs)} pairs, sha256 {digest}", file=sys.stderr)

    miniLM = teacher.Teacher()
    tokens = miniLM.vocabulary()
    cls, sep = tokens.index("[CLS]"), tokens.index("[SEP]")
    rows = miniLM.tokens(texts)
    if flags.taught and flags.taught.exists():
        taught = np.load(flags.taught)
        assert str(taught["digest"]) == digest, "these vectors are of other texts"
        of_texts, of_tokens = taught["texts"], taught["tokens"]
    else:
        of_texts = miniLM.embed(rows, "texts")
        of_tokens = miniLM.embed([[cls, token, sep] for token in range(len(tokens))], "tokens")
        if flags.taught:
            np.savez(flags.taught, texts=of_texts, tokens=of_tokens, digest=digest)

    mean = of_texts.mean(axis=0)
    centred = of_texts - mean
    values, vectors = np.linalg.eigh(centred.T @ centred)
    axes = vectors[:, ::-1][:, :DIMENSIONS]
    axes *= np.sign(axes[np.abs(axes).argmax(axis=0), np.arange(DIMENSIONS)])
    print(f"variance kept: {values[::-1][:DIMENSIONS].sum() / values.sum():.3f}", file=sys.stderr)
    targets = unit(centred @ axes)

    # Only letters and digits in ASCII: a request's other characters are dropped.
    kept = np.array([t.isascii() and t.removeprefix("##").isalnum() for t in tokens])
    bag = bags(rows, len(tokens), kept)
    counts = np.bincount(bag.indices, minlength=len(tokens)) + 0.5
    table = (of_tokens - mean) @ axes * (SIF / (SIF + counts / counts.sum()))[:, None]
    table = (table / np.linalg.norm(table[kept], axis=1).mean()).astype(np.float32)
    table[~kept] = 0

    targets = targets.astype(np.float32)
    pairs = np.array(pairs)
    pairs = Apart(bag[pairs[:, 0]], bag[pairs[:, 1]])
    requests, described, subject = zip(*asked.asked(flags.wordnet, random.Random(flags.seed), ASKED))
    sides = (bags(miniLM.tokens(side), len(tokens), kept) for side in (requests, described))
    requests = Apart(*sides, np.array(subject))
    mean_of_runs = np.zeros_like(table)
    for seed, (steps, *worth) in enumerate(RUNS, flags.seed):
        apart = list(zip((pairs, requests), worth))
        run = train(table, bag, targets, apart, np.random.default_rng(seed), steps)
        mean_of_runs += run / len(RUNS)
    table = mean_of_runs
    place = np.flatnonzero(kept)
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    write(flags.out, [tokens[i] for i in place], table[place])
    size, seconds = flags.out.stat().st_size, time.monotonic() - started
    print(f"{flags.out}: {len(place)} rows, {size} bytes, {seconds:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
