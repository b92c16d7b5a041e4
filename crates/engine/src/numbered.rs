//! One program for all numbers that a function is given: of runs of it with other numbers.
//!
//! In each run a number that is an argument stands for itself where the function records it, as a value that nothing else
//! has. What the runs recorded is compared: where the numbers stand, a call has its own, as it has those of tensors in host
//! memory. A position is no operand: where the offsets of the runs differ, they follow from positions by a factor and a
//! term. If several positions could be the one, a call goes by the recipe while all of them say the same. Where anything
//! else differs, something was made of a number that nobody has seen.

use crate::config::Switches;
use crate::recipe::{Argument, GraphOutput, Layout, Moving, Place, Recipe, Source, Whole};
use crate::value::{Held, State};
use oxitorch_hlo::{DType, Dims};
use std::sync::Arc;

/// A number that is an argument, in each of the runs.
#[derive(Clone, Debug)]
pub enum Stands {
    /// What stands for a float.
    Float(Vec<f64>),
    /// What stands for an int.
    Int(Vec<i64>),
    /// A position, as it is.
    Position(Vec<i64>),
}

impl Stands {
    fn dtype(&self) -> DType {
        match self {
            Stands::Float(_) => DType::F64,
            Stands::Int(_) | Stands::Position(_) => DType::S64,
        }
    }

    /// Its bytes in a run; none of a position, which is no operand.
    fn bytes(&self, run: usize) -> Option<[u8; 8]> {
        match self {
            Stands::Float(runs) => runs.get(run).map(|x| x.to_le_bytes()),
            Stands::Int(runs) => runs.get(run).map(|x| x.to_le_bytes()),
            Stands::Position(_) => None,
        }
    }

    fn positions(&self) -> Option<&[i64]> {
        match self {
            Stands::Position(runs) => Some(runs),
            _ => None,
        }
    }
}

impl Recipe {
    /// The recipe of a function that was run several times, this one and the others, which takes these numbers as tensors in
    /// host memory (0-d), behind its arguments. Or why there is none.
    pub fn numbered(
        &self,
        others: &[&Recipe],
        numbers: &[Stands],
        switches: &Switches,
    ) -> Result<Recipe, &'static str> {
        let Some(whole) = &self.whole else { return Err("it computes nothing") };
        let word = switches.word();
        if self.switches != word || others.iter().any(|r| r.switches != word) {
            return Err("the switches of the device changed");
        }
        if !others.iter().all(|other| self.is_like(other)) {
            return Err("what is computed depends on it");
        }
        let runs: Vec<&Recipe> = std::iter::once(self).chain(others.iter().copied()).collect();
        let given = (0..self.numbers.len()).map(|at| {
            let own: Vec<&Held> = runs.iter().map(|r| &r.numbers[at]).collect();
            // Numbers that stay are one value each.
            if own.iter().all(|n| Arc::ptr_eq(n.value(), own[0].value())) {
                return Ok(None);
            }
            let stands = |n: &Stands| {
                let is = |(run, held): (usize, &&Held)| {
                    let own = bytes(held);
                    held.value().ty.dtype == n.dtype()
                        && own.is_some()
                        && own.as_deref() == n.bytes(run).as_ref().map(|b| &b[..])
                };
                own.iter().enumerate().all(is)
            };
            let at = numbers.iter().position(stands).ok_or("a number is made of it while it is recorded")?;
            Ok(Some(at as u32))
        });
        let given = given.collect::<Result<Vec<_>, &'static str>>()?;
        let taken = self.between.iter().flat_map(|b| b.how.sources());
        if taken.into_iter().any(|s| matches!(s, Source::Number(i) if given[i as usize].is_some())) {
            return Err("a collective takes it");
        }
        let moving = moving(&runs, numbers, self.arguments.len())?;
        let first = self.arguments.len() as u32;
        let source = |s: &Source| match *s {
            Source::Number(i) => given[i as usize].map_or(*s, |at| Source::Host(first + at)),
            _ => *s,
        };
        let argument = |n: &Stands| Argument {
            layout: Layout {
                dtype: n.dtype(),
                sizes: Dims::new(),
                strides: Dims::new(),
                offset: 0,
                conj: false,
                neg: false,
            },
            storage: None,
        };
        Ok(Recipe {
            device: self.device,
            switches: self.switches,
            arguments: self.arguments.iter().cloned().chain(numbers.iter().map(argument)).collect(),
            types: self.types.clone(),
            insts: self.insts.clone(),
            between: self.between.clone(),
            sites: self.sites.clone(),
            operands: self.operands.iter().map(source).collect(),
            offsets: self.offsets.clone(),
            moving,
            numbers: self.numbers.clone(),
            drawn: self.drawn.clone(),
            scratch: self.scratch.clone(),
            written: self.written.iter().map(|(at, s)| (*at, source(s))).collect(),
            made: self.made.iter().map(|(bytes, s)| (*bytes, s.as_ref().map(source))).collect(),
            outputs: self.outputs.iter().map(GraphOutput::again).collect(),
            whole: Some(Whole {
                ends_step: whole.ends_step,
                donated: whole.donated.clone(),
                ..Whole::default()
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
            && self.between.len() == other.between.len()
            && self.between.iter().zip(&other.between).all(|(a, b)| a.is_like(b))
            && self.operands == other.operands
            && self.offsets.len() == other.offsets.len()
            && self.numbers.len() == other.numbers.len()
            && self.drawn == other.drawn
            && self.written == other.written
            && self.scratch == other.scratch
            && self.made == other.made
            && arguments(self) == arguments(other)
            && outputs(self) == outputs(other)
    }
}

/// How the offsets that differ between runs follow from positions.
fn moving(runs: &[&Recipe], numbers: &[Stands], first: usize) -> Result<Vec<Moving>, &'static str> {
    let mut moving = Vec::new();
    for at in 0..runs[0].offsets.len() {
        let offsets: Vec<i64> = runs.iter().map(|r| r.offsets[at]).collect();
        if offsets.iter().all(|&o| o == offsets[0]) {
            continue;
        }
        let of = |(argument, n): (usize, &Stands)| {
            let positions = n.positions()?;
            let moved = positions.iter().position(|&p| p != positions[0])?;
            let (by, step) = (offsets[moved] - offsets[0], positions[moved] - positions[0]);
            let factor = (by % step == 0).then_some(by / step)?;
            let term = offsets[0] - factor.checked_mul(positions[0])?;
            let fits =
                positions.iter().zip(&offsets).all(|(&p, &o)| factor.wrapping_mul(p).wrapping_add(term) == o);
            fits.then_some(Place { argument: first + argument, factor, term })
        };
        let places: Vec<Place> = numbers.iter().enumerate().filter_map(of).collect();
        if places.is_empty() {
            return Err("a position is made of it that does not follow from it by a factor");
        }
        moving.push(Moving { at, places });
    }
    Ok(moving)
}

/// A number, if it is still on the host.
fn bytes(number: &Held) -> Option<Vec<u8>> {
    match &*number.value().state.lock() {
        State::Host(bytes) => Some(bytes.to_vec()),
        _ => None,
    }
}
