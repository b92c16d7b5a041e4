//! One program for all numbers that a function is given: of two runs of it with other numbers.
//!
//! In each run a number that is an argument stands for itself where the function records it, as a value that nothing else
//! has. What the two runs recorded is compared: where the numbers stand, a call has its own, as it has those of tensors in
//! host memory. Where anything else differs, something was made of a number that nobody has seen.

use crate::config::Switches;
use crate::recipe::{Argument, GraphOutput, Layout, Recipe, Source, Whole};
use crate::value::{Held, State};
use oxitorch_hlo::{DType, Dims};
use std::sync::Arc;

/// What stands for a number that is an argument, in each of the two runs.
#[derive(Clone, Copy, Debug)]
pub struct Stands {
    dtype: DType,
    /// Its bytes.
    runs: [[u8; 8]; 2],
}

impl Stands {
    /// For a float.
    pub fn float(runs: [f64; 2]) -> Stands {
        Stands { dtype: DType::F64, runs: runs.map(f64::to_le_bytes) }
    }

    /// For an int.
    pub fn int(runs: [i64; 2]) -> Stands {
        Stands { dtype: DType::S64, runs: runs.map(i64::to_le_bytes) }
    }
}

impl Recipe {
    /// The recipe of a function that was run twice, and takes these numbers as tensors in host memory (0-d), behind its
    /// arguments. Or why there is none.
    pub fn numbered(
        &self,
        other: &Recipe,
        numbers: &[Stands],
        switches: &Switches,
    ) -> Result<Recipe, &'static str> {
        let Some(whole) = &self.whole else { return Err("it computes nothing") };
        if self.switches != switches.word() || other.switches != self.switches {
            return Err("the switches of the device changed");
        }
        if !self.is_like(other) {
            return Err("what is computed depends on it");
        }
        let mut given = Vec::with_capacity(self.numbers.len());
        for (a, b) in self.numbers.iter().zip(&other.numbers) {
            // Numbers that stay are one value each.
            if Arc::ptr_eq(a.value(), b.value()) {
                given.push(None);
                continue;
            }
            let (pair, dtype) = ([bytes(a), bytes(b)], a.value().ty.dtype);
            let is = |n: &Stands| {
                let stand = |at: usize| pair[at].as_deref() == Some(&n.runs[at][..]);
                n.dtype == dtype && stand(0) && stand(1)
            };
            let at = numbers.iter().position(is).ok_or("a number is made of it while it is recorded")?;
            given.push(Some(at as u32));
        }
        let first = self.arguments.len() as u32;
        let source = |s: &Source| match *s {
            Source::Number(i) => given[i as usize].map_or(*s, |at| Source::Host(first + at)),
            _ => *s,
        };
        let argument = |n: &Stands| Argument {
            layout: Layout {
                dtype: n.dtype,
                sizes: Dims::new(),
                strides: Dims::new(),
                offset: 0,
                conj: false,
                neg: false,
            },
            storage: None,
        };
        let output = |o: &GraphOutput| GraphOutput {
            home: o.home,
            layout: o.layout.clone(),
            contiguous: o.contiguous,
        };
        Ok(Recipe {
            device: self.device,
            switches: self.switches,
            arguments: self.arguments.iter().cloned().chain(numbers.iter().map(argument)).collect(),
            types: self.types.clone(),
            insts: self.insts.clone(),
            sites: self.sites.clone(),
            operands: self.operands.iter().map(source).collect(),
            offsets: self.offsets.clone(),
            numbers: self.numbers.clone(),
            drawn: self.drawn.clone(),
            written: self.written.iter().map(|(at, s)| (*at, source(s))).collect(),
            made: self.made.iter().map(|(bytes, s)| (*bytes, s.as_ref().map(source))).collect(),
            outputs: self.outputs.iter().map(output).collect(),
            whole: Some(Whole {
                ends_step: whole.ends_step,
                donated: whole.donated.clone(),
                shape: Default::default(),
                bound: Default::default(),
            }),
        })
    }

    /// Whether it is the same but for numbers.
    fn is_like(&self, other: &Recipe) -> bool {
        let insts = |r: &Recipe| r.insts.iter().map(|inst| inst.id).collect::<Vec<_>>();
        let arguments =
            |r: &Recipe| r.arguments.iter().map(|a| (a.layout.clone(), a.storage)).collect::<Vec<_>>();
        let outputs = |r: &Recipe| r.outputs.iter().map(|o| (o.home, o.layout.clone())).collect::<Vec<_>>();
        self.device == other.device
            && insts(self) == insts(other)
            && self.operands == other.operands
            && self.offsets == other.offsets
            && self.numbers.len() == other.numbers.len()
            && self.drawn == other.drawn
            && self.written == other.written
            && self.made == other.made
            && arguments(self) == arguments(other)
            && outputs(self) == outputs(other)
    }
}

/// A number, if it is still on the host.
fn bytes(number: &Held) -> Option<Vec<u8>> {
    match &*number.value().state.lock() {
        State::Host(bytes) => Some(bytes.to_vec()),
        _ => None,
    }
}
