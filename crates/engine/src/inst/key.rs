//! What a call is found by.

use oxitorch_aten::lower::Dest;
use oxitorch_hlo::TensorType;

/// A call as words: op, types and attributes.
#[derive(Debug, Default)]
pub(crate) struct Key(Vec<i64>);

impl Key {
    /// A key that begins with a word, in the memory of an old one.
    pub(crate) fn anew(mut self, word: u64) -> Key {
        self.0.clear();
        self.0.push(word as i64);
        self
    }

    /// Its words.
    pub(crate) fn words(&self) -> &[i64] {
        &self.0
    }

    /// Adds a word.
    pub(crate) fn word(&mut self, word: u64) {
        self.0.push(word as i64);
    }

    /// Adds a list of integers under a tag.
    pub(crate) fn list(&mut self, tag: u64, ints: &[i64]) {
        self.word(tag | (ints.len() as u64) << 8);
        self.ints(ints);
    }

    /// Adds integers; their number must already be in the key.
    pub(crate) fn ints(&mut self, ints: &[i64]) {
        self.0.extend_from_slice(ints);
    }

    /// Adds a type under a tag.
    pub(super) fn ty(&mut self, tag: u64, ty: &TensorType) {
        self.word(tag | (ty.dtype as u64) << 8 | (ty.shape.len() as u64) << 16);
        self.ints(&ty.shape);
    }

    /// Adds where a result goes.
    pub(crate) fn dest(&mut self, dest: &Dest) {
        match dest {
            Dest::New => self.word(1),
            Dest::Cast(dtype) => self.word(2 | (*dtype as u64) << 8),
            Dest::Into(ty) => self.ty(3, ty),
            Dest::Refill(ty) => self.ty(4, ty),
            Dest::Resized(dtype) => self.word(5 | (*dtype as u64) << 8),
        }
    }
}
