//! Ops without a row that have a decomposition in Python: the kinds of their calls, each recorded by a recipe of its own.

use crate::arguments::{Item, encode_number};
use crate::call::ArgRef;
use crate::inst::Key;
use oxitorch_aten::{ParamKind, Schema};
use parking_lot::Mutex;
use rustc_hash::FxHashMap;

/// Kinds of calls of one overload that have recipes; others are decomposed each time.
const MAX_KINDS: usize = 1024;

/// An overload without a row, which may have a decomposition.
#[derive(Debug)]
pub struct Decomposed {
    /// Positions of arguments that no decomposition takes: layouts and memory formats.
    refused: Vec<usize>,
    kinds: Mutex<Kinds>,
}

#[derive(Debug, Default)]
struct Kinds {
    /// It is known that it has none.
    none: bool,
    /// What tells kinds of calls apart, and the number of each.
    numbers: FxHashMap<Box<[i64]>, i64>,
}

impl Decomposed {
    /// For an overload that a recipe can record: it gives new tensors and writes nothing.
    pub fn bind(schema: &Schema) -> Option<Decomposed> {
        let tensors = schema.returns.iter().all(|r| r.ty == "Tensor" && r.alias.is_none());
        if !tensors || schema.returns.is_empty() || schema.args.iter().any(|a| a.alias.is_some()) {
            return None;
        }
        let refused = |ty: &str| ty.starts_with("Layout") || ty.starts_with("MemoryFormat");
        let refused = schema.args.iter().enumerate().filter(|(_, a)| refused(&a.ty)).map(|(i, _)| i);
        Some(Decomposed { refused: refused.collect(), kinds: Mutex::default() })
    }

    /// Notes that it has no decomposition.
    pub fn has_none(&self) {
        self.kinds.lock().none = true;
    }

    /// The number of this kind of call: `number` gives it to a new one. 0 if there are too many kinds already; `None` if
    /// no decomposition takes the arguments.
    pub fn kind(&self, args: &[ArgRef<'_>], number: impl FnOnce() -> i64) -> Option<i64> {
        if self.refused.iter().any(|&i| !matches!(args.get(i), Some(ArgRef::None))) {
            return None;
        }
        let mut kinds = self.kinds.lock();
        if kinds.none {
            return None;
        }
        let mut key = Key::default();
        for arg in args {
            if let ArgRef::Numbers(list) = arg {
                key.word(list.len() as u64);
                list.iter().for_each(|n| encode_number(*n, false, &mut key));
            } else {
                Item::of(arg).ok()?.encode(ParamKind::Attr, false, &mut key).ok()?;
            }
        }
        if let Some(known) = kinds.numbers.get(key.words()) {
            return Some(*known);
        }
        if kinds.numbers.len() >= MAX_KINDS {
            return Some(0);
        }
        let number = number();
        kinds.numbers.insert(key.words().into(), number);
        Some(number)
    }
}
