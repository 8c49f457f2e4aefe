//! Digests over what both sides must agree on.

use kvferry_layout::{Digest, Role};

/// Bytes to be hashed: every item of fixed width, or after its length, so that no two lists of items read the same.
pub(crate) struct Transcript(Vec<u8>);

impl Transcript {
    /// `subject` keeps digests of different things apart.
    pub(crate) fn new(subject: &str) -> Self {
        let mut transcript = Self(Vec::new());
        transcript.text(subject);
        transcript
    }

    pub(crate) fn word(&mut self, word: impl Into<u64>) {
        self.0.extend_from_slice(&word.into().to_le_bytes());
    }

    pub(crate) fn words(&mut self, words: &[u64]) {
        for word in words {
            self.word(*word);
        }
    }

    pub(crate) fn text(&mut self, text: &str) {
        self.word(text.len() as u64);
        self.0.extend_from_slice(text.as_bytes());
    }

    pub(crate) fn role(&mut self, role: &Role) {
        // A named role must not read as the built-in one that prints the same.
        self.word(u32::from(matches!(role, Role::Named(_))));
        self.text(&role.to_string());
    }

    pub(crate) fn digest(&mut self, digest: Digest) {
        self.0.extend_from_slice(&digest.0.to_le_bytes());
    }

    pub(crate) fn finish(&self) -> Digest {
        Digest::of(&self.0)
    }
}
