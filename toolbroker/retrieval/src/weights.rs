//! What words and meaning are worth beside each other.

use crate::Method;

/// What each side is worth.
#[derive(Clone, Copy)]
pub(crate) struct Weights {
    meaning: f32,
    words: f32,
    /// An intent that says what the first sentence of a description does.
    pub(crate) alike: f32,
    /// The best sentence, beside the whole.
    pub(crate) sentence: f32,
    /// What a tool adds to what the tools before it have of each sentence.
    pub(crate) coverage: f32,
}

impl Weights {
    pub(crate) fn of(method: Method) -> Self {
        let fused = Self { meaning: 1.0, words: 0.015, alike: 0.4, sentence: 0.3, coverage: 2.0 };
        let alone = Self { alike: 0.0, sentence: 0.0, coverage: 0.0, ..fused };
        match method {
            Method::Fused => fused,
            Method::Lexical => Self { meaning: 0.0, ..alone },
            Method::Embedding => Self { words: 0.0, ..alone },
        }
    }

    pub(crate) fn fuse(self, cosine: f32, words: f32) -> f32 {
        self.meaning * cosine + self.words * words
    }
}
